"""Augmentation as a stage: behind the cache, on all cores, anew in each epoch."""

import dataclasses
import inspect
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tfamp.data import _elements
from tfamp.data._examples import flatten
from tfamp.data.augmentation import DEFAULT, Transform
from tfamp.data.stages import Settings, Stage, Step, map_in_order
from tfamp.records import checks

# A block of small images costs a half of what they cost one by one; in float32 it
# should fit into a core's own cache.
_BLOCK_BYTES, _MAX_BLOCK = 2**20, 32
_fold_in = tf.random.experimental.stateless_fold_in


class EpochCounter:
    """Counts the passes over one dataset that gave their last element."""

    ATTRIBUTE = "_tfamp_epochs"

    def __init__(self, *, is_seeded: bool = True) -> None:
        self._epoch, self.is_seeded = 0, is_seeded
        self._lock = threading.Lock()

    def read(self) -> np.int64:
        """Returns the number of the epoch that begins."""
        return np.int64(self._epoch)

    def go_to(self, epoch: int) -> None:
        """Has the next pass be that of an epoch."""
        with self._lock:
            self._epoch = epoch

    def finish(self, epoch: np.int64) -> np.int64:
        """Notes that an epoch has given its last element; twice does no harm."""
        with self._lock:
            self._epoch = max(self._epoch, int(epoch) + 1)
        return epoch

    def number(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns triples (epoch, index, element); the length stays known."""

        # A call into Python at the first element only.
        def endless(_: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensors(self._read()).repeat()

        epochs = tf.data.Dataset.range(1).flat_map(endless)
        numbered = tf.data.Dataset.zip(epochs, dataset.enumerate())
        numbered = _elements.with_length_of(dataset, numbered)
        return numbered.map(lambda epoch, item: (epoch, *item))

    def count(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the dataset; that it was read to its end is noted here.

        It stands behind everything that reads ahead, such as a prefetch.
        """
        counted, length = dataset, _elements.known_length(dataset)
        if length is None:
            last = tf.data.Dataset.range(1).filter(
                lambda _: self._finish(self._read()) < 0
            )
            counted = dataset.concatenate(last.flat_map(lambda _: dataset.take(0)))
        else:  # readers such as `fit` stop at the last element

            def step(epoch: tf.Tensor, item: Any) -> tuple[tf.Tensor, Any]:
                index, element = item
                epoch = tf.cond(index == 0, self._read, lambda: epoch)
                is_last = index == length - 1
                epoch = tf.cond(is_last, lambda: self._finish(epoch), lambda: epoch)
                return epoch, element

            counted = dataset.enumerate().scan(tf.constant(0, tf.int64), step)
        setattr(counted, self.ATTRIBUTE, self)
        return counted

    def _read(self) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(self.read, [], tf.int64), ())

    def _finish(self, epoch: tf.Tensor) -> tf.Tensor:
        found = tf.numpy_function(self.finish, [epoch], tf.int64)
        return tf.ensure_shape(found, ())


