"""Where the time of training steps goes, by TensorFlow's own profiler."""

from tfamp.profiles.capturing import capture as capture
from tfamp.profiles.times import OperationTime as OperationTime
from tfamp.profiles.times import OperationTimes as OperationTimes
from tfamp.profiles.times import operation_times as operation_times
