"""Layers for images inside the model: to its compute dtype, and changed at random."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.records import checks

# x + shift is exact in float32 for every x in [0, 255] if the shift is a multiple of
# 2**-15 and the sum stays below 2**9: 24 bits.
_FLOAT32_BITS = 24
_LARGEST_PIXEL = 255.0
# What float64 itself cannot tell, once `offset / scale` was computed in it.
_FLOAT64_NOISE = 4 * 2.0**-53


@keras.saving.register_keras_serializable(package="tfamp")
class Rescale(keras.layers.Layer):
    """Computes `x * scale + offset` for pixels, in the layer's compute dtype.

    Put it first in the model and feed it uint8: the batch is a quarter of float32's
    size on its way to the device. The sum is made in float32 before the product, as
    `(x + offset / scale) * scale`, and rounded once to the compute dtype. So float16
    and bfloat16 get the nearest value to the true one, and float32 one that is off by
    less than 2 units in the last place.

    `keras.layers.Rescaling` rounds scale, product and sum to the compute dtype one
    after another. To [-1, 1] (`1 / 127.5`, -1) its result is off by up to 128 units in
    the last place in bfloat16, 7.8 in float16: 82 % and 55 % of the 256 values are not
    the nearest. To [0, 1] it is off by 1.25 units in bfloat16 (49 %), 0.53 in float16
    (4 %). Only powers of two are exact in both.

    Args:
        scale: Factor, not 0; one number, or one for each channel (the last axis).
        offset: What is added after the factor; likewise.
        **kwargs: As for every layer: `name`, `dtype`, ...

    Raises:
        ValueError: `scale` is 0, or either is not finite or no number or list of
            numbers.

    Example:
        >>> layer = Rescale(1 / 127.5, -1.0)
        >>> layer(np.array([0, 255], np.uint8)).numpy().tolist()
        [-1.0, 1.0]
    """

    def __init__(self, scale: Any = 1 / 255, offset: Any = 0.0, **kwargs: Any) -> None:
        # A float input is not rounded before it is scaled either.
        super().__init__(autocast=False, **kwargs)
        self.scale = _numbers("scale", scale)
        self.offset = _numbers("offset", offset)
        if not np.all(np.asarray(self.scale)):
            raise ValueError(
                f"`scale` is {self.scale!r}; expected numbers other than 0, which "
                "would make every pixel the same. Pass 1 / 255 for [0, 1]."
            )
        self._shift, self._factor, self._rest = _steps(
            np.asarray(self.scale), np.asarray(self.offset)
        )
        self.supports_masking = True

    def call(self, inputs: Any) -> Any:
        """Returns the scaled inputs in the compute dtype."""
        x = tf.cast(inputs, tf.float32)
        if self._shift is not None:
            x = x + self._shift
        x = x * self._factor
        if self._rest is not None:
            x = x + self._rest
        return tf.cast(x, self.compute_dtype)

    def compute_output_spec(self, inputs: Any, **kwargs: Any) -> keras.KerasTensor:
        """Returns the shape of the inputs in the compute dtype."""
        return keras.KerasTensor(inputs.shape, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the inputs."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments; the numbers as they were given."""
        return {**super().get_config(), "scale": self.scale, "offset": self.offset}