@dataclasses.dataclass(frozen=True)
class Augmentation(Stage):
    """Changes elements at random by its steps, anew in each epoch."""

    name: ClassVar[str] = "augment"
    steps: tuple[Transform | Callable[..., Any], ...]
    strength: float = 1.0
    ramp_epochs: int = 0
    seed: int | None = None
    value_range: tuple[float, float] | None = None
    is_seeded: bool = dataclasses.field(default=True, compare=False, repr=False)
    counter: EpochCounter = dataclasses.field(
        default_factory=EpochCounter, compare=False
    )

    def __post_init__(self) -> None:
        for step in self.steps:
            if not isinstance(step, Transform):
                _num_arguments(step)
        object.__setattr__(self, "steps", self.steps or DEFAULT)
        checks.fraction("strength", self.strength)
        checks.positive_int("ramp_epochs", self.ramp_epochs, minimum=0)
        low, high = self.value_range or (0, 1)
        if not low < high:
            raise ValueError(
                f"`value_range` is {self.value_range!r}; expected the smallest and the "
                "largest value. Pass such as (0, 255)."
            )
        if self.seed is None:
            object.__setattr__(self, "is_seeded", False)
            object.__setattr__(self, "seed", random.randrange(2**31))
        checks.positive_int("seed", self.seed, minimum=0)

    def with_epochs(self) -> tuple[Stage, Stage] | None:
        """Returns the stage for one dataset, and the step that counts its epochs."""
        if self.strength == 0:
            return None
        counter = EpochCounter(is_seeded=self.is_seeded)
        reason = "each has its own changes"
        count = Step("epochs", "whole passes are counted", reason, act=counter.count)
        return dataclasses.replace(self, counter=counter), count

    def _check(self, dataset: tf.data.Dataset) -> None:
        spec = _elements.inputs_of(dataset.element_spec)
        is_dense = isinstance(spec, tf.TensorSpec)
        if not is_dense or not (spec.dtype.is_floating or spec.dtype.is_integer):
            raise TypeError(
                f"What is to be augmented is {spec!r}; expected dense numbers. Decode "
                "images first; of a dict bring them to the front in `.map`."
            )
        if any(isinstance(step, Transform) for step in self.steps):
            if spec.shape.rank != 3:
                raise ValueError(
                    f"Images have the shape {spec.shape}; expected (height, width, "
                    "channels). Add a channel axis in `.map`, or pass your own "
                    "functions for features that are no images."
                )
            self._span(spec.dtype)
        if self.ramp_epochs and _elements.is_endless(dataset):
            raise ValueError(
                f"`ramp_epochs` is {self.ramp_epochs} and the dataset has no end; "
                "expected epochs to count. Leave `repeat` to `fit`."
            )
        moving = [one for one in self.steps if getattr(one, "moves", True)]
        if spec.shape.rank != 3 or not moving or self.strength == 0:
            return
        element = dataset.element_spec
        parts = flatten(element[:3] if isinstance(element, tuple) else element)
        for name, other in parts.items():
            shape = getattr(other, "shape", tf.TensorShape(None))
            is_picture = other is not spec and shape.rank in (2, 3)
            if is_picture and shape[:2].is_compatible_with(spec.shape[:2]):
                warnings.warn(
                    f"`.augment` moves pixels of images {tuple(spec.shape)} by "
                    f"{', '.join(map(_name, moving))}, and leaves {name!r} of shape "
                    f"{tuple(shape)} as it is; expected no other picture of that "
                    "height and width. A mask no longer fits its image: join it to "
                    "the image as one more channel in `.map`, use `Flip` and `Shift` "
                    "alone, and split them in a `.map` written after `.augment`.",
                    stacklevel=checks.level_of_user(),
                )
                return

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Numbers elements and epochs, then changes blocks of elements in parallel."""
        self._check(dataset)
        if self.strength == 0:
            return dataset
        spec, size = dataset.element_spec, 1
        are_plain = all(isinstance(step, Transform) for step in self.steps)
        if are_plain and _elements.bytes_of_element(spec) is not None:
            num_values = _elements.inputs_of(spec).shape.num_elements()
            size = _BLOCK_BYTES // (4 * max(1, num_values))

        def change(epochs: tf.Tensor, indices: tf.Tensor, block: Any) -> Any:
            changed = self._run(_elements.inputs_of(block), epochs[0], indices[0])
            return _elements.with_inputs(block, changed)

        blocks = self.counter.number(dataset).batch(max(1, min(size, _MAX_BLOCK)))
        changed = map_in_order(blocks, change, settings).unbatch()
        return _elements.with_length_of(dataset, changed)

    @property
    def setting(self) -> str:
        """The steps, and how strong they are."""
        strength = f"strength {self.strength:g}"
        if self.ramp_epochs:
            strength = f"strength 0 to {self.strength:g} in {self.ramp_epochs} epochs"
        return f"{', '.join(map(_name, self.steps))}; {strength}"

    def _span(self, dtype: tf.DType) -> float:
        if self.value_range is not None:
            return float(self.value_range[1] - self.value_range[0])
        if not dtype.is_floating and dtype not in (tf.uint8, tf.uint16):
            raise ValueError(
                f"Images are {dtype.name}, and `value_range` is None; expected uint8, "
                "uint16 or floats, whose range is clear. Pass `value_range=(0, 255)`."
            )
        return 1.0 if dtype.is_floating else float(dtype.max)

    def _run(self, images: tf.Tensor, epoch: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """Returns images, a batch, changed; the same where the strength is 0."""
        number, dtype = self.seed or 0, images.dtype
        seed = tf.constant([number % 2**31, number // 2**31 % 2**31], tf.int32)
        seed = _fold_in(_fold_in(seed, epoch), index)
        strength = tf.constant(self.strength, tf.float32)
        if self.ramp_epochs:
            way = tf.minimum(tf.cast(epoch, tf.float32) / self.ramp_epochs, 1.0)
            strength = self.strength * way

        def changed() -> tf.Tensor:
            # Between transforms in float32, so that integers are rounded once.
            current = images
            for number, step in enumerate(self.steps):
                own = _fold_in(seed, number)
                if isinstance(step, Transform):
                    current = tf.cast(current, tf.float32)
                    current = step(current, strength, own, self._span(dtype))
                    continue
                given = _restored(current[0], dtype)
                taken = (given, strength, own)[: _num_arguments(step)]
                current = tf.convert_to_tensor(step(*taken))[None]
                if not current.shape[1:].is_compatible_with(given.shape):
                    raise ValueError(
                        f"`{_name(step)}` makes the shape {current.shape[1:]}; "
                        f"expected {given.shape}, as it was given. Use `.map` for a "
                        "lasting change."
                    )
            return tf.ensure_shape(_restored(current, dtype), images.shape)

        return tf.cond(strength > 0, changed, lambda: tf.identity(images))


def _restored(images: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns images in a dtype: rounded and limited where it holds integers."""
    if images.dtype == dtype or dtype.is_floating:
        return tf.cast(images, dtype)
    return tf.saturate_cast(tf.round(images), dtype)


def _num_arguments(function: Any) -> int:
    """Returns how many of (image, strength, seed) a function takes: 2 or 3."""
    if callable(function) and not isinstance(function, (type, keras.layers.Layer)):
        number = len(inspect.signature(function).parameters)
        if number in (2, 3):
            return number
    raise TypeError(
        f"{function!r} is no step; expected a transform of `tfamp.data.augmentation`, "
        "such as `Flip()`, or a function of (image, strength) or (image, strength, "
        "seed). Layers of Keras go into the model."
    )


def _name(step: Any) -> str:
    return getattr(step, "__name__", type(step).__name__)
