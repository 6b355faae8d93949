"""`Augment`: random layers of Keras inside the model, with a strength that may grow."""

from typing import Any

import keras
import tensorflow as tf

from tfamp.data.augmentation.transforms import restore, same_shape
from tfamp.records import checks


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
            changed = same_shape(
                tf.cast(layer(images, training=True), "float32"), images
            )
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
