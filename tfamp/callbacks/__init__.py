"""Callbacks for `fit`: what happens while a model trains."""

from typing import TYPE_CHECKING

from tfamp.callbacks.device_stats import DeviceStats as DeviceStats
from tfamp.callbacks.monitor import PrecisionMonitor as PrecisionMonitor
from tfamp.callbacks.nan_recovery import NanRecovery as NanRecovery
from tfamp.callbacks.nan_recovery import Recovery as Recovery
from tfamp.callbacks.nan_recovery import RecoveryError as RecoveryError
from tfamp.callbacks.resume import Resume as Resume
from tfamp.callbacks.throughput import Throughput as Throughput
from tfamp.records import lazy_attributes

__all__ = ["DeviceStats", "NanRecovery", "PrecisionMonitor", "Recovery"]
__all__ += ["RecoveryError", "Resume", "Throughput"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_attributes(__name__, {})
