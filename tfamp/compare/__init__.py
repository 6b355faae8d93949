"""Float32 against a policy: measured, judged and written up."""

from tfamp.compare.comparing import compare as compare
from tfamp.compare.comparison import Comparison as Comparison
