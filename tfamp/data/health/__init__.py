"""Precision health of training data: what a compute dtype would spoil, and more.

`check` makes one pass over data, then asks every rule.
"""

import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

from tfamp.data._examples import Column, Examples, read
from tfamp.data.health import labels, precision, splits
from tfamp.data.health.profile import Profile, Rounding, rounding_for
from tfamp.records import checks, formats
from tfamp.records.findings import Finding, Findings

_NEED_VALIDATION = ("leak", "unseen_class", "drift")
_RULES = (
    *(*precision.RULES, *labels.RULES),
    *("duplicates", "leak", "drift", "dtypes"),
)
# What is worth saying of validation data too: the rest follows from training data.
_RULES_OF_VALIDATION = ("nan", "inf", "overflow")


@dataclasses.dataclass(frozen=True)
class _DataProfile:
    """What a pass over one set of examples learned."""

    profiles: dict[str, Profile]
    labels: dict[str, labels.Labels]
    hashes: splits.RowHashes
    num_examples: int


def check(
    train: Any,
    validation: Any = None,
    *,
    compute_dtype: Any,
    num_classes: int | None = None,
    batched: bool | None = None,
) -> Findings:
    """Returns what would go wrong with this data in a compute dtype, before training.

    One pass over each set, in float64, exact but for what is said here. Distinct
    values and drift come from a random sample of up to 20,000 examples (the same at
    each call). Drift is reported if distributions differ by at least 0.1, and the
    chance of any false alarm over all columns is below 1 %; it needs scipy. Duplicates
    are exact up to 4 million examples, estimated from a part of them beyond. Memory:
    about 32 MiB for each column and 16 bytes for each example. Time: about 20 ns a
    value, 6 ns a byte of images.

    Vectors are looked at feature by feature ("x[3]"), images as a whole. NaN in one
    place hides nothing in others.

    Args:
        train: A `tf.data.Dataset` of batches or single examples, a `Pipeline`, or
            arrays: x, (x, y), (x, y, sample_weight). x and y may be nested dicts or
            tuples of columns. Give it as the model gets it, without `.repeat()`.
        validation: Data of the same columns; None skips the rules that compare.
        compute_dtype: "float32", "float16", "bfloat16", or the policy to train in,
            such as "mixed_float16".
        num_classes: Outputs of a classifier; None leaves out the check against it.
        batched: Whether a dataset's elements are batches; None to tell from the
            stages of a pipeline, else from their shapes.

    Returns:
        Findings, worst first. "error" spoils the result or stops training; healthy
        data has notes at most.

    Raises:
        TypeError: The data is of another type, ragged, sparse or complex.
        ValueError: It is empty or infinite, `validation` has other columns, or
            `compute_dtype` is unknown.

    Example:
        >>> import numpy as np
        >>> seconds = 1.7e9 + np.arange(1000.0) * 60
        >>> found = check({"time": seconds}, compute_dtype="float16")
        >>> found[0].rule, found[0].column, found[0].severity
        ('overflow', 'x/time', 'error')
        >>> found[0].fix.kind
        'standardize'
    """
    rounding = rounding_for(compute_dtype)
    if num_classes is not None:
        num_classes = checks.positive_int("num_classes", num_classes)
    # Both are looked at before either is read, which may take long.
    examples = read("train", train, batched=batched)
    others = None
    if validation is not None:
        others = read("validation", validation, batched=batched)
        _check_same_columns(examples.columns, others.columns)
    trained = _profile_of(examples, rounding)
    validated = None if others is None else _profile_of(others, rounding)
    found = [*_rules_on(trained, rounding)]
    for name, counted in trained.labels.items():
        other = None if validated is None else validated.labels[name]
        found += labels.find(counted, other, num_classes)
    hashes = None if validated is None else validated.hashes
    found += splits.find_equal(trained.hashes, hashes)
    skipped: dict[str, str] = {}
    if validated is None:
        skipped = dict.fromkeys(_NEED_VALIDATION, "no `validation`")
    else:
        # In validation, where training data has nothing of the kind.
        said = {(one.rule, one.place.split("[")[0]) for one in found}
        for one in _rules_on(validated, rounding):
            is_new = (one.rule, one.place.split("[")[0]) not in said
            if one.rule in _RULES_OF_VALIDATION and is_new:
                message = f"In validation, {one.message}"
                found.append(dataclasses.replace(one, message=message, fix=None))
        found += _compare_dtypes(trained, validated)
        if importlib.util.find_spec("scipy") is None:
            skipped = {"drift": "scipy is not installed; `pip install tfamp[data]`"}
        else:
            found += splits.find_drift(list(_comparisons(trained, validated)))
    also = f" and {validated.num_examples:,} validation" if validated else ""
    return Findings(
        tuple(found),
        f"{trained.num_examples:,} training{also} examples, "
        f"{len(trained.profiles)} columns, for {rounding.name}",
        tuple(rule for rule in _RULES if rule not in skipped),
        tuple(f"{rule}: {reason}." for rule, reason in skipped.items()),
    )


