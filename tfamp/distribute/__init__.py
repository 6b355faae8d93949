"""Training on several devices and machines: who takes part, and how they add up."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

# Public name -> module that defines it; loaded on first use, as not all need
# TensorFlow.
_HOMES = {
    "Cluster": "tfamp.machine.clusters.record",
    "cluster": "tfamp.machine.clusters.environment",
    "strategy": "tfamp.distribute.strategies",
}

if TYPE_CHECKING:
    from tfamp.distribute.strategies import strategy as strategy
    from tfamp.machine.clusters.environment import cluster as cluster
    from tfamp.machine.clusters.record import Cluster as Cluster
else:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
