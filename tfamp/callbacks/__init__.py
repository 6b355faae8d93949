"""Callbacks for `fit`: what happens while a model trains."""

from tfamp.callbacks._micro_course import BatchSplit as BatchSplit
from tfamp.callbacks._recovery_records import Recovery as Recovery
from tfamp.callbacks._recovery_records import RecoveryError as RecoveryError
from tfamp.callbacks.device_stats import DeviceStats as DeviceStats
from tfamp.callbacks.flight_recorder import FlightRecorder as FlightRecorder
from tfamp.callbacks.micro_batches import MicroBatches as MicroBatches
from tfamp.callbacks.monitor import PrecisionMonitor as PrecisionMonitor
from tfamp.callbacks.nan_recovery import NanRecovery as NanRecovery
from tfamp.callbacks.throughput import Throughput as Throughput
