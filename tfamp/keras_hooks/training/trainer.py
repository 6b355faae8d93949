"""Hooks on `compile`, and the traced functions a model keeps.

Relies on: `Trainer.compile` being what every model's `compile` ends in;
`train_function`, `test_function` and `predict_function` being rebuilt where
they are None; `_compile_config` being what is saved.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfamp.keras_hooks.backend import SharedTrainer
from tfamp.keras_hooks.patches import Patch, like


def patches(
    before_compile: Callable[[keras.Model, dict[str, Any]], None],
) -> list[Patch]:
    """Returns the patch on `compile`.

    Args:
        before_compile: Called with the model and the arguments of `compile`
            by name, defaults filled in, which it may change.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @like(original)
        def compile(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            before_compile(self, bound.arguments)
            return original(*bound.args, **bound.kwargs)

        return compile

    return [Patch(SharedTrainer, "compile", wrap)]


def drop_traced_functions(model: keras.layers.Layer) -> None:
    """Makes `model` trace anew at its next fit, evaluate and predict.

    A traced function keeps the dtypes it was traced with.
    """
    if isinstance(model, SharedTrainer):
        model.train_function = None
        model.test_function = None
        model.predict_function = None


def is_compiled(model: keras.layers.Layer) -> bool:
    """Returns whether `compile` has been called on `model`."""
    return isinstance(model, SharedTrainer) and bool(model.compiled)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns what a model's `compile` was called with; nothing if it was not."""
    config = getattr(model, "_compile_config", None)
    if not model.compiled or config is None:
        return {}
    return dict(config.config)


@contextlib.contextmanager
def compiled_as(model: keras.Model, **arguments: Any) -> Iterator[None]:
    """Compiles a model for as long as it lasts; afterwards it is as it was.

    Args:
        model: Compiled or not.
        **arguments: Of `compile`.
    """
    before = dict(vars(model))
    try:
        model.compile(**arguments)
        yield
    finally:
        # Past `__setattr__`, which would track what comes back as if it were new.
        for name in vars(model).keys() - before.keys():
            del vars(model)[name]
        vars(model).update(before)


def forget_training(model: keras.Model) -> None:
    """Takes from `model` what `compile` gave it, and freezes its weights."""
    model.trainable = False
    model.optimizer = None
    model.compiled = False
    model._compile_config = None


def replace_optimizer(model: keras.Model, optimizer: Any) -> None:
    """Gives a compiled `model` another optimizer, in what it saves too."""
    model.optimizer = optimizer
    config = getattr(model, "_compile_config", None)
    if config is not None:
        fresh = type(config)(optimizer=optimizer)
        config.config["optimizer"] = fresh.config["optimizer"]
