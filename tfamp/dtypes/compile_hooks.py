"""What `compile` does for a managed model: heads first, then the loss scales."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import keras
from absl import logging

from tfamp.dtypes import model_dtypes, resolution
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import optimizers, structure, trainer
from tfamp.keras_hooks.layers import policy_of, update
from tfamp.loss_scale.loops import exact
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.loss_scale.rule import without_float16
from tfamp.loss_scale.tape import leave_alone


@contextlib.contextmanager
def previewed(model: keras.layers.Layer) -> Iterator[None]:
    """Shows inside the block what `compile` would make of a graph of layers.

    Which layers are heads is decided when the model is compiled or used; until then it
    may yet become a part of another model.
    """
    policy = policy_of(model)
    if structure.graph_of(model) is None or policy is None:
        yield
        return
    if policy.is_resolved:
        resolution.resolve(model)  # a Sequential may have grown since
        yield
        return
    with model_dtypes.restored(model):
        resolution.resolve(model)
        yield


_NAME = "loss_scale_optimizer"  # as Keras names the one that it wraps with
_WRAPPED: weakref.WeakSet[Any] = weakref.WeakSet()  # by `before_training`


def before_compile(model: keras.Model, arguments: dict[str, Any]) -> None:
    """Changes the arguments of `compile` so that float16 gets a loss scale.

    The wrapped optimizer is what `compile` is given, so a saved model's compile
    configuration holds it and its state survives any way of loading.
    """
    if policy_of(model) is None:
        resolution.meet_unmanaged(model)
    settings = resolution.settings_of(model)
    if settings is None:
        return
    if resolution.resolve(model):
        resolution.follow_plan(model, settings, must=True)
    if settings.jit_compile is not None and arguments.get("jit_compile") == "auto":
        arguments["jit_compile"] = settings.jit_compile
    optimizer = arguments.get("optimizer")
    if optimizer is None:
        return
    plain = keras.optimizers.get(optimizer)
    if not arguments.get("auto_scale_loss", True):
        arguments["optimizer"] = plain
        leave_alone(plain)
        return
    arguments["auto_scale_loss"] = False
    arguments["optimizer"] = scaled(plain, model, settings)
    _note_wrapping(model, plain, arguments["optimizer"])


def before_training(model: keras.Model) -> None:
    """Gives each further optimizer of a model a loss scale of its own.

    A model that is trained by several holds them under names that `compile` does not
    know, as `d_optimizer`, or in a list.
    """
    settings = resolution.settings_of(model)
    if settings is None:
        return

    def wrapped(optimizer: Any) -> Any:
        given = scaled(optimizer, model, settings)
        if given is not optimizer:
            _WRAPPED.add(given)
        return given

    names = optimizers.replace_optimizers(model, wrapped)
    if not names:
        return
    trainer.drop_traced_functions(model)
    logging.info(
        "The optimizers of model %r in %s got a `LossScaleOptimizer` around each. "
        "Pass `tfamp.LossScaleOptimizer(...)` for other settings.",
        model.name,
        ", ".join(f"`{name}`" for name in names),
    )


def scaled(optimizer: Any, model: keras.Model, settings: PolicySettings) -> Any:
    """Returns `optimizer` with the loss scale that `model` needs, if any.

    Keras's own wrapper is replaced by ours, with the state it has.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        return optimizer
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        return exact(optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        logging.info(
            "Optimizer %r is of your own class %s, so it scales the loss as that does. "
            "Derive it from `tfamp.LossScaleOptimizer` to judge steps on all replicas.",
            optimizer.name,
            type(optimizer).__name__,
        )
        return optimizer
    if settings.loss_scale is None:
        return optimizer
    options = dict(settings.loss_scale_options)
    if not resolution.computes_in(model, "float16"):
        given = without_float16(options)
        if given is None:
            return optimizer
        options = given
        if not options.get("dynamic", True):
            return LossScaleOptimizer(optimizer, name=_NAME, **options)
    factor = getattr(optimizer, "loss_scale_factor", None)
    if settings.loss_scale == "dynamic" and factor is None:
        return LossScaleOptimizer(optimizer, name=_NAME, **options)
    static: Any = settings.loss_scale
    if static == "dynamic":
        logging.info(
            "The optimizer's `loss_scale_factor=%r` becomes a static loss scale that "
            "skips non-finite steps.",
            factor,
        )
        static = factor
    optimizer.loss_scale_factor = None
    options.update(initial_scale=float(static), dynamic=False)
    return LossScaleOptimizer(optimizer, name=_NAME, **options)


def make_exact(model: keras.layers.Layer) -> None:
    """Gives a compiled model our optimizer in the place of Keras's own wrapper."""
    optimizer = getattr(model, "optimizer", None)
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        trainer.replace_optimizer(model, exact(optimizer))


def follow_policy(model: keras.layers.Layer, settings: PolicySettings) -> None:
    """Gives a model that is compiled already the optimizer its dtypes need.

    The inner optimizer is the same object before and after, with its slots.
    """
    if not resolution.computes_in(model, "float16"):
        optimizers.replace_optimizers(model, _plain)
    policy = policy_of(model)
    if policy is None or not trainer.is_compiled(model) or model.optimizer is None:
        return
    present = model.optimizer
    is_ours = policy.wrapped_optimizer
    if isinstance(present, keras.optimizers.LossScaleOptimizer) and is_ours:
        if resolution.computes_in(model, "float16"):
            return
        plain = present.inner_optimizer
    else:
        plain = present
    wanted = scaled(plain, model, settings)
    if wanted is not present:
        trainer.replace_optimizer(model, wanted)
    _note_wrapping(model, plain, wanted)


def _plain(optimizer: Any) -> Any:
    """Returns an optimizer without the scale that was put around it here."""
    is_ours = isinstance(optimizer, LossScaleOptimizer) and optimizer in _WRAPPED
    return optimizer.inner_optimizer if is_ours else optimizer


def _note_wrapping(model: keras.Model, plain: Any, given: Any) -> None:
    if policy_of(model) is not None:
        update(model, wrapped_optimizer=given is not plain)
