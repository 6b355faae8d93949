"""What `compile` does for a managed model: heads first, then the loss scale."""

from typing import Any

import keras

from tfamp._care import care_of, change_care
from tfamp.keras_hooks import trainer
from tfamp.managed import resolving
from tfamp.managed.lease import Lease


def before_compile(model: keras.Model, arguments: dict[str, Any]) -> None:
    """Changes the arguments of `compile` so that float16 gets a loss scale.

    The wrapped optimizer is what `compile` is given, so a saved model's compile
    configuration holds it and its state survives any way of loading.
    """
    if care_of(model) is None:
        resolving.meet_unmanaged(model)
    lease = resolving.care_lease(model)
    if lease is None:
        return
    resolving.resolve(model)
    optimizer = arguments.get("optimizer")
    if not arguments.get("auto_scale_loss", True) or optimizer is None:
        return
    arguments["auto_scale_loss"] = False
    plain = keras.optimizers.get(optimizer)
    arguments["optimizer"] = scaled(plain, model, lease)
    _note_wrapping(model, plain, arguments["optimizer"])


def scaled(optimizer: Any, model: keras.Model, lease: Lease) -> Any:
    """Returns `optimizer` with the loss scale that `model` needs, if any."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    if lease.loss_scale is None or not resolving.computes_in(model, "float16"):
        return optimizer
    if lease.loss_scale == "dynamic":
        return keras.optimizers.LossScaleOptimizer(
            optimizer, name="loss_scale_optimizer", **lease.loss_scale_options
        )
    optimizer.loss_scale_factor = float(lease.loss_scale)
    return optimizer


def follow_policy(model: keras.layers.Layer, lease: Lease) -> None:
    """Gives a model that is compiled already the optimizer its dtypes need.

    The inner optimizer is the same object before and after, with its slots.
    """
    care = care_of(model)
    if care is None or not trainer.is_compiled(model) or model.optimizer is None:
        return
    present = model.optimizer
    is_ours = care.wrapped_optimizer
    if isinstance(present, keras.optimizers.LossScaleOptimizer) and is_ours:
        if resolving.computes_in(model, "float16"):
            return
        plain = present.inner_optimizer
    else:
        plain = present
    wanted = scaled(plain, model, lease)
    if wanted is not present:
        trainer.replace_optimizer(model, wanted)
    _note_wrapping(model, plain, wanted)


def _note_wrapping(model: keras.Model, plain: Any, given: Any) -> None:
    if care_of(model) is not None:
        change_care(model, wrapped_optimizer=given is not plain)
