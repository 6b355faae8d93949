"""Input pipelines: `tfamp.data.Pipeline` in, a plain `tf.data.Dataset` out."""

from typing import TYPE_CHECKING

from tfamp.records import lazy_attributes

# Public name -> module that defines it; `bottleneck` stands above this package.
_HOMES = {
    "Bottleneck": "tfamp.stepping.input_waits",
    "Condition": "tfamp.data.layers",
    "Findings": "tfamp.records.findings",
    "Pipeline": "tfamp.data.pipeline",
    "Rescale": "tfamp.data.layers",
    "Statistics": "tfamp.data.statistics",
    "bottleneck": "tfamp.stepping.input_waits",
    "check": "tfamp.data.health",
    "fit_statistics": "tfamp.data.statistics",
}

if TYPE_CHECKING:
    from tfamp.data.health import check as check
    from tfamp.data.layers import Condition as Condition
    from tfamp.data.layers import Rescale as Rescale
    from tfamp.data.pipeline import Pipeline as Pipeline
    from tfamp.data.statistics import Statistics as Statistics
    from tfamp.data.statistics import fit_statistics as fit_statistics
    from tfamp.records.findings import Findings as Findings
    from tfamp.stepping.input_waits import Bottleneck as Bottleneck
    from tfamp.stepping.input_waits import bottleneck as bottleneck
else:
    __getattr__, __dir__ = lazy_attributes(__name__, _HOMES)
