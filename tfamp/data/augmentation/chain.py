"""Transforms, Keras's random layers and users' functions, one after another."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfamp.data.augmentation.transforms import (
    DEFAULT,
    Transform,
    restore,
    same_shape,
    span_of,
)

Step = Transform | Callable[..., Any]
# They mix the images of a batch, and the labels with them.
_CHANGES_LABELS = ("MixUp", "CutMix")


class _Seeds(keras.random.SeedGenerator):
    """Gives a layer of Keras seeds that follow from one tensor `(2,)`, and no state."""

    def __init__(self, seed: tf.Tensor) -> None:
        # Not Keras's own: that makes a variable, which a map cannot.
        self._seed, self._num_drawn = seed, 0

    def next(self, ordered: bool = True) -> tf.Tensor:
        """Returns the next seed."""
        self._num_drawn += 1
        return tf.random.experimental.stateless_fold_in(self._seed, self._num_drawn)


@dataclasses.dataclass(frozen=True)
class LayerStep(Transform):
    """A random layer of Keras, which the strength gives to a share of the images.

    It draws from the seed of the pipeline, not from its own.
    """

    layer: Any

    def __post_init__(self) -> None:
        layer = self.layer
        is_random = callable(getattr(layer, "get_random_transformation", None))
        if not is_random or type(layer).__name__ in _CHANGES_LABELS:
            raise TypeError(
                f"{layer!r} is no layer that changes images at random and leaves "
                "labels; expected one such as `keras.layers.RandomFlip()`. Put it "
                "into the model, or into `.map` behind the pipeline's batches."
            )

    def __call__(
        self, images: tf.Tensor, strength: tf.Tensor, seed: tf.Tensor, span: float
    ) -> tf.Tensor:
        """Returns the images, each changed with the probability `strength`."""
        drawn = self.layer.get_random_transformation(
            images, training=True, seed=_Seeds(seed)
        )
        changed = self.layer.transform_images(images, drawn, training=True)
        changed = same_shape(tf.cast(changed, images.dtype), images)
        chance = tf.random.stateless_uniform([tf.shape(images)[0], 1, 1, 1], seed)
        return tf.where(chance < strength, changed, images)


@dataclasses.dataclass(frozen=True)
class Chain:
    """What is done to images, or to vectors of features: no steps for the defaults.

    `Pipeline.augment` explains the arguments.
    """

    steps: tuple[Step, ...]
    value_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        steps = tuple(
            LayerStep(step) if isinstance(step, keras.layers.Layer) else step
            for step in self.steps
        )
        for step in steps:
            if isinstance(step, type):
                raise TypeError(
                    f"{step!r} is a class; expected a transform, made with its "
                    f"arguments. Pass `{step.__name__}()`."
                )
            if not isinstance(step, Transform):
                num_arguments(step)
        object.__setattr__(self, "steps", steps or DEFAULT)
        if self.value_range is None:
            return
        try:
            low, high = map(float, self.value_range)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"`value_range` is {self.value_range!r}; expected a pair of numbers. "
                "Pass the smallest and the largest value, such as (0, 255)."
            ) from error
        object.__setattr__(self, "value_range", (low, high))
        if not low < high:
            raise ValueError(
                f"`value_range` is {self.value_range!r}; expected the smaller number "
                "first. Pass the smallest and the largest value, such as (0, 255)."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """What the steps are called."""
        return tuple(_name(step) for step in self.steps)

    def check(self, spec: Any) -> None:
        """Raises if images of a spec cannot be changed so."""
        if not isinstance(spec, tf.TensorSpec) or not (
            spec.dtype.is_floating or spec.dtype.is_integer
        ):
            raise TypeError(
                f"What is to be augmented is {spec!r}; expected dense numbers. Decode "
                "images first, or name the part that holds them with `key`."
            )
        if not any(isinstance(step, Transform) for step in self.steps):
            return
        if spec.shape.rank != 3:
            raise ValueError(
                f"Images have the shape {spec.shape}; expected (height, width, "
                "channels). Add a channel axis in `.map`, or pass your own functions "
                "for features that are no images."
            )
        span_of(spec.dtype, self.value_range)

    @property
    def takes_batches(self) -> bool:
        """Whether it can change many images at once: users' functions take one."""
        return all(isinstance(step, Transform) for step in self.steps)

    def run(
        self,
        images: tf.Tensor,
        strength: tf.Tensor,
        seed: tf.Tensor,
    ) -> tf.Tensor:
        """Returns images of any numbers, changed; the same where the strength is 0.

        They are a batch of one unless the chain takes batches.
        """
        dtype = images.dtype

        def changed() -> tf.Tensor:
            # Between transforms in float32, so that integers are rounded once.
            current = images
            for number, (name, step) in enumerate(
                zip(self.names, self.steps, strict=True)
            ):
                own = tf.random.experimental.stateless_fold_in(seed, number)
                if isinstance(step, Transform):
                    span = span_of(dtype, self.value_range)
                    current = tf.cast(current, tf.float32)
                    current = step(current, strength, own, span)
                else:
                    given = restore(current[0], dtype)
                    taken = (given, strength, own)[: num_arguments(step)]
                    current = _checked(name, step(*taken), given)[None]
            return tf.ensure_shape(restore(current, dtype), images.shape)

        return tf.cond(strength > 0, changed, lambda: tf.identity(images))


def num_arguments(function: Any) -> int:
    """Returns how many of (image, strength, seed) a function takes: 2 or 3.

    Raises:
        TypeError: It cannot be called so.

    Example:
        >>> num_arguments(lambda image, strength: image)
        2
    """
    problem = f"{function!r} cannot be called"
    if callable(function):
        signature = inspect.signature(function)
        for count in (3, 2):
            try:
                signature.bind(*range(count))
                return count
            except TypeError as error:
                problem = f"{_name(function)}{signature} cannot: {error}"
    raise TypeError(
        f"{problem}; expected a transform of `tfamp.data.augmentation`, or a function "
        "of (image, strength) or (image, strength, seed). Write it as `def change("
        "image, strength): ...`, so that strength 0 changes nothing."
    )


def _name(step: Any) -> str:
    kind = step.layer if isinstance(step, LayerStep) else step
    return getattr(kind, "__name__", type(kind).__name__)


def _checked(name: str, found: Any, given: tf.Tensor) -> tf.Tensor:
    """Returns what a user's function gave, if it is like what it was given."""
    found = tf.convert_to_tensor(found)
    if found.dtype != given.dtype or not found.shape.is_compatible_with(given.shape):
        raise ValueError(
            f"`{name}` makes {found.dtype.name} of shape {tuple(found.shape)}; "
            f"expected what it was given, {given.dtype.name} of shape "
            f"{tuple(given.shape)}. Cast and crop inside it, or use `.map` for a "
            "lasting change."
        )
    return found
