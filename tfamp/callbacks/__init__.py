"""Callbacks for `fit`: what happens while a model trains."""

from tfamp.callbacks.device_stats import DeviceStats as DeviceStats
from tfamp.callbacks.flight_recorder.callback import FlightRecorder as FlightRecorder
from tfamp.callbacks.micro_batches.callback import MicroBatches as MicroBatches
from tfamp.callbacks.micro_batches.course import BatchSplit as BatchSplit
from tfamp.callbacks.monitor import PrecisionMonitor as PrecisionMonitor
from tfamp.callbacks.nan_recovery.callback import NanRecovery as NanRecovery
from tfamp.callbacks.nan_recovery.records import Recovery as Recovery
from tfamp.callbacks.nan_recovery.records import RecoveryError as RecoveryError
from tfamp.callbacks.throughput import Throughput as Throughput
