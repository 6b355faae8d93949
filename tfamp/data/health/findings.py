"""How findings on columns are made, and the fixes that they carry applied."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.data.health.profile import Profile
from tfamp.data.profile.examples import flatten, map_columns
from tfamp.machine.cpus import num_usable_cpus
from tfamp.records import checks
from tfamp.records.findings import Finding, Findings, Fix, Severity
from tfamp.records.units import format_share

_KINDS = ("cast", "standardize")
# With values so many deviations away, all others would end up next to 0.
_MAX_STANDARDIZED = 100.0


class Hits:
    """The features of a column that a rule fires for; false if there are none.

    The highest `score` is the worst of them, whose figures go into the message.
    """

    def __init__(self, profile: Profile, mask: np.ndarray, score: np.ndarray) -> None:
        self._profile, self._number = profile, int(mask.sum())
        comparable = np.where(mask, np.nan_to_num(score, posinf=1e308), -np.inf)
        self.worst = int(np.argmax(comparable))

    def __bool__(self) -> bool:
        """Whether the rule fires."""
        return self._number > 0

    def finding(
        self,
        rule: str,
        severity: Severity,
        message: str,
        remedy: str,
        *,
        figure: float,
        details: dict[str, int | float | str | None] | None = None,
        fix: Fix | None = None,
    ) -> Finding:
        """Returns the finding, whose message begins with the worst feature.

        It is on that feature if it is the only one, else on the column.
        """
        column = name = self._profile.place(self.worst)
        if self._number > 1:
            column, all_features = self._profile.column.name, self._profile.num_features
            name = f"{name} (worst of {self._number} of {all_features} features)"
        return Finding(
            rule,
            severity,
            f"{name} {message}",
            remedy,
            column=column,
            figure=float(figure),
            details={"num_features": self._number, **(details or {})},
            fix=fix,
        )


def standardizing(profile: Profile) -> Fix | None:
    """Returns the fix that takes mean and standard deviation out of an input column.

    None where that does not help, or would turn codes of categories into numbers.
    """
    column = profile.column
    if column.role != "input" or column.is_text or profile.may_be_index:
        return None
    if any(profile.looks_like_ids(i) for i in range(profile.num_features)):
        return None
    mean, std = profile.mean, np.where(profile.std > 0, profile.std, 1.0)
    low, high = profile.low.astype(float), profile.high.astype(float)
    usable = np.isfinite(profile.std).all() and (profile.num_finite > 0).all()
    distance = np.maximum(high - mean, mean - low)
    if not usable or (distance / std).max() > _MAX_STANDARDIZED:
        return None
    return Fix(
        column.name,
        "standardize",
        "float32",
        "subtracted in float64, before anything rounds; serve with the same numbers",
        tuple(mean.tolist()),
        tuple(std.tolist()),
    )


def number(value: int | float) -> str:
    """Returns a number with at most four digits that matter; integers as they are.

    Example:
        >>> number(2**60 + 1), number(0.123456), number(65504.0), number(1e-9)
        ('1,152,921,504,606,846,977', '0.1235', '65,504', '1e-09')
    """
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.4g}"


def share_of(part: int, whole: int) -> str:
    """Returns "3 of 100 values (3.0 %)"."""
    return f"{part:,} of {whole:,} values ({format_share(part / max(1, whole))})"


def apply_fixes(
    dataset: Any,
    fixes: Findings | Iterable[Fix],
    *,
    kinds: Iterable[str] = ("cast",),
) -> tf.data.Dataset:
    """Returns the dataset with the columns changed as `check` proposes.

    "cast" keeps every number that the model gets, in fewer bytes. "standardize"
    changes them: it takes mean and standard deviation out in float64, before
    anything rounds, and serving has to do the same, with the numbers in
    `Fix.offset` and `Fix.scale`. Hence it only runs if it is asked for. Each
    change is logged in one line, and `findings.fixes` lists them beforehand.

    Args:
        dataset: What was checked, or data of the same columns: a `tf.data.Dataset`
            of batches or single examples, or a `Pipeline`.
        fixes: The findings, or some of `findings.fixes`.
        kinds: Which kinds to apply. A column with both gets "standardize" if that
            is among them.

    Returns:
        A dataset of the same length and order.

    Raises:
        TypeError: `dataset` is something else.
        ValueError: A kind does not exist, or a fix names a column that is not there.

    Example:
        >>> import numpy as np
        >>> from tfamp.data.health import check
        >>> data = tf.data.Dataset.from_tensor_slices(np.arange(100)).batch(10)
        >>> found = check(data, compute_dtype="float16")
        >>> print(*found.fixes)
        x: cast to int32; exact: values lie in [0, 99]
        >>> apply_fixes(data, found).element_spec.dtype
        tf.int32
    """
    chosen = [checks.choice("kinds", kind, _KINDS) for kind in kinds]
    if callable(getattr(dataset, "build", None)):
        dataset = dataset.build()
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"`dataset` is of type {type(dataset).__name__}; expected a "
            "`tf.data.Dataset` or a `Pipeline`. Wrap arrays by "
            "`tfamp.data.Pipeline.from_arrays(x, y)`."
        )
    listed = fixes.fixes if isinstance(fixes, Findings) else tuple(fixes)
    by_column: dict[str, Fix] = {}
    for fix in sorted(listed, key=lambda fix: _KINDS.index(fix.kind)):
        if fix.kind in chosen:
            by_column[fix.column] = fix
    names = tuple(flatten(dataset.element_spec))
    if unknown := tuple(name for name in by_column if name not in names):
        raise ValueError(
            f"The fixes name {unknown!r}; expected columns of the dataset: {names!r}. "
            "Pass the findings of this dataset."
        )
    if not by_column:
        logging.info("tfamp: nothing to fix of kinds %s.", chosen)
        return dataset
    for fix in by_column.values():
        logging.info("tfamp: %s", fix)

    def fixed(*parts: Any) -> Any:
        changed = map_columns(parts, lambda name, v: _fixed(v, by_column.get(name)))
        return changed if len(parts) > 1 else changed[0]

    return dataset.map(fixed, num_parallel_calls=num_usable_cpus(), deterministic=True)


def _fixed(tensor: tf.Tensor, fix: Fix | None) -> tf.Tensor:
    if fix is None:
        return tensor
    if fix.kind == "cast":
        return tf.cast(tensor, fix.dtype)
    offset, scale = (
        tf.constant(numbers[0] if len(numbers) == 1 else numbers, tf.float64)
        for numbers in (fix.offset, fix.scale)
    )
    return tf.cast((tf.cast(tensor, tf.float64) - offset) / scale, fix.dtype)
