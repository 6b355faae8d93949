"""The stage that keeps a part of the examples, the same one each time."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.data._sources import RandomAccess
from tfamp.data.sampling import plans
from tfamp.data.sampling.labels import Memory, Reader, class_ids, count
from tfamp.data.sampling.sampler import (
    Draw,
    check_ends,
    copied,
    of_unknown_length,
    seed_text,
)
from tfamp.data.stages.base import Settings, Stage
from tfamp.records import checks


@dataclasses.dataclass(frozen=True)
class Subset(Stage):
    """Keeps a part of the examples; `Pipeline.subset` explains the arguments.

    `memory` holds what was read of the last dataset; `is_numbered` says whether
    elements come as pairs (position, element).
    """

    name: ClassVar[str] = "subset"
    size: Any
    stratify: Callable[..., Any] | str | bool | None = dataclasses.field(
        default=None, kw_only=True
    )
    seed: int = dataclasses.field(default=0, kw_only=True)
    is_numbered: bool = dataclasses.field(default=False, kw_only=True)
    memory: Memory = dataclasses.field(
        default_factory=Memory, compare=False, repr=False, kw_only=True
    )

    def __post_init__(self) -> None:
        if isinstance(self.size, numbers.Integral):
            size: Any = checks.positive_int("size", self.size)
        else:
            size = checks.fraction("size", self.size, closed=False)
        object.__setattr__(self, "size", size)
        checks.positive_int("seed", self.seed, minimum=0)
        if not (self.stratify is None or isinstance(self.stratify, (bool, str))):
            if not callable(self.stratify):
                raise TypeError(
                    f"`stratify` is {self.stratify!r}; expected None, 'target', a key "
                    "or a function of an element. Pass 'target' to keep the "
                    "proportions of its classes."
                )

    @property
    def reader(self) -> Reader | None:
        """Reads the class whose proportions are kept, None for a uniform draw."""
        if self.stratify is None or self.stratify is False:
            return None
        is_target = self.stratify is True or self.stratify == "target"
        return Reader(None if is_target else self.stratify, "stratify")  # type: ignore[arg-type]

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if the dataset never ends, is too small, or has no such class."""
        if self.is_numbered:
            dataset = dataset.map(lambda position, element: element)
        check_ends(dataset, self.name)
        length = known_length(dataset)
        if length is not None:
            self.number_of(length)
        if self.reader is not None:
            self.reader.check(dataset)

    def number_of(self, num_examples: int) -> int:
        """Returns how many of `num_examples` are kept.

        Raises:
            ValueError: There are fewer than asked for.
        """
        if isinstance(self.size, float):
            return max(1, round(self.size * num_examples))
        if self.size > num_examples:
            raise ValueError(
                f"`size` is {self.size}; expected at most {num_examples}, the number "
                "of examples. Ask for fewer, or for a share such as 0.1."
            )
        return self.size

    def chosen(self, source: RandomAccess, settings: Settings) -> tf.Tensor:
        """Returns the positions of the examples to keep, ascending, int64."""

        def choose() -> tf.Tensor:
            labels = None
            if self.reader is not None:
                labels = self.reader.read(source, settings)
            return self._positions(labels, source.num_examples)

        return self.memory.get(source, choose)

    def numbered(self) -> "Subset":
        """Returns the stage for pairs (position, element), which keep their numbers."""
        return dataclasses.replace(self, is_numbered=True)

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a dataset of the same spec, of the length that comes out."""
        length = known_length(dataset)
        if length is None:
            return of_unknown_length(dataset)
        return dataset.take(self.number_of(length))

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        is_share = isinstance(self.size, float)
        many = f"{100 * self.size:g} %" if is_share else f"{self.size:,} examples"
        reason = "the same ones each epoch, in their order"
        if self.reader is None:
            return f"{many}, {seed_text(self.seed)}", reason
        return (
            f"{many} by {self.reader.description}, {seed_text(self.seed)}",
            f"proportions of the classes kept; {reason}; labels are read at build",
        )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the examples to keep, in the order they have."""

        def look() -> tuple[np.ndarray | None, int]:
            if self.reader is None:
                return None, count(dataset)
            elements = dataset
            if self.is_numbered:
                elements = dataset.map(lambda position, element: element)
            labels = self.reader.read(elements, settings)
            return labels, len(labels)

        labels, num_examples = self.memory.get(dataset, look)
        positions = self._positions(labels, num_examples)
        with tf.device("CPU:0"):
            copies = plans.copies_of(positions, num_examples)
        draw = Draw(num_examples, len(positions), 1, lambda seed: positions)
        each = tf.data.Dataset.from_tensor_slices(copies)
        is_numbered = self.is_numbered
        return copied(dataset, each, draw, self.reader, labels, is_numbered=is_numbered)

    def _positions(self, labels: np.ndarray | None, num_examples: int) -> tf.Tensor:
        if labels is None:
            ids, num_classes = np.zeros(num_examples, np.int32), 1
        else:
            ids, classes = class_ids(labels, "stratify")
            num_classes = len(classes)
        size = self.number_of(num_examples)
        with tf.device("CPU:0"):
            # Of TensorFlow's own kind, which no global seed changes.
            seed = tf.constant([self.seed, 0], tf.int64)
            return plans.stratified_subset(tf.constant(ids), num_classes, size, seed)
