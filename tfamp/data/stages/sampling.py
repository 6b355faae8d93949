"""Which examples come, and how often: balanced, by weights, or the same part each time.

Labels and weights are read in one pass; a plan says for an epoch which positions come,
in random order. Where any example can be read by its position, plans are followed by
position. On a stream an element comes as often as the plan says, one copy after the
other.
"""

import abc
import dataclasses
import numbers
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._elements import (
    as_arguments,
    is_endless,
    known_length,
    of_unknown_length,
    with_length,
)
from tfamp.data.sources import RandomAccess
from tfamp.data.stages import Settings, Stage, seed_text
from tfamp.data.stages.batches import drawn
from tfamp.data.stages.labels import (
    By,
    Memory,
    class_ids,
    count,
    description,
    picker,
    read_values,
)
from tfamp.records import checks

# From `draw` over `apply` and `Build.dataset` to the caller of `Pipeline.build`.
_STACKLEVEL = 5
METHODS = {
    "resample": "as many examples as there are",
    "oversample": "each as often as the largest",
    "undersample": "each as often as the smallest",
}
Draw = Callable[[np.random.Generator], np.ndarray]


def balanced_plan(
    ids: np.ndarray, num_outputs: int, random: np.random.Generator
) -> np.ndarray:
    """Returns positions in which classes come equally often, shuffled.

    Every class gets `num_outputs / num_classes` places, rounded down or up: which
    classes get the places that are left over is drawn. Within a class every member
    comes equally often, up to one, and which come once more is drawn.

    Example:
        >>> plan = balanced_plan(np.array([0, 0, 0, 0, 1]), 8, np.random.default_rng(0))
        >>> np.bincount(plan)
        array([1, 1, 1, 1, 4])
    """
    counts = np.bincount(ids)
    members = np.split(np.argsort(ids, kind="stable"), np.cumsum(counts)[:-1])
    left_over = random.permutation(len(counts)) < num_outputs % len(counts)
    parts = [
        np.resize(random.permutation(own), num_outputs // len(counts) + more)
        for own, more in zip(members, left_over.astype(int), strict=True)
    ]
    return random.permutation(np.concatenate(parts))


def stratified_subset(
    ids: np.ndarray, size: int, random: np.random.Generator
) -> np.ndarray:
    """Returns positions of a subset with the proportions of the whole, ascending.

    A class gets its share of `size` rounded down; the places left over go to the
    classes with the largest remainders (Hamilton's method), the first of equal ones.
    Members are drawn uniformly. With one class it is a uniform draw.

    Example:
        >>> ids = np.array([0] * 6 + [1] * 3 + [2])
        >>> ids[stratified_subset(ids, 5, np.random.default_rng(0))]  # 3, 1.5, 0.5
        array([0, 0, 0, 1, 1])
    """
    counts = np.bincount(ids)
    shares, remainders = np.divmod(counts * size, len(ids))
    shares[np.argsort(-remainders, kind="stable")[: size - shares.sum()]] += 1
    members = np.split(np.argsort(ids, kind="stable"), np.cumsum(counts)[:-1])
    parts = [
        random.permutation(own)[:share]
        for own, share in zip(members, shares, strict=True)
    ]
    return np.sort(np.concatenate(parts))


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
    def needs_order(self) -> str:
        """What is drawn are places of examples."""
        return "pass"

    @abc.abstractmethod
    def read(self, data: Any, settings: Settings) -> Any:
        """Returns what the plans need of all examples."""

    @abc.abstractmethod
    def draw(self, values: Any) -> tuple[int, Draw]:
        """Returns how many positions an epoch has, and what draws them."""

    @property
    def by_position(self) -> str:
        """What the way of drawing adds to a reason."""
        return "" if self.source is None else "; by position, exact"

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if the dataset never ends."""
        if self.source is None:
            check_ends(dataset, self.name)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns what an epoch takes, drawn anew in each.

        By position that are positions, shuffled; on a stream elements in the order
        they have, copies together.
        """
        data = dataset if self.source is None else self.source
        values = self.memory.get(data, lambda: self.read(data, settings))
        num_outputs, draw = self.draw(values)
        if self.source is not None:
            return with_length(drawn(self.seed, draw), num_outputs)
        num_examples = len(values)
        copies = drawn(
            self.seed, lambda random: np.bincount(draw(random), minlength=num_examples)
        )
        return with_length(copied(dataset, copies), num_outputs)


def check_ends(dataset: tf.data.Dataset, name: str) -> None:
    """Raises if a dataset has no end."""
    if is_endless(dataset):
        raise ValueError(
            f"`.{name}` got a dataset without end; expected one that ends, since what "
            "comes in an epoch is chosen from all of it. Leave `.repeat()` out: an "
            "epoch of `fit` reads the dataset once."
        )


def copied(dataset: tf.data.Dataset, copies: tf.data.Dataset) -> tf.data.Dataset:
    """Returns each element as often as the number at its place in `copies` says."""

    def repeated(number: tf.Tensor, element: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(element).repeat(number)

    return tf.data.Dataset.zip((copies, dataset)).flat_map(repeated)


@dataclasses.dataclass(frozen=True)
class Balance(Sampler):
    """Makes all classes come equally often; `Pipeline.balance` explains the arguments.

    A class is an integer, a string, a whole float, or a row that is one-hot or holds
    probabilities, which counts by its largest value.
    """

    name: ClassVar[str] = "balance"
    by: By = None
    _: dataclasses.KW_ONLY
    method: str = "resample"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_by("by", self.by)
        checks.choice("method", self.method, METHODS)

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if the dataset never ends, or its elements have no such class."""
        super().check(dataset)
        if self.source is None and not callable(self.by):
            picker(self.by, "by")(*as_arguments(dataset.element_spec))

    def read(self, data: Any, settings: Settings) -> np.ndarray:
        """Returns the class of each example."""
        return read_values(data, self.by, "by", settings)

    def draw(self, values: Any) -> tuple[int, Draw]:
        """Returns a draw in which classes come equally often, up to one."""
        ids, classes = class_ids(values, "by")
        if len(classes) == 1:
            warnings.warn(
                f"All {len(ids):,} examples are of class {classes.tolist()[0]!r}; "
                "expected two classes or more. Balancing changes nothing: check what "
                "`by` reads, or leave `.balance` out.",
                stacklevel=_STACKLEVEL,
            )
        counts = np.bincount(ids)
        num_outputs = {
            "resample": len(ids),
            "oversample": len(classes) * int(counts.max()),
            "undersample": len(classes) * int(counts.min()),
        }[self.method]
        return num_outputs, lambda random: balanced_plan(ids, num_outputs, random)

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a dataset of the same spec, and of the same length if known."""
        if self.source is not None:
            return self.apply(dataset, settings)
        return dataset if self.method == "resample" else of_unknown_length(dataset)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        return (
            f"{self.method} by {description(self.by)}, {seed_text(self.seed)}",
            f"classes equally often, {METHODS[self.method]}; anew each epoch; labels "
            f"are read once, at build{self.by_position}",
        )


@dataclasses.dataclass(frozen=True)
class Weights(Sampler):
    """Draws examples in proportion to weights; `Pipeline.weights` has the arguments.

    With replacement, draws are independent. Without, each is in proportion to the
    weights of the examples that are left, so that heavy examples are likelier to be
    among them, but less than in proportion.
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
        if not callable(self.weights):
            weights = _checked_weights(self.weights, self._num_different)
            object.__setattr__(self, "weights", weights)

    @property
    def _num_different(self) -> int:
        """How many different examples are drawn at least."""
        return 1 if self.replacement else self.num_examples or 1

    def read(self, data: Any, settings: Settings) -> np.ndarray:
        """Returns the weight of each example."""
        if callable(self.weights):
            weights = read_values(data, self.weights, "weights", settings)
            return _checked_weights(weights, self._num_different)
        length = count(data)
        if len(self.weights) != length:
            raise ValueError(
                f"`weights` has {len(self.weights)} values for {length} examples; "
                "expected one for each example that reaches this stage, which comes "
                "after `.subset` and `.filter`. Pass a function of the element if "
                "those leave examples out."
            )
        return self.weights

    def draw(self, values: Any) -> tuple[int, Draw]:
        """Returns a draw in proportion to the weights."""
        num_outputs = self.num_examples or len(values)
        # By the largest, since a sum of large weights may overflow.
        shares = values / values.max()
        shares /= shares.sum()

        def draw(random: np.random.Generator) -> np.ndarray:
            return random.choice(
                len(shares), num_outputs, replace=self.replacement, p=shares
            )

        return num_outputs, draw

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


def _checked_weights(given: Any, num_different: int) -> np.ndarray:
    """Returns weights in float64, if so many different examples can be drawn."""
    weights = np.asarray(given)
    if weights.dtype.kind not in "biuf" or weights.ndim != 1:
        raise TypeError(
            f"`weights` has shape {weights.shape} and dtype {weights.dtype}; "
            "expected one number for each example, or a function of an element. "
            "Pass an array `(examples,)`."
        )
    weights = weights.astype(np.float64)
    is_wrong = ~(np.isfinite(weights) & (weights >= 0))
    if is_wrong.any():
        first = int(np.argmax(is_wrong))
        raise ValueError(
            f"`weights` has {float(weights[first])!r} at index {first} and "
            f"{int(is_wrong.sum())} such values in all; expected finite numbers of at "
            "least 0. Give those examples the weight 0 to leave them out."
        )
    num_positive = int(np.count_nonzero(weights))
    if num_different > num_positive:
        raise ValueError(
            f"`weights` has {num_positive} values above 0 of {len(weights)}; expected "
            f"at least {num_different}, as so many different examples are drawn. Draw "
            "fewer (`num_examples`), or check how they are computed."
        )
    return weights


def _check_by(argument: str, by: Any) -> None:
    if not (by is None or isinstance(by, str) or callable(by)):
        raise TypeError(
            f"`{argument}` is {by!r}; expected None, a key or a function of an "
            "element. Pass a function such as `lambda x, y: y`."
        )


@dataclasses.dataclass(frozen=True)
class Subset(Stage):
    """Keeps a part of the examples; `Pipeline.subset` explains the arguments."""

    name: ClassVar[str] = "subset"
    size: Any
    _: dataclasses.KW_ONLY
    stratify: By = None
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
        _check_by("stratify", self.stratify)

    @property
    def needs_order(self) -> str:
        """The examples that are kept are known by their places."""
        return "pass"

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if the dataset never ends."""
        check_ends(dataset, self.name)

    def chosen(self, data: Any, settings: Settings) -> np.ndarray:
        """Returns the positions of the examples to keep, ascending, int64."""
        return self._chosen(data, settings)[0]

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the examples to keep, in the order they have."""
        positions, num_examples = self._chosen(dataset, settings)
        with tf.device("CPU:0"):
            copies = tf.constant(np.bincount(positions, minlength=num_examples))
        each = tf.data.Dataset.from_tensor_slices(copies)
        return with_length(copied(dataset, each), len(positions))

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a dataset of the same spec, of the length that comes out."""
        length = known_length(dataset)
        if length is None:
            return of_unknown_length(dataset)
        return dataset.take(self._number_of(length))

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        is_share = isinstance(self.size, float)
        many = f"{100 * self.size:g} %" if is_share else f"{self.size:,} examples"
        reason = "the same ones each epoch, in their order"
        if self.stratify is not None:
            many += f" by {description(self.stratify)}"
            reason = f"proportions of the classes kept; {reason}"
        return f"{many}, {seed_text(self.seed)}", reason

    def _chosen(self, data: Any, settings: Settings) -> tuple[np.ndarray, int]:
        """Returns the positions to keep, and the number of examples."""
        return self.memory.get(data, lambda: self._choose(data, settings))

    def _choose(self, data: Any, settings: Settings) -> tuple[np.ndarray, int]:
        if self.stratify is None:
            ids = np.zeros(count(data), np.int64)
        else:
            by = None if self.stratify == "target" else self.stratify
            ids, _ = class_ids(read_values(data, by, "stratify", settings), "stratify")
        random = np.random.default_rng(self.seed)
        size = self._number_of(len(ids))
        return stratified_subset(ids, size, random), len(ids)

    def _number_of(self, num_examples: int) -> int:
        """Returns how many of `num_examples` are kept; raises if there are fewer."""
        if isinstance(self.size, float):
            return max(1, round(self.size * num_examples))
        if self.size > num_examples:
            raise ValueError(
                f"`size` is {self.size}; expected at most {num_examples}, the number "
                "of examples. Ask for fewer, or for a share such as 0.1."
            )
        return self.size
