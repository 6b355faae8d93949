"""Float32 against a policy: measured, judged and written up."""

from tfamp.compare.verdict import Interval as Interval
from tfamp.compare.verdict import Verdict as Verdict
from tfamp.compare.verdict import judge as judge
