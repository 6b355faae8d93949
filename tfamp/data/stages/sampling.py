"""Which examples come, and how often: balanced, by weights, or the same part each time.

Labels and weights are read in one pass; a plan says for an epoch which positions come,
in random order. Where any example can be read by its position, plans are followed by
position. On a stream an element comes as often as the plan says, one copy after the
other.
"""

import abc
import dataclasses
import functools
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
    with_length,
)
from tfamp.data.sources import RandomAccess
from tfamp.data.stages import Settings, Stage, map_in_order
from tfamp.data.stages.batches import drawn
from tfamp.records import checks
from tfamp.records.console import progress

# From `_plan` over `apply` and `Build.dataset` to the caller of `Pipeline.build`.
_STACKLEVEL = 5
# Values brought to Python at once.
_READ_AT_ONCE = 1024
# What rows of probabilities may miss 1 by, in float16 too.
_SUM_TOLERANCE = 0.01
By = Callable[..., Any] | str | None
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


def read_all(values: tf.data.Dataset, argument: str) -> np.ndarray:
    """Returns all elements of a dataset, joined, with a progress bar."""
    if not isinstance(values.element_spec, tf.TensorSpec):
        raise TypeError(
            f"`{argument}` gives {values.element_spec!r}; expected one value for an "
            "element. Return a single number or string."
        )
    read, done = [], 0
    with progress(f"Reading for `{argument}`", known_length(values)) as update:
        for batch in values.batch(_READ_AT_ONCE).as_numpy_iterator():
            read.append(batch)
            done += len(batch)
            update(done)
    if not read:
        raise ValueError(
            f"The dataset has no elements to read `{argument}` of; expected at least "
            "one. Check the files or the filter before it."
        )
    return np.concatenate(read)


def _read(data: Any, pick: Any, argument: str, settings: Settings) -> np.ndarray:
    """Returns what a function picks of each element of a dataset or a source."""
    is_source = isinstance(data, RandomAccess)
    elements = data.dataset(settings) if is_source else data
    return read_all(map_in_order(elements, pick, settings), argument)


def _count(data: tf.data.Dataset | RandomAccess) -> int:
    """Returns the number of examples, by reading them if it must."""
    if isinstance(data, RandomAccess):
        return data.num_examples
    ones = data.map(lambda *parts: tf.constant(True))
    return known_length(data) or len(read_all(ones, "the number"))


def _pick(by: By, *parts: Any) -> Any:
    """Returns the target for None, what a key names in dicts, or what `by` gives."""
    if callable(by):
        return by(*parts)
    if by is None and len(parts) > 1 and not isinstance(parts[1], (dict, tuple)):
        return parts[1]
    for part in parts:
        if isinstance(part, dict) and by in part:
            return part[by]
    raise ValueError(
        f"`by` is {by!r}, and elements are {parts!r}; expected (input, target) with "
        "one tensor as target, or a key of a dict. Pass such a key, or a function of "
        "the element that gives its class, as `lambda x, y: y[...]`."
    )


def _classes(values: np.ndarray) -> np.ndarray:
    """Returns one class an example, `(batch,)`, of values `(batch, ...)`.

    Rows that are one-hot, or hold probabilities, count as the place of their largest
    value.
    """
    values = values[:, 0] if values.shape[1:] == (1,) else values
    is_fine = values.ndim <= 2
    if values.ndim == 2:
        rows = values.astype(np.float32)
        largest = (rows == rows.max(axis=1, keepdims=True)).sum(axis=1)
        sums = np.abs(rows.sum(axis=1) - 1) <= _SUM_TOLERANCE
        is_fine = bool(((largest == 1) & sums & (rows >= 0).all(axis=1)).all())
        values = rows.argmax(axis=1)
    elif values.dtype.kind == "f":
        is_fine = bool((values == np.round(values)).all())
    if not is_fine:
        raise ValueError(
            f"What `by` reads, as {values[:1].tolist()}, are not one class each; "
            "expected integers, strings, one-hot rows, or probabilities that sum to 1 "
            "with one largest. Pass `by=` a function that gives one class; of a "
            "continuous target bins, as `lambda x, y: tf.searchsorted(edges, [y])[0]`."
        )
    return values


