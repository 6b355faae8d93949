"""Which examples come, and how often: balanced, by weights, or the same part each time.

Labels and weights are read in one pass; a plan says for an epoch which positions come,
in random order. On a stream an element comes as often as it says, copies together.
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

from tfamp.data import _elements
from tfamp.data.sources import RandomAccess
from tfamp.data.stages import Settings, Stage, map_in_order
from tfamp.data.stages.batches import drawn
from tfamp.records import checks

# What rows of probabilities may miss 1 by, in float16 too.
_SUM_TOLERANCE = 0.01
By = Callable[..., Any] | str | None
Draw = Callable[[np.random.Generator], np.ndarray]


def balanced_plan(
    ids: np.ndarray, num_outputs: int, random: np.random.Generator
) -> np.ndarray:
    """Returns positions in which classes come equally often, shuffled.

    Which classes get the places that are left over is drawn. Within a class every
    member comes equally often, up to one, and which come once more is drawn.
    """
    counts = np.bincount(ids)
    members = np.split(np.argsort(ids, kind="stable"), np.cumsum(counts)[:-1])
    left_over = random.permutation(len(counts)) < num_outputs % len(counts)
    parts = [
        np.resize(random.permutation(own), num_outputs // len(counts) + more)
        for own, more in zip(members, left_over.astype(int), strict=True)
    ]
    return random.permutation(np.concatenate(parts))


def _read(data: Any, pick: Any, argument: str, settings: Settings) -> np.ndarray:
    elements = data.dataset(settings) if isinstance(data, RandomAccess) else data
    return _elements.read_all(map_in_order(elements, pick, settings), argument)


def _count(data: Any, name: str) -> int:
    if isinstance(data, RandomAccess):
        return data.num_examples
    ones = data.map(lambda *parts: tf.constant(True))
    return _elements.known_length(data) or len(_elements.read_all(ones, name))


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
        "one tensor as target, or a key of a dict. Pass that, or `lambda x, y: y[...]`."
    )


def _classes(values: np.ndarray) -> np.ndarray:
    """Returns one class an example: of rows that sum to 1 the place of the largest."""
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
            "expected integers, strings, one-hot rows, or probabilities. Pass `by=` a "
            "function that gives one class, as `lambda x, y: tf.cast(y > 3, 'int32')`."
        )
    return values


def _copied(dataset: tf.data.Dataset, copies: tf.data.Dataset) -> tf.data.Dataset:
    """Returns each element as often as the number at its place in `copies` says."""

    def repeated(number: tf.Tensor, element: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(element).repeat(number)

    return tf.data.Dataset.zip((copies, dataset)).flat_map(repeated)


@dataclasses.dataclass(frozen=True)
class Sampler(Stage):
    """Draws anew in each epoch which examples come, and how often."""

    needs_order = "pass"
    seed: int | None = dataclasses.field(default=None, kw_only=True)
    source: RandomAccess | None = dataclasses.field(
        default=None, compare=False, repr=False, kw_only=True
    )

    def __post_init__(self) -> None:
        if self.seed is not None:
            checks.positive_int("seed", self.seed, minimum=0)

    @abc.abstractmethod
    def _plan(self, data: Any, settings: Settings) -> tuple[int, Draw]:
        """Returns how many positions an epoch has, and a draw."""

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns shuffled positions, or a stream's elements, copies together."""
        if self.source is not None:
            num_outputs, draw = self._plan(self.source, settings)
            return _elements.with_length(drawn(self.seed, draw), num_outputs)
        _elements.check_ends(self.name, dataset)
        num_outputs, draw = self._plan(dataset, settings)
        copies = drawn(self.seed, lambda random: np.bincount(draw(random)))
        return _elements.with_length(_copied(dataset, copies), num_outputs)

    facts = property(lambda self: "by position, exact" if self.source else "")


@dataclasses.dataclass(frozen=True)
class Balance(Sampler):
    """Makes all classes come equally often; `Pipeline.balance` explains the rest."""

    name: ClassVar[str] = "balance"
    by: By = None

    def _plan(self, data: Any, settings: Settings) -> tuple[int, Draw]:
        """Returns a draw in which classes come equally often, up to one."""
        pick = functools.partial(_pick, self.by)
        if isinstance(data, RandomAccess) and not callable(self.by):
            labels = np.asarray(pick(*_elements.as_arguments(data.tensors)))
        else:
            labels = _read(data, pick, "by", settings)
        classes, ids = np.unique(_classes(labels), return_inverse=True)
        if len(classes) == 1:
            warnings.warn(
                f"All {len(ids):,} examples are of class {classes.tolist()[0]!r}; "
                "expected two classes or more. Balancing changes nothing: check what "
                "`by` reads, or leave `.balance` out.",
                stacklevel=checks.level_of_user(),
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
    """Draws examples in proportion to weights."""

    name: ClassVar[str] = "weights"
    weights: np.ndarray | Callable[..., Any] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.weights):
            object.__setattr__(self, "weights", _checked_weights(self.weights))

    def _plan(self, data: Any, settings: Settings) -> tuple[int, Draw]:
        weights = self.weights
        if callable(weights):
            weights = _checked_weights(_read(data, weights, "weights", settings))
        elif len(weights) != _count(data, "weights"):
            raise ValueError(
                f"`weights` has {len(weights)} values for {_count(data, 'weights')} "
                "examples; expected one for each example that `.subset` and `.filter` "
                "leave. Pass a function of the element if they leave some out."
            )
        # By the largest, since a sum of large weights may overflow.
        shares = weights / weights.max()
        shares /= shares.sum()
        size = len(shares)
        return size, lambda random: random.choice(size, size, p=shares)

    setting = property(lambda self: f"seed {self.seed}")


def _checked_weights(given: Any) -> np.ndarray:
    weights = np.asarray(given, np.float64)
    if weights.ndim != 1:
        raise ValueError(
            f"`weights` has the shape {weights.shape}; expected one number for each "
            "example. Pass a vector, or a function of an element."
        )
    is_wrong = ~(np.isfinite(weights) & (weights >= 0))
    if is_wrong.any() or not weights.any():
        first = int(np.argmax(is_wrong))
        raise ValueError(
            f"`weights` has {float(weights[first])!r} at index {first} and "
            f"{int(is_wrong.sum())} such values in all; expected finite numbers of at "
            "least 0, one above it. Give what is to be left out the weight 0."
        )
    return weights


@dataclasses.dataclass(frozen=True)
class Subset(Stage):
    """Keeps a part of the examples; `Pipeline.subset` explains the arguments."""

    name: ClassVar[str] = "subset"
    needs_order = "pass"
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
        num_examples, size = _count(data, "subset"), self.size
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
        _elements.check_ends(self.name, dataset)
        positions = self.chosen(dataset, settings)
        with tf.device("CPU:0"):
            copies = tf.constant(np.bincount(positions))
        each = tf.data.Dataset.from_tensor_slices(copies)
        return _elements.with_length(_copied(dataset, each), len(positions))

    @property
    def setting(self) -> str:
        """How many are kept, and the seed."""
        many = f"{100 * self.size:g} %" if self.size < 1 else f"{self.size:,} examples"
        return f"{many}, seed {self.seed}"
