"""The stages that make batches: of any elements, or of sequences of like length."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.data._elements import (
    is_endless,
    known_length,
    looks_batched,
    never_empty,
    with_length,
)
from tfamp.data.stages import Settings, Stage, map_in_order
from tfamp.data.stages.labels import Memory, read_all
from tfamp.data.stages.sequences import (
    DEFAULT_MAX_SHAPES,
    LENGTH_MULTIPLE,
    BucketPlan,
    Padder,
    choose_boundaries,
    plan_of,
    sizes_of_batches,
)
from tfamp.records import checks, units

# From `Stage.check` over `Build.dataset` and `Pipeline.build` to the caller.
_STACKLEVEL = 4
# Lengths brought to Python at once.
_LENGTHS_AT_ONCE = 1024
# What `padded_batch` takes as a size for the longest in the batch.
_TO_LONGEST = -1
_NO_BATCH = (
    "`.bucket` with `drop_remainder=True` filled no batch, as no bucket has sequences "
    "for one; expected one full batch at least. Make batches smaller, pass fewer "
    "`boundaries` or a smaller `max_shapes`, or keep the remainder."
)
_TOO_LONG_ADVICE = (
    "Add a larger boundary, or pass `too_long='truncate'` or `too_long='drop'`."
)


@dataclasses.dataclass(frozen=True)
class Batch(Stage):
    """Joins elements into batches."""

    name: ClassVar[str] = "batch"
    size: int
    drop_remainder: bool

    def __post_init__(self) -> None:
        checks.positive_int("batch_size", self.size)

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if no batch would be left; warns if elements look like batches."""
        self.check_length(known_length(dataset))
        if looks_batched(dataset.element_spec):
            warnings.warn(
                f"Elements {dataset.element_spec} look like batches already: "
                "the first dimension of every part is unknown. Expected single "
                "examples; batching again adds a dimension. Leave out `.batch`, or "
                "pass `ds.unbatch()`. If these are sequences of varying length, pad "
                "them first.",
                stacklevel=_STACKLEVEL,
            )

    def check_length(self, length: int | None) -> None:
        """Raises if no batch would be left of `length` elements."""
        if self.drop_remainder and length is not None and length < self.size:
            raise ValueError(
                f"Batch size {self.size} with `drop_remainder=True` leaves no batch of "
                f"{length} elements; expected a size of at most {length}. Make the "
                "batch smaller, or keep the remainder."
            )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Batches on one thread: a copy is cheaper than handing it to another."""
        batches = dataset.batch(self.size, drop_remainder=self.drop_remainder)
        return self.checked(batches, known_length(dataset))

    def checked(
        self, batches: tf.data.Dataset, num_elements: int | None
    ) -> tf.data.Dataset:
        """Returns batches of which there is one in each pass, or an error."""
        if not self.drop_remainder or num_elements is not None:
            return batches
        message = (
            f"A pass brought no batch: fewer than {self.size} elements came, and "
            "`drop_remainder=True` drops what fills none; expected as many at least. "
            "Make the batch smaller, keep the remainder, or loosen `.filter`."
        )
        return never_empty(batches, message)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        length = known_length(dataset)
        rest = None if length is None else length % self.size
        if self.drop_remainder:
            dropped = "the rest" if rest is None else f"{rest} of {length} elements"
            reason = f"every batch has one static shape; drops {dropped}"
        elif rest == 0:
            reason = "every batch is full"
        else:
            last = "may be smaller" if rest is None else f"has {rest} elements"
            reason = f"keeps every element; the last batch {last}"
        return str(self.size), reason


@dataclasses.dataclass(frozen=True)
class Rebatch(Batch):
    """Makes batches out of chunks of rows; their number is None where unknown."""

    num_rows: int | None = None

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if no batch would be left; the source made the chunks for this."""
        self.check_length(self.num_rows)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Cuts and joins whole chunks."""
        batches = dataset.rebatch(self.size, drop_remainder=self.drop_remainder)
        if self.num_rows is None:
            return self.checked(batches, None)
        whole, rest = divmod(self.num_rows, self.size)
        count = whole + (rest > 0 and not self.drop_remainder)
        return with_length(batches, count)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        last = "drops the rest" if self.drop_remainder else "the last may be smaller"
        return str(self.size), f"from chunks, rows are never taken apart; {last}"


@dataclasses.dataclass(frozen=True)
class Bucket(Stage):
    """Joins sequences of about one length into batches, padded to a few lengths.

    `Pipeline.bucket` explains the arguments. `plans` are the buckets of the dataset of
    one build, once it is made.
    """

    name: ClassVar[str] = "bucket"
    batch_size: int | None = None
    _: dataclasses.KW_ONLY
    boundaries: Any = "auto"
    length: Any = None
    pad_to_multiple: int = LENGTH_MULTIPLE
    max_shapes: int = DEFAULT_MAX_SHAPES
    drop_remainder: bool = False
    padding_values: Any = None
    token_budget: int | None = None
    mask: str | None = None
    weight_padding: bool = False
    too_long: str = "error"
    memory: Memory = dataclasses.field(
        default_factory=Memory, compare=False, repr=False
    )
    plans: list[BucketPlan] = dataclasses.field(
        default_factory=list, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.token_budget is None):
            raise ValueError(
                f"`batch_size` is {self.batch_size!r} and `token_budget` is "
                f"{self.token_budget!r}; expected one of them. Pass `batch_size=64`, "
                "or `token_budget=64 * 512` for batches of equal cost."
            )
        for name in ("batch_size", "token_budget", "pad_to_multiple", "max_shapes"):
            if getattr(self, name) is not None:
                checks.positive_int(name, getattr(self, name))
        given = _given_boundaries(self.boundaries, self.pad_to_multiple)
        object.__setattr__(self, "boundaries", given)
        if given is not None and self.token_budget is not None:
            _check_budget(self.token_budget, given)
        checks.choice("too_long", self.too_long, ("error", "truncate", "drop"))
        if given is None and self.too_long != "error":
            raise ValueError(
                f"`too_long` is {self.too_long!r} with boundaries chosen from the "
                "lengths, and none is above those; expected boundaries of your own. "
                "Pass `boundaries=[64, 128, 256]`, or leave `too_long` out."
            )
        if self.length is not None and not callable(self.length):
            raise TypeError(
                f"`length` is {self.length!r}; expected a function of an element's "
                "parts. Pass one such as `lambda x, y: tf.shape(x)[0]`."
            )

    @property
    def plan(self) -> BucketPlan | None:
        """The buckets of the dataset built last, None before."""
        return self.plans[-1] if self.plans else None

    def for_build(self) -> "Bucket":
        """Returns the stage with buckets of its own."""
        return dataclasses.replace(self)

    def with_counts_of(self, builds: Sequence[Any]) -> "Bucket":
        """Returns the stage with the buckets of the last of its builds."""
        return builds[-1] if builds else self

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if elements are no sequences, or lengths cannot be read."""
        self._padder(dataset)
        if is_endless(dataset) and self._reads_lengths:
            raise ValueError(
                "`.bucket` got a dataset without end; expected one that ends, since "
                "its lengths are read first. Leave `.repeat()` out, or pass "
                "`boundaries=` with `too_long='error'`, which reads nothing first."
            )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns batches in the order in which they fill."""
        lengths = None
        if self._reads_lengths:
            lengths = self.memory.get(dataset, lambda: self._read(dataset, settings))
        plan = self._plan_of(lengths)
        self.plans.append(plan)
        return self._batched(dataset, plan, settings)

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a dataset of the same spec, and reads nothing."""
        boundaries = self.boundaries or (self.pad_to_multiple,)
        plan = BucketPlan(boundaries, (self.batch_size or 1,) * len(boundaries))
        return self._batched(dataset, plan, settings)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        plan = self.plan
        boundaries = self.boundaries if plan is None else plan.boundaries
        if self.batch_size is not None:
            size = f"{self.batch_size} a batch"
        else:
            size = f"{self.token_budget:,} places a batch"
        if boundaries is None:
            lengths = f"up to {self.max_shapes} lengths"
        else:
            lengths = f"length {', '.join(map(str, boundaries))}"
        if plan is not None and plan.waste is not None:
            one_shape = units.format_share(plan.waste_of_one_shape or 0.0)
            reason = f"padding is {units.format_share(plan.waste)}, else {one_shape}"
        elif self._reads_lengths:
            reason = "least padding for so few shapes; lengths are read once, at build"
        else:
            reason = "like lengths together; padding unknown, lengths are not read"
        if plan is not None and plan.num_too_long:
            done = "left out" if self.too_long == "drop" else "cut"
            reason += f"; {plan.num_too_long:,} too long, {done}"
        rest = "dropped" if self.drop_remainder else "kept, one smaller batch each"
        return f"{size}, {lengths}", f"{reason}; rest of a bucket {rest}"

    @property
    def _reads_lengths(self) -> bool:
        return self.boundaries is None or self.too_long != "error"

    def _padder(self, dataset: tf.data.Dataset) -> Padder:
        return Padder(dataset.element_spec, self)

    def _read(self, dataset: tf.data.Dataset, settings: Settings) -> np.ndarray:
        """Returns the length of every element."""
        lengths = map_in_order(dataset, self._padder(dataset).length_of, settings)
        batches = lengths.batch(_LENGTHS_AT_ONCE)
        return read_all(batches, "Reading lengths", known_length(dataset), "the length")

    def _plan_of(self, lengths: np.ndarray | None) -> BucketPlan:
        boundaries = self.boundaries
        if boundaries is None:
            boundaries = choose_boundaries(
                np.asarray(lengths),
                multiple=self.pad_to_multiple,
                max_shapes=self.max_shapes,
            )
        if self.token_budget is not None:
            _check_budget(self.token_budget, boundaries)
        sizes = sizes_of_batches(
            boundaries, batch_size=self.batch_size, token_budget=self.token_budget
        )
        plan = plan_of(
            lengths, boundaries, sizes, keeps_too_long=self.too_long == "truncate"
        )
        if self.drop_remainder and lengths is not None and not plan.fills_one:
            raise ValueError(f"Of {len(lengths):,} sequences {_NO_BATCH}")
        if plan.num_too_long and self.too_long != "error":
            total = 0 if lengths is None else len(lengths)
            done = "left out" if self.too_long == "drop" else "cut to it"
            text = "%d of %d sequences are longer than %d, the last boundary: %s."
            logging.warning(text, plan.num_too_long, total, boundaries[-1], done)
        return plan

    def _batched(
        self, dataset: tf.data.Dataset, plan: BucketPlan, settings: Settings
    ) -> tf.data.Dataset:
        padder = self._padder(dataset)
        last = plan.boundaries[-1]
        boundaries = tf.constant(plan.boundaries, tf.int64)
        sizes = tf.constant(plan.batch_sizes, tf.int64)
        if any(isinstance(s, tf.RaggedTensorSpec) for s in padder.specs):
            dataset = map_in_order(dataset, padder.as_tensors, settings)
        if self.too_long == "drop":
            dataset = dataset.filter(lambda *parts: padder.length_of(*parts) <= last)
        elif self.too_long == "truncate":
            cut = functools.partial(padder.cut, last)
            dataset = map_in_order(dataset, cut, settings)

        # Where lengths vary by epoch, one may be above those that were read. Such
        # sequences are padded to the longest among them.
        is_open, padded_to = self.boundaries is None, boundaries
        if is_open:
            padded_to = tf.concat([boundaries, [_TO_LONGEST]], 0)
            sizes = tf.concat([sizes, sizes[-1:]], 0)

        def bucket_of(*parts: Any) -> tf.Tensor:
            length = padder.length_of(*parts)
            if self.too_long == "truncate":
                length = tf.minimum(length, last)
            bucket = tf.searchsorted(boundaries, length[None], out_type=tf.int64)[0]
            if is_open:
                return bucket
            above = "A sequence is above the last boundary, of length"
            advice = f"Expected at most {last}. {_TOO_LONG_ADVICE}"
            fits = tf.debugging.Assert(length <= last, [above, length, advice])
            with tf.control_dependencies([fits]):
                return tf.identity(bucket)

        def batch(bucket: tf.Tensor, window: tf.data.Dataset) -> tf.data.Dataset:
            # A Python number gives the batch a static size.
            size = self.batch_size or tf.gather(sizes, bucket)
            return padder.batch(window, tf.gather(padded_to, bucket), size)

        batches = dataset.group_by_window(
            bucket_of, batch, window_size_func=lambda bucket: tf.gather(sizes, bucket)
        )
        if not self.drop_remainder:
            return batches
        return never_empty(batches, f"In this pass {_NO_BATCH}")


