"""Input pipelines: `tfamp.data.Pipeline` in, a plain `tf.data.Dataset` out."""

from tfamp.data.augmentation import Augment as Augment
from tfamp.data.bottlenecks import Bottleneck as Bottleneck
from tfamp.data.bottlenecks import bottleneck as bottleneck
from tfamp.data.health import apply_fixes as apply_fixes
from tfamp.data.health import check as check
from tfamp.data.pipeline import Pipeline as Pipeline
from tfamp.data.rescaling import Rescale as Rescale
from tfamp.data.statistics import Condition as Condition
from tfamp.data.statistics import Statistics as Statistics
from tfamp.data.statistics import fit_statistics as fit_statistics
from tfamp.findings import Findings as Findings
