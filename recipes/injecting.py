"""What a recipe's `--inject` does: a fault on purpose, to see it found and cured."""

import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import flags

import comparing

FAULTS = {
    "overflow_layer": "the layer 'overflow' has activations beyond 65504, the most "
    "that float16 holds; in other formats it changes nothing",
    "bad_batch": "the weights of the examples are NaN in the batch in the middle of "
    "each epoch",
    "bad_lr": "the learning rate is 1e4 times that of the flag",
    "mask": "the layer 'mask' multiplies a mask of zeros by -1e9, which float16 does "
    "not hold; in other formats it changes nothing",
}
_LEARNING_RATE_FACTOR = 1e4
# Squared, it takes values of size one out of float16's range; a power of two, so
# float32 and bfloat16 get back what they had, bit by bit.
_GAIN = 1024.0
_FAR = -1e9


def define_flags(values: flags.FlagValues) -> None:
    """Adds the flag `--inject`, which no comparison takes."""
    flags.DEFINE_enum(
        "inject",
        None,
        sorted(FAULTS),
        "Put a fault in, on purpose: "
        + "; ".join(f"{name}: {text}" for name, text in FAULTS.items())
        + ".",
        flag_values=values,
    )
    comparing.leave_out(
        values, "inject", "a comparison with a fault on purpose tells nothing"
    )


def announce(settings: types.SimpleNamespace) -> None:
    """Prints one line that says which fault is in, if any."""
    if settings.inject is not None:
        print(
            f"Injected fault {settings.inject}: {FAULTS[settings.inject]}.", flush=True
        )


def layer(inject: str | None, x: Any) -> Any:
    """Returns a symbolic tensor after the layer of a fault, itself where none has one.

    Args:
        inject: Value of the flag.
        x: Activations of size one.
    """
    if inject == "overflow_layer":
        return Overflow(name="overflow")(x)
    if inject == "mask":
        return Mask(name="mask")(x)
    return x


def batches(inject: str | None, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the batches `(x, y)`, with `bad_batch` a weight beside each target."""
    if inject != "bad_batch":
        return dataset
    num_batches = int(dataset.cardinality())
    if num_batches < 0:
        num_batches = sum(1 for _ in dataset)
    middle = num_batches // 2

    def weigh(index: Any, batch: Any) -> Any:
        x, y = batch
        weight = tf.where(index == middle, np.float32(np.nan), np.float32(1.0))
        return x, y, tf.fill(tf.shape(y), weight)

    weighed = dataset.enumerate().map(weigh)
    return weighed.apply(tf.data.experimental.assert_cardinality(num_batches))


def learning_rate(settings: types.SimpleNamespace) -> float:
    """Returns the learning rate of the flags, too high with `bad_lr`."""
    factor = _LEARNING_RATE_FACTOR if settings.inject == "bad_lr" else 1.0
    return settings.learning_rate * factor


@keras.saving.register_keras_serializable(package="recipes")
class Overflow(keras.layers.Layer):
    """Returns its inputs, by way of values a million times as large."""

    def build(self, input_shape: Any) -> None:
        """Makes the gain a weight: a constant would be folded away."""
        self.gain = self.add_weight(
            initializer=keras.initializers.Constant(_GAIN), trainable=False, name="gain"
        )

    def call(self, inputs: Any) -> Any:
        """Returns the inputs."""
        gain = keras.ops.cast(self.gain, inputs.dtype)
        large = inputs * gain * gain
        return large / gain / gain


@keras.saving.register_keras_serializable(package="recipes")
class Mask(keras.layers.Layer):
    """Returns its inputs, having added to them a mask that hides none of them."""

    def call(self, inputs: Any) -> Any:
        """Returns the inputs."""
        # By way of float32, so that NumPy does not warn of what is meant.
        far = keras.ops.cast(keras.ops.convert_to_tensor(_FAR, "float32"), inputs.dtype)
        is_hidden = keras.ops.cast(inputs < far, inputs.dtype)
        return inputs + is_hidden * far
