"""Fills missing values by a model of scikit-learn, inside a dataset."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp import _checks
from tfamp.data._elements import known_length, with_length_of
from tfamp.data._progress import progress
from tfamp.data._stages import Settings, map_in_order
from tfamp.data.statistics.columns import (
    Layout,
    inputs_of,
    named_columns,
    read_layout,
)

# Rows given to an imputer at once: a call costs about 0.2 ms whatever it is given.
CHUNK_ROWS = 256
MAX_EXAMPLES = 10_000


def is_imputer(value: Any) -> bool:
    """Whether a value has the methods of scikit-learn's imputers."""
    return callable(getattr(value, "fit", None)) and callable(
        getattr(value, "transform", None)
    )


def fit_imputer(
    dataset: Any, imputer: Any, *, max_examples: int = MAX_EXAMPLES, seed: int = 0
) -> Any:
    """Returns a copy of an imputer, fitted to a sample of a dataset's inputs.

    The sample is drawn in one pass with the same chance for every example (a
    reservoir). Fit on the training data alone, and use the result for validation
    too.

    Args:
        dataset: A `tf.data.Dataset` of examples x, (x, y) or (x, y, sample_weight),
            or a `tfamp.data.Pipeline`; x is a vector or a dict of scalars and
            vectors. Text columns are left out.
        imputer: A `SimpleImputer`, `KNNImputer` or `IterativeImputer` of
            scikit-learn, or anything with their `fit` and `transform`.
        max_examples: Size of the sample. `KNNImputer` keeps all of it, and its time
            for one example grows with it.
        seed: Of the draw.

    Returns:
        The fitted copy; `imputer` stays as it is.

    Raises:
        ImportError: scikit-learn is not installed.
        TypeError: `imputer` is none, or inputs are not rows of numbers.
        ValueError: The dataset is empty or infinite.

    Source: Vitter, Random Sampling with a Reservoir, 1985, algorithm R.
    """
    base = _checks.require("sklearn.base", extra="data", purpose="`fit_imputer`")
    max_examples = _checks.positive_int("max_examples", max_examples)
    if not is_imputer(imputer):
        raise TypeError(
            f"`imputer` is {imputer!r}; expected one of scikit-learn's. Pass "
            "`sklearn.impute.KNNImputer()`, for example."
        )
    if hasattr(dataset, "build"):
        dataset = dataset.build()
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "`dataset` is infinite, so no sample of it is fair; expected one pass. "
            "Leave out `.repeat()`, or pass `dataset.take(n)`."
        )
    rows = _sample(dataset, max_examples, np.random.default_rng(seed))
    return base.clone(imputer).fit(rows)


@dataclasses.dataclass(frozen=True)
class Imputation:
    """An imputer, which each build fits to its own data where it is not fitted.

    Attributes:
        imputer: As for `fit_imputer`.
        is_fitted: Whether it is fitted.
    """

    imputer: Any
    is_fitted: bool

    @classmethod
    def of(cls, imputer: Any) -> "Imputation":
        """Returns an imputer that is fitted already, or not yet."""
        return cls(imputer, _is_fitted(imputer))

    @property
    def name(self) -> str:
        """The class of the imputer."""
        return type(self.imputer).__name__

    def fitted(self, dataset: tf.data.Dataset) -> "Imputation":
        """Returns it fitted to a sample of a dataset, itself if it is fitted."""
        if self.is_fitted:
            return self
        return Imputation(fit_imputer(dataset, self.imputer), True)

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises unless inputs are rows of numbers."""
        _row_layout(dataset.element_spec)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a dataset of filled elements: same shapes, dtypes and length."""
        spec = dataset.element_spec
        layout = _row_layout(spec)
        is_tuple = isinstance(spec, tuple)

        def fill(*parts: Any) -> Any:
            element = parts if is_tuple else parts[0]
            inputs = inputs_of(element)
            columns = named_columns(inputs)
            rows = tf.numpy_function(
                self._transform, [_joined(columns, layout)], tf.float64
            )
            filled = {**columns, **_split(rows, columns, layout)}
            new = filled if layout.named else next(iter(filled.values()))
            return (new, *parts[1:]) if is_tuple else new

        chunks = map_in_order(dataset.batch(CHUNK_ROWS), fill, settings)
        return with_length_of(dataset, chunks.unbatch())

    def _transform(self, rows: np.ndarray) -> np.ndarray:
        filled = np.asarray(self.imputer.transform(rows), np.float64)
        if filled.shape != rows.shape:
            raise ValueError(
                f"{self.name} made {filled.shape[1]} features of {rows.shape[1]}; "
                "expected as many. Set `add_indicator=False` and "
                "`keep_empty_features=True`."
            )
        return filled


