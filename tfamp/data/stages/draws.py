"""The stages that choose examples: balanced, by weights, or the same part each time."""

import dataclasses
import math
import numbers
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length, of_unknown_length
from tfamp.data.sources import RandomAccess
from tfamp.data.stages import Settings, Stage, seed_text
from tfamp.data.stages.draw_plans import (
    balanced_plan,
    copies_of,
    stratified_subset,
    weighted_plan,
)
from tfamp.data.stages.labels import Memory, Reader, class_ids, read_or_count
from tfamp.data.stages.sampler import Draw, Sampler, check_ends, copied
from tfamp.records import checks

# From `draw` over `apply` and `Build.dataset` to the caller of `Pipeline.build`.
_STACKLEVEL = 5
METHODS = {
    "resample": "as many examples as there are",
    "oversample": "each as often as the largest",
    "undersample": "each as often as the smallest",
}


@dataclasses.dataclass(frozen=True)
class Balance(Sampler):
    """Makes all classes come equally often; `Pipeline.balance` explains the arguments.

    A class is an integer, a string, a whole float, or a row that is one-hot or holds
    probabilities, which counts by its largest value.
    """

    name: ClassVar[str] = "balance"
    by: Callable[..., Any] | str | None = None
    _: dataclasses.KW_ONLY
    method: str = "resample"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.by is None or isinstance(self.by, str) or callable(self.by)):
            raise TypeError(
                f"`by` is {self.by!r}; expected None, a key or a function. Leave it "
                "out for the target, or pass a function such as `lambda x, y: y`."
            )
        checks.choice("method", self.method, METHODS)

    @property
    def reader(self) -> Reader:
        """Reads the class of each example."""
        return Reader(self.by, "by")

    def draw(self, values: Any, num_examples: int) -> Draw:
        """Returns a draw in which classes come equally often, up to one."""
        ids, classes = class_ids(values, "by")
        if len(classes) == 1:
            only = values.tolist()[0]
            warnings.warn(
                f"All {len(values):,} examples are of class {only!r}; expected "
                "two classes or more. Balancing changes nothing: check what `by` "
                "reads, or leave `.balance` out.",
                stacklevel=_STACKLEVEL,
            )
        counts = np.bincount(ids)
        num_classes = len(classes)
        num_outputs = {
            "resample": num_examples,
            "oversample": num_classes * int(counts.max()),
            "undersample": num_classes * int(counts.min()),
        }[self.method]
        with tf.device("CPU:0"):
            class_of_each = tf.constant(ids)
        most = math.ceil(math.ceil(num_outputs / num_classes) / int(counts.min()))

        def plan(seed: tf.Tensor) -> tf.Tensor:
            return balanced_plan(class_of_each, num_classes, num_outputs, seed)

        return Draw(num_examples, num_outputs, most, plan)

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a dataset of the same spec, and of the same length if known."""
        if self.source is not None:
            return self.apply(dataset, settings)
        return dataset if self.method == "resample" else of_unknown_length(dataset)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        return (
            f"{self.method} by {self.reader.description}, {seed_text(self.seed)}",
            f"classes equally often, {METHODS[self.method]}; anew each epoch; labels "
            f"are read once, at build{self.by_position}",
        )


@dataclasses.dataclass(frozen=True)
class Weights(Sampler):
    """Draws examples in proportion to weights; `Pipeline.weights` has the arguments.

    With replacement, draws are independent.
    Without, each is in proportion to the weights of the examples that are left, so that
    heavy examples are likelier to be among them, but less than in proportion.
    """

    name: ClassVar[str] = "weights"
    weights: np.ndarray | Callable[..., Any] = dataclasses.field(repr=False)
    _: dataclasses.KW_ONLY
    replacement: bool = True
    num_examples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_examples is not None:
            checks.positive_int("num_examples", self.num_examples)
        elif not self.replacement:
            raise ValueError(
                "`num_examples` is None with `replacement=False`; expected fewer than "
                "there are. Without replacement all of them are a plain shuffle: say "
                "how many to draw, or use `.shuffle`."
            )
        if callable(self.weights):
            return
        weights = np.asarray(self.weights)
        if weights.dtype.kind not in "biuf" or weights.ndim != 1:
            raise TypeError(
                f"`weights` has shape {weights.shape} and dtype {weights.dtype}; "
                "expected one number for each example, or a function of an element. "
                "Pass an array `(examples,)`."
            )
        weights = weights.astype(np.float64)
        _check_weights(weights, None if self.replacement else self.num_examples)
        object.__setattr__(self, "weights", weights)

    @property
    def needs_order(self) -> str:
        """Weights that are given belong to places."""
        return "" if callable(self.weights) else "pass"

    @property
    def reader(self) -> Reader | None:
        """Reads the weight of each example, if a function gives it."""
        if callable(self.weights):
            return Reader(self.weights, "weights", is_weight=True)
        return None

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if the dataset never ends or is of another length."""
        super().check(dataset)
        length = known_length(dataset)
        if length is not None:
            self._check_length(length)

    def draw(self, values: Any, num_examples: int) -> Draw:
        """Returns a draw in proportion to the weights."""
        self._check_length(num_examples)
        weights = np.asarray(self.weights if values is None else values)
        num_outputs = self.num_examples or num_examples
        _check_weights(weights, None if self.replacement else num_outputs)
        with tf.device("CPU:0"):
            tensor = tf.constant(weights, tf.float64)

        def plan(seed: tf.Tensor) -> tf.Tensor:
            return weighted_plan(
                tensor, num_outputs, seed, replacement=self.replacement
            )

        # Of the heaviest example: mean and ten deviations of a Poisson variable.
        mean = num_outputs / float(np.sum(weights / np.max(weights)))
        most = math.ceil(mean + 10 * math.sqrt(mean)) if self.replacement else 1
        return Draw(num_examples, num_outputs, most, plan)

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a dataset of the same spec, of the length that comes out."""
        if self.source is not None:
            return self.apply(dataset, settings)
        drawn = dataset.repeat().take(self.num_examples or 0)
        return dataset if self.num_examples is None else drawn

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        how = "with" if self.replacement else "without"
        many = "as many" if self.num_examples is None else f"{self.num_examples:,}"
        reason = "in proportion to the weights, anew each epoch"
        if callable(self.weights):
            reason += "; weights are read once, at build"
        setting = f"{many}, {how} replacement, {seed_text(self.seed)}"
        return setting, reason + self.by_position

    def _check_length(self, length: int) -> None:
        if not callable(self.weights) and len(self.weights) != length:
            raise ValueError(
                f"`weights` has {len(self.weights)} values for {length} examples; "
                "expected one for each example that reaches this stage, which comes "
                "after `.subset` and `.filter`. Pass a function of the element if "
                "those leave examples out."
            )


def _check_weights(weights: np.ndarray, num_different: int | None = None) -> None:
    """Raises unless so many different examples can be drawn, one if None."""
    is_wrong = ~(np.isfinite(weights) & (weights >= 0))
    if is_wrong.any():
        first = int(np.argmax(is_wrong))
        raise ValueError(
            f"`weights` has {float(weights[first])!r} at index {first} and "
            f"{int(is_wrong.sum())} such values in all; expected finite numbers of at "
            "least 0. Give those examples the weight 0 to leave them out."
        )
    num_positive = int(np.count_nonzero(weights))
    if num_positive == 0:
        raise ValueError(
            f"All {len(weights)} `weights` are 0, from index 0 on; expected at least "
            "one above 0. Check how they are computed."
        )
    if num_different is not None and num_different > num_positive:
        where = ""
        if num_positive < len(weights):
            where = f" (the first 0 is at index {int(np.argmax(weights == 0))})"
        raise ValueError(
            f"`num_examples` is {num_different} with `replacement=False`; expected at "
            f"most {num_positive}, the number of weights above 0{where}. Draw fewer, "
            "or with replacement."
        )


@dataclasses.dataclass(frozen=True)
class Subset(Stage):
    """Keeps a part of the examples; `Pipeline.subset` explains the arguments.

    Where it `is_numbered`, elements come as pairs (position, element).
    """

    name: ClassVar[str] = "subset"
    size: Any
    _: dataclasses.KW_ONLY
    stratify: Callable[..., Any] | str | bool | None = None
    seed: int = 0
    is_numbered: bool = False
    memory: Memory = dataclasses.field(
        default_factory=Memory, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if isinstance(self.size, numbers.Integral):
            size: Any = checks.positive_int("size", self.size)
        else:
            size = checks.fraction("size", self.size, closed=False)
        object.__setattr__(self, "size", size)
        checks.positive_int("seed", self.seed, minimum=0)
        is_named = self.stratify is None or isinstance(self.stratify, (bool, str))
        if not (is_named or callable(self.stratify)):
            raise TypeError(
                f"`stratify` is {self.stratify!r}; expected None, 'target', a key or a "
                "function of an element. Pass 'target' to keep the proportions of its "
                "classes."
            )

    @property
    def needs_order(self) -> str:
        """The examples that are kept are known by their places."""
        return "pass"

    @property
    def reader(self) -> Reader | None:
        """Reads the class whose proportions are kept, None for a uniform draw."""
        if self.stratify is None or self.stratify is False:
            return None
        is_target = self.stratify is True or self.stratify == "target"
        return Reader(None if is_target else self.stratify, "stratify")  # type: ignore[arg-type]

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if the dataset never ends, is too small, or has no such class."""
        dataset = self._elements(dataset)
        check_ends(dataset, self.name)
        length = known_length(dataset)
        if length is not None:
            self.number_of(length)
        if self.reader is not None:
            self.reader.check(dataset)

    def number_of(self, num_examples: int) -> int:
        """Returns how many of `num_examples` are kept; raises if there are fewer."""
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
        found = self.memory.get(
            source, lambda: read_or_count(self.reader, source, settings)
        )
        return self._positions(*found)

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
        if self.reader is not None:
            many += f" by {self.reader.description}"
            reason += "; labels are read at build"
            reason = f"proportions of the classes kept; {reason}"
        return f"{many}, {seed_text(self.seed)}", reason

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the examples to keep, in the order they have."""
        elements = self._elements(dataset)
        labels, num_examples = self.memory.get(
            dataset, lambda: read_or_count(self.reader, elements, settings)
        )
        positions = self._positions(labels, num_examples)
        with tf.device("CPU:0"):
            copies = copies_of(positions, num_examples)
        draw = Draw(num_examples, len(positions), 1, lambda seed: positions)
        each = tf.data.Dataset.from_tensor_slices(copies)
        is_numbered = self.is_numbered
        return copied(dataset, each, draw, self.reader, labels, is_numbered=is_numbered)

    def _elements(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the elements without their positions."""
        if not self.is_numbered:
            return dataset
        return dataset.map(lambda position, element: element)

    def _positions(self, labels: np.ndarray | None, num_examples: int) -> tf.Tensor:
        labels = np.zeros(num_examples, np.int64) if labels is None else labels
        ids, classes = class_ids(labels, "stratify")
        size = self.number_of(num_examples)
        with tf.device("CPU:0"):
            # Of TensorFlow's own kind, which no global seed changes.
            seed = tf.constant([self.seed, 0], tf.int64)
            return stratified_subset(tf.constant(ids), len(classes), size, seed)
