"""`Augment`: the same changes inside the model, on its device."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfamp import _checks
from tfamp.data.augmentation.chain import make_chain
from tfamp.data.augmentation.transforms import (
    BY_NAME,
    DEFAULT,
    Transform,
    restore,
    span_of,
)


@keras.saving.register_keras_serializable(package="tfamp")
class Augment(keras.layers.Layer):
    """Changes images at random while the model trains, and only then.

    Put it first in the model where the device has time and the cores have none. It
    computes in float32 whatever the policy, gives images in the dtype they came in,
    and compiles with XLA.

    Args:
        *transforms: Of `tfamp.data.augmentation`; none for the same as the pipeline.
        strength: In [0, 1]. The layer keeps it in a variable, so that `set_strength`
            and `ramp` change it without a new trace, and files carry it.
        value_range: Smallest and largest value of an image; None for 0 to the dtype's
            largest, and 0 to 1 for floats.
        seed: Of the draws; None for another one each time.
        **kwargs: As for every layer: `name`, `dtype`, ...

    Raises:
        TypeError: A transform is something else, such as a function.
        ValueError: `strength` is out of range.

    Example:
        >>> import numpy as np
        >>> from tfamp.data.augmentation import Flip
        >>> layer = Augment(Flip(), strength=0.0)
        >>> image = np.arange(3, dtype=np.uint8).reshape(1, 1, 3, 1)
        >>> layer(image, training=True).numpy().ravel().tolist()
        [0, 1, 2]
    """

    def __init__(
        self,
        *transforms: Transform,
        strength: float = 1.0,
        value_range: tuple[float, float] | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(autocast=False, **kwargs)
        for transform in transforms:
            if type(transform) not in BY_NAME.values():
                raise TypeError(
                    f"{transform!r} is no transform of `tfamp.data.augmentation`; "
                    f"expected {', '.join(BY_NAME)}, which a model's file can hold. "
                    "For your own changes write a Keras layer, or use "
                    "`Pipeline.augment`."
                )
        self.transforms = transforms or DEFAULT
        self.value_range = make_chain(self.transforms, value_range).value_range
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        self._full_strength = _checks.fraction("strength", strength)
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
        self.strength.assign(_checks.fraction("strength", strength))

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
        epochs = _checks.positive_int("epochs", epochs)
        start = _checks.fraction("start", start)

        def set_epoch(epoch: int, logs: Any = None) -> None:
            way = min(1.0, epoch / epochs)
            self.set_strength(start * (1 - way) + self._full_strength * way)

        return keras.callbacks.LambdaCallback(on_epoch_begin=set_epoch)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns changed images in training, and the images themselves otherwise."""
        if not training:
            return inputs
        inputs = tf.convert_to_tensor(inputs)
        _check_rank(inputs.shape)
        span = span_of(inputs.dtype, self.value_range)
        strength = tf.convert_to_tensor(self.strength.value)
        seed = tf.cast(self.seed_generator.next(), tf.int32)
        context = tf.distribute.get_replica_context()
        if context is not None:
            # All replicas hold the same seed; each has images of its own.
            replica = context.replica_id_in_sync_group
            seed = tf.random.experimental.stateless_fold_in(seed, replica)

        def changed() -> tf.Tensor:
            images = tf.cast(inputs, tf.float32)
            for number, transform in enumerate(self.transforms):
                own = tf.random.experimental.stateless_fold_in(seed, number)
                images = transform(images, strength, own, span)
            return restore(images, inputs.dtype)

        return tf.cond(strength > 0, changed, lambda: tf.identity(inputs))

    def compute_output_spec(self, inputs: Any, **kwargs: Any) -> keras.KerasTensor:
        """Returns the shape and dtype of the inputs."""
        _check_rank(inputs.shape)
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the inputs."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments; the strength that the layer was made with."""
        transforms = [
            {"name": type(transform).__name__, **dataclasses.asdict(transform)}
            for transform in self.transforms
        ]
        return {
            **super().get_config(),
            "transforms": transforms,
            "strength": self._full_strength,
            "value_range": self.value_range,
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Augment":
        """Returns the layer of a config."""
        config = dict(config)
        transforms = []
        for entry in config.pop("transforms"):
            fields = {name: value for name, value in entry.items() if name != "name"}
            transforms.append(BY_NAME[entry["name"]](**fields))
        return cls(*transforms, **config)


def _check_rank(shape: Any) -> None:
    """Raises where inputs are no batch of images."""
    if len(shape) != 4:
        raise ValueError(
            f"Images have the shape {tuple(shape)}; expected (batch, height, width, "
            "channels). Put the layer before what flattens them, and behind `.batch`."
        )