def _check_budget(token_budget: int, boundaries: tuple[int, ...]) -> None:
    """Raises if a batch has no room for one of the longest sequences."""
    if token_budget < boundaries[-1]:
        raise ValueError(
            f"`token_budget` is {token_budget}, and the longest sequences are padded "
            f"to {boundaries[-1]}; expected room for one at least. Raise it, or cut "
            "sequences with `boundaries=` and `too_long='truncate'`."
        )


def _given_boundaries(boundaries: Any, multiple: int) -> tuple[int, ...] | None:
    """Returns boundaries that the caller gave, None to choose them."""
    if boundaries is None:  # of a copy
        return None
    if isinstance(boundaries, str):
        checks.choice("boundaries", boundaries, ("auto",))
        return None
    given = tuple(checks.positive_int("boundaries", one) for one in boundaries)
    if not given or any(a >= b for a, b in zip(given, given[1:], strict=False)):
        raise ValueError(
            f"`boundaries` are {given}; expected at least one length, ascending. Sort "
            "them, each once."
        )
    odd = [one for one in given if one % multiple]
    if odd:
        up = tuple(sorted({-(-one // multiple) * multiple for one in given}))
        raise ValueError(
            f"`boundaries` has {odd[0]}, which is no multiple of {multiple}; expected "
            f"such multiples, which tensor cores want. Pass {up}, or "
            "`pad_to_multiple=1`."
        )
    return given
