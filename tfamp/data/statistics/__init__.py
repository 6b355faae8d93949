"""Statistics of inputs in one pass, and the layer that applies them in the model."""

from tfamp.data.statistics.accumulators import fit_statistics as fit_statistics
from tfamp.data.statistics.conditioning import Condition as Condition
from tfamp.data.statistics.features import Column as Column
from tfamp.data.statistics.features import Feature as Feature
from tfamp.data.statistics.features import TextColumn as TextColumn
from tfamp.data.statistics.record import Statistics as Statistics