def _profile_of(examples: Examples, rounding: Rounding) -> _DataProfile:
    """Makes the one pass over a set of examples."""
    # Losses are computed in float32, whatever the layers compute in.
    single = Rounding(formats.FLOAT32)
    profiles = {
        column.name: Profile(column, rounding if column.role == "input" else single)
        for column in examples.columns
    }
    targets = [one for one in examples.columns if one.role == "target"]
    counted = {column.name: labels.Labels(column) for column in targets}
    hashes = splits.RowHashes()

    def take(chunk: dict[str, Any]) -> None:
        for name, values in chunk.items():
            profiles[name].update(values)
            if name in counted:
                counted[name].update(values)
        hashes.update([chunk[c.name] for c in examples.columns if c.role == "input"])

    num_examples = examples.scan(f"Checking `{examples.argument}`", take)
    return _DataProfile(profiles, counted, hashes, num_examples)


def _rules_on(data: _DataProfile, rounding: Rounding) -> Iterator[Finding]:
    """Yields what is wrong with single columns."""
    for profile in data.profiles.values():
        if not profile.column.is_text and profile.count.any():
            yield from precision.find(profile, rounding)


def _comparisons(
    trained: _DataProfile, validated: _DataProfile
) -> Iterator[splits.Comparison]:
    """Yields the comparison of every column, targets that are classes by counts."""
    for name, profile in trained.profiles.items():
        counted = trained.labels.get(name)
        if counted is not None and counted.are_countable:
            yield from splits.compare_labels(counted, validated.labels[name])
        elif profile.column.role != "weight":
            yield from splits.compare(profile, validated.profiles[name])


def _check_same_columns(
    train: tuple[Column, ...], validation: tuple[Column, ...]
) -> None:
    """Raises if the sets cannot be compared column by column."""
    names = [tuple(column.name for column in part) for part in (train, validation)]
    if sorted(names[0]) != sorted(names[1]):
        raise ValueError(
            f"`validation` has the columns {names[1]!r}; expected those of `train`: "
            f"{names[0]!r}. Read both the same way."
        )
    others = {column.name: column for column in validation}
    for column in train:
        other = others[column.name]
        if len(column.shape) != len(other.shape) or column.is_text != other.is_text:
            raise ValueError(
                f"Column {column.name!r} of `validation` is {other.dtype} of shape "
                f"{other.shape!r}; expected {column.dtype} of shape {column.shape!r} "
                "as in `train`. Read both the same way, or pass `batched`."
            )


def _compare_dtypes(
    trained: _DataProfile, validated: _DataProfile
) -> Iterator[Finding]:
    for name, profile in trained.profiles.items():
        expected, dtype = profile.column.dtype, validated.profiles[name].column.dtype
        if dtype != expected:
            yield Finding(
                "dtypes",
                "warning",
                f"{name} is {expected} in train and {dtype} in validation: "
                "another rounding, and equal examples are not recognised.",
                f"Cast validation to {expected}, or read both the same way.",
                column=name,
            )
