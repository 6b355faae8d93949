"""Callbacks for `fit`: what happens while a model trains."""

from tfamp.callbacks.device_stats import DeviceStats as DeviceStats
from tfamp.callbacks.flight_recorder import FlightRecorder as FlightRecorder
from tfamp.callbacks.micro_batches import MicroBatches as MicroBatches
from tfamp.callbacks.micro_batches.split_steps import BatchSplit as BatchSplit
from tfamp.callbacks.monitor import PrecisionMonitor as PrecisionMonitor
from tfamp.callbacks.nan_recovery import NanRecovery as NanRecovery
from tfamp.callbacks.nan_recovery.attempts import Recovery as Recovery
from tfamp.callbacks.nan_recovery.attempts import RecoveryError as RecoveryError
from tfamp.callbacks.resume import Resume as Resume
from tfamp.callbacks.throughput import Throughput as Throughput
