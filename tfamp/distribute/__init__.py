"""Training on several devices and machines: who takes part, and how they add up."""

from typing import TYPE_CHECKING

from tfamp.records import lazy_attributes

# Public name -> module that defines it; loaded on first use, as not all need
# TensorFlow.
_HOMES = {
    "Cluster": "tfamp.machine.clusters",
    "cluster": "tfamp.machine.clusters",
    "strategy": "tfamp.distribute.strategies",
}

if TYPE_CHECKING:
    from tfamp.distribute.strategies import strategy as strategy
    from tfamp.machine.clusters import Cluster as Cluster
    from tfamp.machine.clusters import cluster as cluster
else:
    __getattr__, __dir__ = lazy_attributes(__name__, _HOMES)