class _ByPlace(Stage):
    """What goes by the places of examples."""

    @property
    def needs_order(self) -> str:
        """What is drawn are places of examples."""
        return "pass"

    def _check_ends(self, dataset: tf.data.Dataset) -> None:
        """Raises if the dataset never ends."""
        if is_endless(dataset):
            raise ValueError(
                f"`.{self.name}` got a dataset without end; expected one that ends, "
                "since what comes in an epoch is chosen from all of it. Leave "
                "`.repeat()` out: an epoch of `fit` reads the dataset once."
            )


def _copied(dataset: tf.data.Dataset, copies: tf.data.Dataset) -> tf.data.Dataset:
    """Returns each element as often as the number at its place in `copies` says."""

    def repeated(number: tf.Tensor, element: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(element).repeat(number)

    return tf.data.Dataset.zip((copies, dataset)).flat_map(repeated)


@dataclasses.dataclass(frozen=True)
class Sampler(_ByPlace):
    """Draws anew in each epoch which examples come, and how often.

    By position where there is a source, else of the elements that come.
    """

    seed: int | None = dataclasses.field(default=None, kw_only=True)
    source: RandomAccess | None = dataclasses.field(
        default=None, compare=False, repr=False, kw_only=True
    )

    def __post_init__(self) -> None:
        if self.seed is not None:
            checks.positive_int("seed", self.seed, minimum=0)

    @abc.abstractmethod
    def _plan(self, data: Any, settings: Settings) -> tuple[int, Draw]:
        """Reads what it needs; returns how many positions an epoch has, and a draw."""

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns what an epoch takes, drawn anew in each.

        By position that are positions, shuffled; on a stream elements in the order
        they have, copies together.
        """
        if self.source is not None:
            num_outputs, draw = self._plan(self.source, settings)
            return with_length(drawn(self.seed, draw), num_outputs)
        self._check_ends(dataset)
        num_outputs, draw = self._plan(dataset, settings)
        copies = drawn(self.seed, lambda random: np.bincount(draw(random)))
        return with_length(_copied(dataset, copies), num_outputs)

    @property
    def facts(self) -> str:
        """The way of drawing."""
        return "" if self.source is None else "by position, exact"


@dataclasses.dataclass(frozen=True)
class Balance(Sampler):
    """Makes all classes come equally often; `Pipeline.balance` explains the arguments.

    A class is an integer, a string, a whole float, or a row that is one-hot or holds
    probabilities, which counts by its largest value.
    """

    name: ClassVar[str] = "balance"
    by: By = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.by is None or isinstance(self.by, str) or callable(self.by)):
            raise TypeError(
                f"`by` is {self.by!r}; expected None, a key or a function of an "
                "element. Pass a function such as `lambda x, y: y`."
            )

    def _plan(self, data: Any, settings: Settings) -> tuple[int, Draw]:
        """Returns a draw in which classes come equally often, up to one."""
        pick = functools.partial(_pick, self.by)
        if isinstance(data, RandomAccess) and not callable(self.by):
            labels = np.asarray(pick(*as_arguments(data.tensors)))
        else:
            labels = _read(data, pick, "by", settings)
        classes, ids = np.unique(_classes(labels), return_inverse=True)
        if len(classes) == 1:
            warnings.warn(
                f"All {len(ids):,} examples are of class {classes.tolist()[0]!r}; "
                "expected two classes or more. Balancing changes nothing: check what "
                "`by` reads, or leave `.balance` out.",
                stacklevel=_STACKLEVEL,
            )
        ids = ids.reshape(-1)
        return len(ids), lambda random: balanced_plan(ids, len(ids), random)

    @property
    def setting(self) -> str:
        """What classes are read of, and the seed."""
        told = "target" if self.by is None else repr(self.by)
        return f"by {getattr(self.by, '__name__', told)}, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Weights(Sampler):
    """Draws examples in proportion to weights; `Pipeline.weights` has the arguments."""

    name: ClassVar[str] = "weights"
    weights: np.ndarray | Callable[..., Any] = dataclasses.field(repr=False)
    num_examples: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_examples is not None:
            checks.positive_int("num_examples", self.num_examples)
        if not callable(self.weights):
            object.__setattr__(self, "weights", _checked_weights(self.weights))

    def _plan(self, data: Any, settings: Settings) -> tuple[int, Draw]:
        """Returns independent draws in proportion to the weights."""
        weights = self.weights
        if callable(weights):
            weights = _checked_weights(_read(data, weights, "weights", settings))
        elif len(weights) != _count(data):
            raise ValueError(
                f"`weights` has {len(weights)} values for {_count(data)} examples; "
                "expected one for each example that reaches this stage, which comes "
                "after `.subset` and `.filter`. Pass a function of the element if "
                "those leave examples out."
            )
        num_outputs = self.num_examples or len(weights)
        # By the largest, since a sum of large weights may overflow.
        shares = weights / weights.max()
        shares /= shares.sum()
        return num_outputs, lambda random: random.choice(
            len(shares), num_outputs, p=shares
        )

    @property
    def setting(self) -> str:
        """How many are drawn, and the seed."""
        return f"{self.num_examples or 'as many'}, seed {self.seed}"


def _checked_weights(given: Any) -> np.ndarray:
    """Returns weights in float64, of which one at least is above 0."""
    weights = np.asarray(given)
    if weights.dtype.kind not in "biuf" or weights.ndim != 1:
        raise TypeError(
            f"`weights` has shape {weights.shape} and dtype {weights.dtype}; expected "
            "one number for each example, or a function of an element."
        )
    weights = weights.astype(np.float64)
    is_wrong = ~(np.isfinite(weights) & (weights >= 0))
    if is_wrong.any() or not weights.any():
        first = int(np.argmax(is_wrong))
        raise ValueError(
            f"`weights` has {float(weights[first])!r} at index {first} and "
            f"{int(is_wrong.sum())} such values in all; expected finite numbers of at "
            "least 0, one above it. Give examples the weight 0 to leave them out."
        )
    return weights


@dataclasses.dataclass(frozen=True)
class Subset(_ByPlace):
    """Keeps a part of the examples; `Pipeline.subset` explains the arguments."""

    name: ClassVar[str] = "subset"
    size: Any
    seed: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.size, numbers.Integral):
            checks.positive_int("size", self.size)
        else:
            checks.fraction("size", self.size, closed=False)
        checks.positive_int("seed", self.seed, minimum=0)

    def chosen(self, data: Any, settings: Settings) -> np.ndarray:
        """Returns the positions of the examples to keep, ascending, int64."""
        num_examples, size = _count(data), self.size
        if size < 1:
            size = max(1, round(size * num_examples))
        if size > num_examples:
            raise ValueError(
                f"`size` is {size}; expected at most {num_examples}, the number of "
                "examples. Ask for fewer, or for a share such as 0.1."
            )
        order = np.random.default_rng(self.seed).permutation(num_examples)
        return np.sort(order[:size])

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the examples to keep, in the order they have."""
        self._check_ends(dataset)
        positions = self.chosen(dataset, settings)
        with tf.device("CPU:0"):
            copies = tf.constant(np.bincount(positions))
        each = tf.data.Dataset.from_tensor_slices(copies)
        return with_length(_copied(dataset, each), len(positions))

    @property
    def setting(self) -> str:
        """How many are kept, and the seed."""
        many = f"{100 * self.size:g} %" if self.size < 1 else f"{self.size:,} examples"
        return f"{many}, seed {self.seed}"
