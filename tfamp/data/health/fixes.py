"""Applies the fixes of findings to a dataset."""

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from tfamp.data._cpus import num_usable_cpus
from tfamp.data.profile.examples import flatten
from tfamp.records import checks
from tfamp.records.findings import Findings, Fix

_KINDS = ("cast", "standardize")


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
    return dataset.map(
        lambda *parts: _fixed_element(parts, by_column),
        num_parallel_calls=num_usable_cpus(),
        deterministic=True,
    )


def _fixed_element(parts: tuple[Any, ...], fixes: Mapping[str, Fix]) -> Any:
    """Returns an element, which `map` hands over in parts, with its fixes."""
    roles = ("x", "y", "sample_weight")
    fixed = tuple(
        _fixed(role, part, fixes) for role, part in zip(roles, parts, strict=False)
    )
    return fixed if len(parts) > 1 else fixed[0]


def _fixed(name: str, part: Any, fixes: Mapping[str, Fix]) -> Any:
    """Returns a part of an element, nested as it was."""
    if isinstance(part, Mapping):
        return {key: _fixed(f"{name}/{key}", v, fixes) for key, v in part.items()}
    if isinstance(part, (tuple, list)):
        values = [_fixed(f"{name}/{i}", v, fixes) for i, v in enumerate(part)]
        if hasattr(part, "_fields"):  # a named tuple takes its values one by one
            return type(part)(*values)
        return type(part)(values)
    return _fixed_tensor(part, fixes[name]) if name in fixes else part


def _fixed_tensor(tensor: tf.Tensor, fix: Fix) -> tf.Tensor:
    if fix.kind == "cast":
        return tf.cast(tensor, fix.dtype)
    offset, scale = (
        tf.constant(numbers[0] if len(numbers) == 1 else numbers, tf.float64)
        for numbers in (fix.offset, fix.scale)
    )
    return tf.cast((tf.cast(tensor, tf.float64) - offset) / scale, fix.dtype)
