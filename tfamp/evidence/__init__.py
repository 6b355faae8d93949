"""Evidence on a policy as records: runs, measures, intervals, verdicts, context."""

from tfamp.evidence.evidence import Context as Context
from tfamp.evidence.evidence import Evidence as Evidence
from tfamp.evidence.evidence import OperationTime as OperationTime
from tfamp.evidence.intervals import Interval as Interval
from tfamp.evidence.runs import Latency as Latency
from tfamp.evidence.runs import LayerDtype as LayerDtype
from tfamp.evidence.runs import Memory as Memory
from tfamp.evidence.runs import Run as Run
from tfamp.evidence.runs import Spread as Spread
from tfamp.evidence.variant import Variant as Variant
from tfamp.evidence.verdict import Verdict as Verdict
from tfamp.evidence.verdict import judge as judge
