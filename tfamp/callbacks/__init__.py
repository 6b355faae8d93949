"""Callbacks for `fit`: what mixed precision does while a model trains."""

from tfamp.callbacks.monitor import PrecisionMonitor as PrecisionMonitor
