"""Precision health of training data: what a compute dtype would spoil, and more.

`check` makes one pass over data, then asks every rule.
"""

import dataclasses
import importlib.util
from typing import Any

from tfamp.data import _examples
from tfamp.data.health import columns, sets
from tfamp.data.health.columns import Profile, Rounding, rounding_for
from tfamp.records import checks, formats
from tfamp.records.findings import Finding, Findings

_RULES = (*columns.RULES, *sets.RULES, *sets.COMPARING)
# What is worth saying of validation data too: the rest follows from training data.
_RULES_OF_VALIDATION = ("nan", "inf", "overflow")


def check(
    train: Any,
    validation: Any = None,
    *,
    compute_dtype: Any,
    num_classes: int | None = None,
    batched: bool | None = None,
) -> Findings:
    """Returns what would go wrong with this data in a compute dtype, before training.

    One pass over each set, in float64, exact but for drift, which comes from up to
    20,000 examples, is reported from a difference of 0.1 on, is a false alarm with a
    chance below 1 %, and needs scipy. Memory: about 32 MiB for each column and 50 bytes
    for each example. Time: about 20 ns a value.

    Vectors are looked at feature by feature ("x[3]"), images as a whole. NaN in one
    place hides nothing in others.

    Args:
        train: A `tf.data.Dataset` of batches or single examples, a `Pipeline`, or
            arrays: x, (x, y), (x, y, sample_weight). x and y may be nested dicts or
            tuples of columns. Give it as the model gets it, without `.repeat()`.
        validation: Data of the same columns; None skips the rules that compare.
        compute_dtype: "float32", "float16", "bfloat16", or the policy to train in,
            such as "mixed_float16".
        num_classes: Outputs of a classifier; None tells from the labels.
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
    """
    rounding = rounding_for(compute_dtype)
    if num_classes is not None:
        num_classes = checks.positive_int("num_classes", num_classes)
    # Both are looked at before either is read, which may take long.
    examples = _examples.read("train", train, batched=batched)
    others = None
    if validation is not None:
        others = _examples.read("validation", validation, batched=batched)
        _check_same_columns(examples.columns, others.columns)
    trained = _Pass(examples, rounding)
    validated = None if others is None else _Pass(others, rounding)
    found = trained.find()
    for name, classes in trained.classes.items():
        other = None if validated is None else validated.classes[name]
        found += sets.find_labels(classes, other, num_classes)
    found += sets.find_equal(
        trained.keys, None if validated is None else validated.keys
    )
    skipped, also = dict.fromkeys(sets.COMPARING, "no `validation`"), ""
    if validated is not None:
        # In validation, where training data has nothing of the kind.
        said = {(one.rule, one.place.split("[")[0]) for one in found}
        for one in validated.find():
            is_new = (one.rule, one.place.split("[")[0]) not in said
            if one.rule in _RULES_OF_VALIDATION and is_new:
                message = f"In validation, {one.message}"
                found.append(dataclasses.replace(one, message=message))
        skipped, also = {}, f" and {validated.num_examples:,} validation"
        if importlib.util.find_spec("scipy") is None:
            skipped = {"drift": "scipy is not installed; `pip install tfamp[data]`"}
        else:
            found += sets.find_drift(
                [
                    (profile, validated.profiles[name])
                    for name, profile in trained.profiles.items()
                    if profile.column.role != "weight"
                ]
            )
    return Findings(
        tuple(found),
        f"{trained.num_examples:,} training{also} examples, "
        f"{len(trained.profiles)} columns, for {rounding.format.name}",
        tuple(rule for rule in _RULES if rule not in skipped),
        tuple(f"{rule}: {reason}." for rule, reason in skipped.items()),
    )


class _Pass:
    """What the one pass over a set of examples learned."""

    def __init__(self, examples: _examples.Examples, rounding: Rounding) -> None:
        # Losses are computed in float32, whatever the layers compute in.
        single = Rounding(formats.FLOAT32)
        self.profiles, self.classes = {}, {}
        self.keys, self.num_examples = sets.RowKeys(), 0
        for column in examples.columns:
            own = rounding if column.role == "input" else single
            self.profiles[column.name] = Profile(column, own)
            if column.role == "target":
                self.classes[column.name] = sets.Classes(column.name)
        inputs = [one.name for one in examples.columns if one.role == "input"]
        for chunk in examples.chunks(f"Checking `{examples.argument}`"):
            for name, values in chunk.items():
                self.profiles[name].update(values)
                if name in self.classes:
                    self.classes[name].update(values)
            self.keys.update([chunk[name] for name in inputs])
            self.num_examples += len(chunk[inputs[0]])

    def find(self) -> list[Finding]:
        """Returns what is wrong with single columns."""
        return [
            finding
            for profile in self.profiles.values()
            if profile.count.any()
            for finding in columns.find(profile)
        ]


def _check_same_columns(
    train: tuple[_examples.Column, ...], validation: tuple[_examples.Column, ...]
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
