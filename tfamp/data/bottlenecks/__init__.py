"""Whether training waits for its input, its model, or both for the same cores."""

from tfamp.data.bottlenecks.measure import bottleneck as bottleneck
from tfamp.data.bottlenecks.record import Bottleneck as Bottleneck
