"""Mixed precision for Keras 3 on TensorFlow that is fast where it can be and right.

Names load on first use, so `import tfamp` costs no TensorFlow import:

    import tfamp
    tfamp.enable(policy="mixed_float16")    # before the model is built
"""

import functools
import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

# Public name -> module that defines it; a public subpackage is its own home, unless
# it has a function of its name.
_HOMES = {
    "LossScaleError": "tfamp.loss_scale.errors",
    "LossScaleOptimizer": "tfamp.loss_scale.optimizer",
    "apply": "tfamp.assignment",
    "assignment": "tfamp.assignment",
    "callbacks": "tfamp.callbacks",
    "compare": "tfamp.compare",
    "data": "tfamp.data",
    "disable": "tfamp.policy",
    "enable": "tfamp.policy",
    "estimate_memory": "tfamp.memory.estimating",
    "find_batch_size": "tfamp.batch_search",
    "freeze": "tfamp.serving.freezing",
    "lint": "tfamp.numerics.linting.linting",
    "load_model": "tfamp.assignment",
    "prove": "tfamp.numerics.proving",
    "ranges": "tfamp.numerics.ranging",
    "remat": "tfamp.training.remat",
    "scope": "tfamp.policy",
    "sensitivity": "tfamp.numerics.sensing",
    "status": "tfamp.policy",
    "training": "tfamp.training",
    "triage": "tfamp.numerics.triaging",
}
# What the functions above return, for annotations; editors do not list them.
_RESULTS = {
    "Assignment": "tfamp.assignment",
    "BatchSearch": "tfamp.batch_search",
    "Comparison": "tfamp.compare",
    "MemoryEstimate": "tfamp.memory.records",
    "Proof": "tfamp.numerics.proof",
    "Status": "tfamp.policy",
}


class _Package(types.ModuleType):
    """Keeps a public function in place when the submodule of its name is imported.

    The import system binds each imported submodule to its parent, so importing
    `tfamp/assignment.py` would turn `tfamp.assignment(model)` into a call of a
    module. `importlib.import_module("tfamp.assignment")` still gives the module.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and _HOMES.get(name) == value.__name__:
            value = vars(value).get(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Is pickled by its name: cloudpickle knows plain modules only."""
        return importlib.import_module, (self.__name__,)


@functools.cache
def _check_environment() -> None:
    """Checks once that Keras can be used here, and again as long as it cannot."""
    from tfamp import _versions

    _versions.check_environment()


def _imported(place: str) -> types.ModuleType:
    """Imports a module; says so where an untested Keras is why it cannot be."""
    try:
        return importlib.import_module(place)
    except (ImportError, AttributeError) as error:
        from tfamp import _versions

        text = _versions.blame_untested_keras(error)
        if text is None:
            raise
        from tfamp._patch import HookError

        raise HookError(text) from error


if TYPE_CHECKING:
    from tfamp import callbacks as callbacks
    from tfamp import data as data
    from tfamp import training as training
    from tfamp.assignment import Assignment as Assignment
    from tfamp.assignment import apply as apply
    from tfamp.assignment import assignment as assignment
    from tfamp.assignment import load_model as load_model
    from tfamp.batch_search import BatchSearch as BatchSearch
    from tfamp.batch_search import find_batch_size as find_batch_size
    from tfamp.compare import Comparison as Comparison
    from tfamp.compare import compare as compare
    from tfamp.loss_scale.errors import LossScaleError as LossScaleError
    from tfamp.loss_scale.optimizer import LossScaleOptimizer as LossScaleOptimizer
    from tfamp.memory.estimating import estimate_memory as estimate_memory
    from tfamp.memory.records import MemoryEstimate as MemoryEstimate
    from tfamp.numerics.linting.linting import lint as lint
    from tfamp.numerics.proof import Proof as Proof
    from tfamp.numerics.proving import prove as prove
    from tfamp.numerics.ranging import ranges as ranges
    from tfamp.numerics.sensing import sensitivity as sensitivity
    from tfamp.numerics.triaging import triage as triage
    from tfamp.policy import Status as Status
    from tfamp.policy import disable as disable
    from tfamp.policy import enable as enable
    from tfamp.policy import scope as scope
    from tfamp.policy import status as status
    from tfamp.serving.freezing import freeze as freeze
    from tfamp.training.remat import remat as remat
else:

    def __getattr__(name: str) -> Any:
        package = sys.modules[__name__]
        place = _HOMES.get(name) or _RESULTS.get(name)
        if place is None:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=package)
        _check_environment()
        home = _imported(place)
        is_package = hasattr(home, "__path__")
        value = getattr(home, name, home) if is_package else getattr(home, name)
        setattr(package, name, value)
        return value

    def __dir__() -> list[str]:
        dunders = {name for name in globals() if name.startswith("__")}
        return sorted(dunders.union(_HOMES))


sys.modules[__name__].__class__ = _Package
