"""Which examples come, and how often: balanced, by weights, or the same part each time.

Labels and weights are read in one pass; a plan says for an epoch which positions come,
in random order. Where any example can be read by its position, plans are followed by
position. On a stream an element comes as often as the plan says, one copy after the
other, and its label is held against the one that was read: what differs is an error.
"""

import abc
import dataclasses
import math
import numbers
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._elements import (
    as_arguments,
    bytes_of_element,
    is_endless,
    known_length,
    of_unknown_length,
    with_length,
)
from tfamp.data.sources import RandomAccess
from tfamp.data.stages import Settings, Stage, seed_text
from tfamp.data.stages.draw_plans import (
    balanced_plan,
    copies_of,
    repeated,
    stratified_subset,
    weighted_plan,
)
from tfamp.data.stages.labels import Memory, Reader, class_ids, read_or_count
from tfamp.records import checks

# From `draw` over `apply` and `Build.dataset` to the caller of `Pipeline.build`.
_STACKLEVEL = 5
METHODS = {
    "resample": "as many examples as there are",
    "oversample": "each as often as the largest",
    "undersample": "each as often as the smallest",
}
# A function call costs about 50 us, so small elements share one by this many, as long
# as these and all copies of them stay below so many bytes.
_CHUNK, _MAX_CHUNK_BYTES = 64, 16 * 2**20

Plan = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Sampler(Stage):
    """Draws anew in each epoch which examples come, and how often.

    By position where there is a source, else of the elements that come.
    """

    seed: int | None = dataclasses.field(default=None, kw_only=True)
    memory: Memory = dataclasses.field(
        default_factory=Memory, compare=False, repr=False, kw_only=True
    )
    source: RandomAccess | None = dataclasses.field(
        default=None, compare=False, repr=False, kw_only=True
    )

    def __post_init__(self) -> None:
        if self.seed is not None:
            checks.positive_int("seed", self.seed, minimum=0)

    @property
    @abc.abstractmethod
    def reader(self) -> Reader | None:
        """What to read of each example, None for nothing."""

    @abc.abstractmethod
    def draw(self, values: Any, num_examples: int) -> tuple[int, int, Plan]:
        """Returns how many positions an epoch has, about how often one comes at most.

        And what makes the plan from a seed of two integers, given what was read.
        """

    @property
    def by_position(self) -> str:
        """What the way of drawing adds to a reason."""
        return "" if self.source is None else "; by position, exact"

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if the dataset never ends or has not what is read of it."""
        if self.source is None:
            check_ends(dataset, self.name)
            if self.reader is not None:
                self.reader.check(dataset)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns what an epoch takes, drawn anew in each.

        By position that are positions, shuffled; on a stream elements in the order
        they have, copies together.
        """
        data = dataset if self.source is None else self.source
        values, num_examples = self.memory.get(
            data, lambda: read_or_count(self.reader, data, settings)
        )
        num_outputs, most, plan = self.draw(values, num_examples)
        numbers = tf.data.Dataset.random(self.seed, rerandomize_each_iteration=True)
        seeds = numbers.take(2).batch(2, drop_remainder=True)
        slices = tf.data.Dataset.from_tensor_slices
        if self.source is not None:
            drawn = seeds.flat_map(lambda seed: slices(plan(seed)))
            return with_length(drawn, num_outputs)
        copies = seeds.flat_map(lambda s: slices(copies_of(plan(s), num_examples)))
        made = copied(dataset, copies, self.reader, values, most=most)
        return with_length(made, num_outputs)


def check_ends(dataset: tf.data.Dataset, name: str) -> None:
    """Raises if a dataset has no end."""
    if is_endless(dataset):
        raise ValueError(
            f"`.{name}` got a dataset without end; expected one that ends, since what "
            "comes in an epoch is chosen from all of it. Leave `.repeat()` out: an "
            "epoch of `fit` reads the dataset once."
        )


