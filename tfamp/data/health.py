"""`tfamp.data.check`: what a compute dtype spoils, labels, copies, leaks and drift.

One pass over each set, then every rule is asked.
"""

import collections
import dataclasses
import hashlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfamp.data import _examples, rounding
from tfamp.data.rounding import Profile
from tfamp.data.sources._files import listed
from tfamp.records import checks, formats
from tfamp.records.findings import Finding, Findings, Severity
from tfamp.records.units import format_share, number

_COMPARING = ("leak", "unseen_class", "drift")
_RULES = (*rounding.RULES, "labels", "duplicates", *_COMPARING)
# What is worth saying of validation data too: the rest follows from training data.
_RULES_OF_VALIDATION = ("nan", "inf", "overflow")
_MAX_CLASSES = 20_000
# Labels that mark what does not count, or are of masks that were saved as pictures.
_MARKS = {99, 100, 127, 254, 255, 999, 9999, 65535}
_MANY_DUPLICATES, _MIN_LEAK, _LARGE_LEAK = 0.01, 0.001, 0.1
# With fewer distinct rows than this, equal rows are no surprise.
_MIN_DISTINCT = 0.5
# Chance of any false alarm of drift over all columns together; the largest difference
# of cumulative shares that is a trifle, be it significant; too few examples to tell.
_ERROR_RATE, _MIN_DIFFERENCE, _MIN_ROWS = 0.01, 0.1, 20


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
    20,000 examples and needs scipy. Memory: about 32 MiB for each column and 50 bytes
    for each example. Vectors are looked at feature by feature, images as a whole.

    Args:
        train: A `tf.data.Dataset` of batches or single examples, a `Pipeline`, or
            arrays: x, (x, y), (x, y, sample_weight). x and y may be nested dicts or
            tuples of columns. Give it as the model gets it, without `.repeat()`.
        validation: Data of the same columns; None skips the rules that compare.
        compute_dtype: "float32", "float16", "bfloat16", or the policy to train in,
            such as "mixed_float16".
        num_classes: Outputs of a classifier; None tells from the labels.
        batched: Whether a dataset's elements are batches; None tells from the stages
            of a pipeline, else from their shapes.

    Example:
        >>> import numpy as np
        >>> seconds = 1.7e9 + np.arange(1000.0) * 60
        >>> found = check({"time": seconds}, compute_dtype="float16")
        >>> found[0].rule, found[0].column, found[0].severity
        ('overflow', 'x/time', 'error')
    """
    form = rounding.format_of(compute_dtype)
    if num_classes is not None:
        num_classes = checks.positive_int("num_classes", num_classes)
    examples = _examples.read("train", train, batched=batched)
    others = None
    if validation is not None:
        others = _examples.read("validation", validation, batched=batched)
        _check_same_columns(examples.columns, others.columns)
    trained = _Pass(examples, form)
    validated = None if others is None else _Pass(others, form)
    found = trained.find()
    for name, classes in trained.classes.items():
        other = None if validated is None else validated.classes[name]
        found += _find_labels(classes, other, num_classes)
    found += _find_equal(trained, validated)
    skipped, also = dict.fromkeys(_COMPARING, "no `validation`"), ""
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
            found += _find_drift(trained, validated)
    return Findings(
        tuple(found),
        f"{trained.num_examples:,} training{also} examples, "
        f"{len(trained.profiles)} columns, for {form.name}",
        tuple(rule for rule in _RULES if rule not in skipped),
        tuple(f"{rule}: {reason}." for rule, reason in skipped.items()),
    )


def _check_same_columns(
    train: tuple[_examples.Column, ...], validation: tuple[_examples.Column, ...]
) -> None:
    pairs = [
        {(x.name, x.is_text, len(x.shape)) for x in one} for one in (train, validation)
    ]
    if odd := sorted({name for name, *_ in pairs[0] ^ pairs[1]}):
        raise ValueError(
            f"Columns {odd} of `validation` are not those of `train`, by name, axes or "
            "text; expected the same. Read both the same way, or pass `batched`."
        )


class _Pass:
    """What the one pass over a set of examples learned."""

    def __init__(self, examples: _examples.Examples, form: formats.Format) -> None:
        self.profiles, self.classes, keys = {}, {}, []
        for column in examples.columns:
            own = form if column.role == "input" else formats.FLOAT32
            self.profiles[column.name] = Profile(column, own)
            if column.role == "target":
                self.classes[column.name] = _Classes(column.name)
        inputs = [one.name for one in examples.columns if one.role == "input"]
        for chunk in examples.chunks(f"Checking `{examples.argument}`"):
            for name, values in chunk.items():
                self.profiles[name].update(values)
                if name in self.classes:
                    self.classes[name].update(values)
            rows = zip(*(_bytes_of_rows(chunk[name]) for name in inputs), strict=True)
            for parts in rows:
                digest = hashlib.blake2b(digest_size=8)
                for part in parts:
                    digest.update(part)
                keys.append(digest.digest())
        self.num_examples = len(keys)
        self.keys = np.frombuffer(b"".join(keys), "<u8")

    def find(self) -> list[Finding]:
        """Returns what is wrong with single columns."""
        profiles = [one for one in self.profiles.values() if one.count.any()]
        return [finding for profile in profiles for finding in rounding.find(profile)]


def _bytes_of_rows(column: np.ndarray) -> list[Any]:
    flat = column.reshape(len(column), -1)
    if column.dtype.kind in "OSU":  # with the lengths, so that none run together
        return [repr(row.tolist()).encode() for row in flat]
    wide = np.ascontiguousarray(flat, "i8" if column.dtype.kind in "iub" else "f8")
    return list(wide.view(np.uint8)) if flat.size else [b""] * len(column)


class _Classes:
    """Counts the values of a target column, as long as they may be classes."""

    def __init__(self, name: str) -> None:
        self.name, self._may_be = name, True
        self.counts: collections.Counter[Any] = collections.Counter()

    def update(self, chunk: np.ndarray) -> None:
        """Takes the labels of the next examples."""
        if not self._may_be:
            return
        if chunk.dtype.kind not in "iubOSU":
            chunk = chunk.astype(np.float64)
            chunk = chunk[np.isfinite(chunk)]
            self._may_be = bool((chunk == np.floor(chunk)).all())
        values, counts = np.unique(chunk.ravel(), return_counts=True)
        self.counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        self._may_be &= len(self.counts) <= _MAX_CLASSES

    @property
    def are_classes(self) -> bool:
        """Whether the values are classes rather than quantities: each comes often."""
        repeat = 2 * len(self.counts) <= sum(self.counts.values())
        return self._may_be and bool(self.counts) and repeat


def _find_labels(
    train: _Classes, validation: _Classes | None, num_classes: int | None
) -> Iterator[Finding]:
    if not train.are_classes:
        return
    name, counts, are_classes = train.name, train.counts, True
    if not any(isinstance(value, (str, bytes)) for value in counts):
        values = sorted(int(value) for value in counts)
        # Most numbers up to the largest are there, so they count classes.
        are_classes = 2 * len(values) >= values[-1] + 1 - min(values[0], 1)
        odd = _out_of_classes(values, num_classes, are_classes)
        if odd:
            many = sum(counts[value] for value in odd)
            sure = num_classes is not None or odd[0] < 0
            yield Finding(
                *("labels", "error" if sure else "warning"),
                f"{name} holds {many:,} labels of {listed(odd)}, with "
                f"{num_classes or len(values)} classes from {values[0]} to "
                f"{values[-1]}: no output stands for them; sparse crossentropy stops "
                "on the CPU and gives NaN on GPUs and by XLA.",
                "Map the labels to 0, 1, 2, ... (`y > 0` for two classes), mask them "
                "by `ignore_class` if they mark what does not count, or pass "
                "`num_classes` if the classes between exist.",
                column=name,
                figure=float(many),
            )
    new = sorted(set(validation.counts) - set(counts)) if validation else []
    if validation and new and are_classes:
        many = sum(validation.counts[value] for value in new)
        yield Finding(
            *("unseen_class", "error"),
            f"{name} has {len(new)} classes in the validation data ({listed(new)}) "
            f"that are not in the training data; {many:,} validation examples can "
            "never be right.",
            "Split the data by class (stratified), or drop these examples.",
            column=name,
            figure=float(many),
        )


def _out_of_classes(
    values: list[int], num_classes: int | None, are_classes: bool
) -> list[int]:
    """Returns the labels, of those that occur, that are none of 0, 1, 2, ..."""
    negative = [value for value in values if value < 0]
    if negative:
        # One is a mark for "ignore"; of two classes it is right for hinge losses, and
        # several are a quantity.
        return negative if len(negative) == 1 and len(values) > 2 else []
    if num_classes is not None:
        return [value for value in values if value >= num_classes]
    near = [value for place, value in enumerate(values) if value == values[0] + place]
    end, far = near[-1] + 1, values[len(near) :]
    is_far = 0 < len(far) < 3 and (far[0] in _MARKS or far[0] >= 10 * end)
    if are_classes or (is_far and values[0] < 2):
        return [value for value in values if value >= len(values)]
    return []


def _find_equal(train: _Pass, validation: _Pass | None) -> Iterator[Finding]:
    keys = train.keys
    others = validation.keys if validation else keys[:0]
    distinct = np.unique(keys)
    few = len(distinct) < _MIN_DISTINCT * len(keys)
    natural = ", which is natural with so few distinct ones" if few else ""
    copies, leaked = len(keys) - len(distinct), int(np.isin(others, distinct).sum())
    if copies:
        share = copies / len(keys)
        yield Finding(
            *("duplicates", "note" if few or share < _MANY_DUPLICATES else "warning"),
            f"{format_share(share)} of the training examples repeat the inputs of "
            f"another one ({copies:,} of {len(keys):,}): they count double in the "
            f"loss{natural}.",
            "Nothing." if few else "Drop the copies, unless they are meant as weights.",
            figure=share,
        )
    if leaked:
        share = leaked / len(others)
        severity: Severity = "error" if share >= _LARGE_LEAK else "warning"
        yield Finding(
            *("leak", "note" if few or share < _MIN_LEAK else severity),
            f"{format_share(share)} of the validation examples ({leaked:,} of "
            f"{len(others):,}) have inputs that are in the training data{natural}: the "
            "validation score is better than new data will give.",
            "Split by a hash of the inputs, or by what belongs together (person, day).",
            figure=share,
        )


def _find_drift(trained: _Pass, validated: _Pass) -> Iterator[Finding]:
    """Yields the columns that differ between train and validation (Kolmogorov)."""
    stats = checks.require("scipy.stats", extra="data", purpose="The rule on drift")
    found = []
    for name, train in trained.profiles.items():
        samples = [one.sample.rows() for one in (train, validated.profiles[name])]
        if train.column.role == "weight" or not all(map(np.size, samples)):
            continue
        for feature in range(train.num_features):
            parts = [sample[:, feature] for sample in samples]
            if train.column.is_text:
                codes = np.unique(np.concatenate(parts), return_inverse=True)[1]
                parts = np.split(codes.reshape(-1), [len(parts[0])])
            parts = [part.astype(np.float64) for part in parts]
            parts = [part[np.isfinite(part)] for part in parts]
            if min(map(len, parts)) >= _MIN_ROWS:
                test = stats.ks_2samp(*parts, method="asymp")
                middles = [number(float(np.median(part))) for part in parts]
                found.append((train.place(feature), test, middles))
    for place, test, middles in sorted(found, key=lambda one: -one[1].statistic):
        is_sure = test.pvalue < _ERROR_RATE / len(found)
        if is_sure and test.statistic >= _MIN_DIFFERENCE:
            yield Finding(
                *("drift", "warning"),
                f"{place} differs between train and validation by "
                f"{format_share(float(test.statistic))} in its distribution "
                f"(Kolmogorov-Smirnov; medians {middles[0]} and {middles[1]}): the "
                "validation score tells of other data than that trained on.",
                "Shuffle before splitting; where the split is meant (by time, by "
                "place), expect the score to differ.",
                column=place,
                figure=float(test.statistic),
            )
