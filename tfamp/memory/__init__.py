"""What a training step or a prediction will hold in memory, before it runs."""

from tfamp.memory.estimating import estimate_memory as estimate_memory
from tfamp.memory.records import MemoryEstimate as MemoryEstimate
from tfamp.memory.records import MemoryEstimates as MemoryEstimates
