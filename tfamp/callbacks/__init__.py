"""Callbacks for `fit`: what happens while a model trains."""

import sys
from typing import TYPE_CHECKING, Any

from tfamp import _advice
from tfamp.callbacks.device_stats import DeviceStats as DeviceStats
from tfamp.callbacks.monitor import PrecisionMonitor as PrecisionMonitor
from tfamp.callbacks.nan_recovery import NanRecovery as NanRecovery
from tfamp.callbacks.nan_recovery import Recovery as Recovery
from tfamp.callbacks.nan_recovery import RecoveryError as RecoveryError
from tfamp.callbacks.resume import Resume as Resume
from tfamp.callbacks.throughput import Throughput as Throughput

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        package = sys.modules[__name__]
        message = f"module {__name__!r} has no attribute {name!r}{_advice(name)}"
        raise AttributeError(message, name=name, obj=package)