def _numbers(argument: str, value: Any) -> float | list[float]:
    """Returns a number or a list of numbers, as JSON keeps them exactly."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.asarray(np.nan)
    if array.ndim > 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(
            f"`{argument}` is {value!r}; expected a finite number, or a list of one "
            f"for each channel. Pass `{argument}=0.5` or `{argument}=[0.1, 0.2, 0.3]`."
        )
    return array.tolist()


def _steps(
    scale: np.ndarray, offset: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray | None]:
    """Returns shift, factor and rest: x -> (x + shift) * factor + rest.

    The shift is `offset / scale` on the grid where its sum with a pixel is exact, so
    that nothing cancels; the rest is what the grid leaves. None for a step that does
    nothing. All numbers are float64.
    """
    wanted = offset / scale
    largest = np.abs(wanted) + _LARGEST_PIXEL
    grid = np.exp2(np.ceil(np.log2(largest + 1)) - _FLOAT32_BITS)
    shift = np.round(wanted / grid) * grid
    rest = wanted - shift
    rest = np.where(np.abs(rest) <= _FLOAT64_NOISE * np.abs(wanted), 0.0, rest) * scale
    return (
        np.asarray(shift, np.float32) if np.any(shift) else None,
        np.asarray(scale, np.float32),
        np.asarray(rest, np.float32) if np.any(rest) else None,
    )


@keras.saving.register_keras_serializable(package="tfamp")
class Augment(keras.layers.Layer):
    """Puts images through random layers while the model trains, and only then.

    Place it first in the model where the device has time and the cores have none.
    Each layer changes each image with a probability, the strength. Images keep the
    dtype they come in.

    Args:
        *layers: Random layers of Keras that keep the shape of an image, such as
            `keras.layers.RandomFlip()`.
        strength: In [0, 1]. A variable holds it, so that `set_strength` and `ramp`
            change it without a new trace, and files carry it.
        seed: Of the draws which images change; the layers have seeds of their own.
        **kwargs: As for every layer: `name`, `dtype`, ...

    Raises:
        TypeError: There is no layer, or something else.
        ValueError: `strength` is out of range.

    Example:
        >>> import numpy as np
        >>> layer = Augment(keras.layers.RandomFlip(), strength=0.0)
        >>> image = np.arange(3, dtype=np.uint8).reshape(1, 1, 3, 1)
        >>> layer(image, training=True).numpy().ravel().tolist()
        [0, 1, 2]
    """

    def __init__(
        self,
        *layers: keras.layers.Layer,
        strength: float = 1.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(autocast=False, **kwargs)
        if not layers or not all(isinstance(x, keras.layers.Layer) for x in layers):
            raise TypeError(
                f"`layers` are {layers!r}; expected random layers of Keras, at least "
                "one. Pass `keras.layers.RandomFlip()`, for example."
            )
        self.layers = list(layers)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        self._full_strength = checks.fraction("strength", strength)
        self.strength = self.add_weight(
            name="strength",
            shape=(),
            dtype="float32",
            initializer=keras.initializers.Constant(self._full_strength),
            trainable=False,
            autocast=False,
        )

    def set_strength(self, strength: float) -> None:
        """Changes the strength, for the next step on.

        Raises:
            ValueError: It is not in [0, 1].
        """
        self.strength.assign(checks.fraction("strength", strength))

    def ramp(self, epochs: int, start: float = 0.0) -> keras.callbacks.Callback:
        """Returns a callback for `fit` that raises the strength epoch by epoch.

        It ends at the strength that the layer was made with, which its config keeps,
        so that a restart with `initial_epoch` goes on where the first run was.

        Args:
            epochs: After how many that strength is reached.
            start: Strength in the first epoch.

        Raises:
            TypeError: `epochs` is no integer.
            ValueError: It is below 1, or `start` is not in [0, 1].
        """
        epochs = checks.positive_int("epochs", epochs)
        start = checks.fraction("start", start)

        def set_epoch(epoch: int, logs: Any = None) -> None:
            way = min(1.0, epoch / epochs)
            self.set_strength(start * (1 - way) + self._full_strength * way)

        return keras.callbacks.LambdaCallback(on_epoch_begin=set_epoch)

    def build(self, input_shape: Any) -> None:
        """Builds the layers; all of them keep the shape."""
        if len(input_shape) != 4:
            raise ValueError(
                f"Images have the shape {tuple(input_shape)}; expected (batch, height, "
                "width, channels). Put the layer before what flattens them."
            )
        for layer in self.layers:
            layer.build(input_shape)
        super().build(input_shape)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns changed images in training, and the images themselves otherwise."""
        if not training:
            return inputs
        inputs = tf.convert_to_tensor(inputs)
        # Some layers of Keras add negative numbers to unsigned integers.
        images = tf.cast(inputs, tf.float32)
        for layer in self.layers:
            changed = tf.cast(layer(images, training=True), "float32")
            changed = tf.ensure_shape(changed, images.shape)
            chance = keras.random.uniform(
                (tf.shape(images)[0], 1, 1, 1), seed=self.seed_generator
            )
            is_changed = chance < tf.convert_to_tensor(self.strength.value)
            images = tf.where(is_changed, changed, images)
        return restore(images, inputs.dtype)

    def compute_output_spec(self, inputs: Any, **kwargs: Any) -> keras.KerasTensor:
        """Returns the shape and dtype of the inputs."""
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the inputs."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments; the strength that the layer was made with."""
        return {
            **super().get_config(),
            "layers": [keras.saving.serialize_keras_object(x) for x in self.layers],
            "strength": self._full_strength,
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Augment":
        """Returns the layer of a config."""
        config = dict(config)
        layers = config.pop("layers")
        return cls(*map(keras.saving.deserialize_keras_object, layers), **config)


def restore(images: tf.Tensor, dtype: Any) -> tf.Tensor:
    """Returns float32 images in a dtype: rounded and limited where it holds integers.

    Example:
        >>> restore(tf.constant([-3.0, 7.6, 300.0]), tf.uint8).numpy().tolist()
        [0, 8, 255]
    """
    dtype = tf.as_dtype(dtype)
    if dtype.is_floating:
        return tf.cast(images, dtype)
    return tf.saturate_cast(tf.round(images), dtype)