def _is_fitted(imputer: Any) -> bool:
    validation = _checks.require(
        "sklearn.utils.validation", extra="data", purpose="`missing=imputer`"
    )
    exceptions = _checks.require(
        "sklearn.exceptions", extra="data", purpose="`missing=imputer`"
    )
    try:
        validation.check_is_fitted(imputer)
    except exceptions.NotFittedError:
        return False
    return True


def _row_layout(element_spec: Any) -> Layout:
    """Returns the columns of numbers of single examples.

    Raises:
        TypeError: A column has more than one axis, or all are text.
    """
    layout = read_layout(element_spec, batched=False)
    numbers = [
        (name, spec)
        for name, spec in zip(layout.names, layout.specs, strict=True)
        if spec.dtype != tf.string
    ]
    wrong = {name: tuple(spec.shape) for name, spec in numbers if spec.shape.rank > 1}
    if wrong or not numbers:
        raise TypeError(
            f"Inputs {wrong or layout.names!r} are no rows of numbers; expected "
            "scalars and vectors, which an imputer fills from one another. Fill with "
            "`missing='mean'` instead."
        )
    names, specs = zip(*numbers, strict=True)
    return Layout(names, specs, layout.named, False, layout.reason)


def _joined(columns: dict[str, tf.Tensor], layout: Layout) -> tf.Tensor:
    """Returns batched columns side by side, float64 `(rows, features)`."""
    parts = []
    for name in layout.names:
        part = tf.cast(columns[name], tf.float64)
        parts.append(part[:, None] if layout.is_scalar(name) else part)
    return tf.concat(parts, axis=1)


def _split(
    rows: tf.Tensor, columns: dict[str, tf.Tensor], layout: Layout
) -> dict[str, tf.Tensor]:
    """Returns rows as the columns they were joined from, in their dtypes."""
    sizes = [layout.num_features(name) for name in layout.names]
    rows = tf.ensure_shape(rows, (None, sum(sizes)))
    found = {}
    for name, part in zip(layout.names, tf.split(rows, sizes, axis=1), strict=True):
        dtype = columns[name].dtype
        part = part[:, 0] if layout.is_scalar(name) else part
        part = part if dtype.is_floating else tf.round(part)
        found[name] = tf.cast(part, dtype)
    return found


def _sample(
    dataset: tf.data.Dataset, size: int, random: np.random.Generator
) -> np.ndarray:
    """Returns rows drawn from a dataset, each with the same chance."""
    layout = _row_layout(dataset.element_spec)
    is_tuple = isinstance(dataset.element_spec, tuple)

    def join(*parts: Any) -> tf.Tensor:
        columns = named_columns(inputs_of(parts if is_tuple else parts[0]))
        return _joined(columns, layout)

    sample: np.ndarray | None = None
    seen = 0
    length = known_length(dataset)
    with progress("Sampling for the imputer", length, unit="examples") as update:
        for rows in dataset.batch(4 * CHUNK_ROWS).map(join).as_numpy_iterator():
            if sample is None:
                sample = np.empty((0, rows.shape[1]))
            first = min(len(rows), size - len(sample))
            sample = np.concatenate([sample, rows[:first]])
            numbers = np.arange(seen + first, seen + len(rows))
            places = random.integers(0, numbers + 1)
            # Several rows may draw one place; the last of them stays, as in turn.
            for row, place in zip(rows[first:], places, strict=True):
                if place < size:
                    sample[place] = row
            seen += len(rows)
            update(seen)
    if sample is None:
        raise ValueError(
            "`dataset` has no element to fit an imputer to; expected at least one. "
            "Look at its source, and at filters before this."
        )
    return sample