def copied(
    dataset: tf.data.Dataset,
    copies: tf.data.Dataset,
    reader: Reader | None,
    values: np.ndarray | None,
    *,
    most: int,
) -> tf.data.Dataset:
    """Returns each element as often as the number at its place in `copies` says.

    What `reader` reads of it has to be the value that it read in the first pass.
    """
    # What comes behind the last element that there was meets a number below 0.
    copies = copies.concatenate(tf.data.Dataset.from_tensors(tf.constant(-1, tf.int64)))
    expected = copies
    if values is not None:
        with tf.device("CPU:0"):
            end = tf.concat([values, values[:1]], 0)
        expected = tf.data.Dataset.from_tensor_slices(end)
    plan = tf.data.Dataset.zip((copies, expected, tf.data.Dataset.range(2**62)))
    both = tf.data.Dataset.zip((plan, dataset))

    def checked(plan: Any, now: Any, element: Any) -> Any:
        each, then, position = plan
        now = then if now is None else now
        fits = tf.equal(now, then) & (each >= 0)
        first = tf.argmax(tf.cast(tf.reshape(~fits, [-1]), tf.int32))
        words = [
            "Labels or weights were read once, in `build`, and elements have changed, "
            "or are more, since. The first that differs, what it is, and what it was:",
            *(tf.reshape(one, [-1])[first] for one in (position, now, then)),
            "Expected the same elements in the same order each time. Leave shuffling "
            "to `Pipeline.shuffle`, which comes after sampling, or pass the dataset "
            "`reshuffle_each_iteration=False`.",
        ]
        is_same = tf.debugging.Assert(tf.reduce_all(fits), words)
        with tf.control_dependencies([is_same]):
            return tf.nest.map_structure(tf.identity, element)

    def chunk(plan: Any, element: Any) -> Any:
        now = None if reader is None else reader.values(as_arguments(element))
        element = checked(plan, now, element)
        rows = repeated(tf.range(tf.size(plan[0])), tf.maximum(plan[0], 0))
        return tf.nest.map_structure(lambda part: tf.gather(part, rows), element)

    def one(plan: Any, element: Any) -> tf.data.Dataset:
        now = None if reader is None else reader.value(*as_arguments(element))
        element = checked(plan, now, element)
        return tf.data.Dataset.from_tensors(element).repeat(tf.maximum(plan[0], 0))

    size = bytes_of_element(dataset.element_spec)
    is_picked = reader is None or not callable(reader.by)
    if (
        is_picked
        and size is not None
        and _CHUNK * (1 + most) * size <= _MAX_CHUNK_BYTES
    ):
        return both.batch(_CHUNK).map(chunk).unbatch()
    return both.flat_map(one)


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

    def draw(self, values: Any, num_examples: int) -> tuple[int, int, Plan]:
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

        return num_outputs, most, plan

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

    def draw(self, values: Any, num_examples: int) -> tuple[int, int, Plan]:
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
        return num_outputs, most, plan

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
    """Keeps a part of the examples; `Pipeline.subset` explains the arguments."""

    name: ClassVar[str] = "subset"
    size: Any
    _: dataclasses.KW_ONLY
    stratify: Callable[..., Any] | str | bool | None = None
    seed: int = 0
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
        labels, num_examples = self.memory.get(
            dataset, lambda: read_or_count(self.reader, dataset, settings)
        )
        positions = self._positions(labels, num_examples)
        with tf.device("CPU:0"):
            copies = copies_of(positions, num_examples)
        each = tf.data.Dataset.from_tensor_slices(copies)
        made = copied(dataset, each, self.reader, labels, most=1)
        return with_length(made, len(positions))

    def _positions(self, labels: np.ndarray | None, num_examples: int) -> tf.Tensor:
        labels = np.zeros(num_examples, np.int64) if labels is None else labels
        ids, classes = class_ids(labels, "stratify")
        size = self.number_of(num_examples)
        with tf.device("CPU:0"):
            # Of TensorFlow's own kind, which no global seed changes.
            seed = tf.constant([self.seed, 0], tf.int64)
            return stratified_subset(tf.constant(ids), len(classes), size, seed)
