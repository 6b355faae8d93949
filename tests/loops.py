"""Ways to run a step of a loop, a model's step, a spy on gradients, states by bits."""

import hashlib
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfamp.stepping.snapshots import State

DECORATORS = {
    "eager": lambda step: step,
    "graph": tf.function,
    "xla": tf.function(jit_compile=True),
}
# How `compile` has a model's own steps run.
COMPILED = {
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True},
}
in_each_way = pytest.mark.parametrize("decorate", DECORATORS.values(), ids=DECORATORS)


class OwnStep(keras.Model):
    """Has a `train_step` that scales its loss by hand; others take it by name."""

    def scaled(self, loss: Any) -> Any:
        """Returns what the tape is asked for; a tape records the call."""
        return self.optimizer.scale_loss(loss)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.scaled(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own_loss": loss}


class TrueStep(OwnStep):
    """Has a `train_step` that knows nothing of loss scales."""

    def scaled(self, loss: Any) -> Any:
        """Returns the loss as it is."""
        return loss


def spied(seen: list[Any]) -> Any:
    """Returns the identity, which notes the gradients that flow back through it."""

    @tf.custom_gradient
    def identity(value: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            seen.append(upstream)
            return upstream

        return tf.identity(value), gradient

    return identity


def same_bits(one: State, other: State) -> bool:
    """Returns whether two states hold the same bits under the same names.

    Metrics count too. NaN equals NaN of the same bits.
    """
    if one.arrays.keys() != other.arrays.keys():
        return False
    return all(
        array.dtype == other.arrays[name].dtype
        and array.shape == other.arrays[name].shape
        and array.tobytes() == other.arrays[name].tobytes()
        for name, array in one.arrays.items()
    )


def digest(model: keras.Model) -> str:
    """Returns a checksum of weights, statistics, seeds, slots and counters."""
    total = hashlib.sha256()
    for variable in (*model.variables, *model.optimizer.variables):
        total.update(f"{variable.dtype} {variable.shape}".encode())
        total.update(keras.ops.convert_to_numpy(variable).tobytes())
    return total.hexdigest()
