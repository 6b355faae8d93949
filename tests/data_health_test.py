"""`tfamp.data.check`: every rule where it must fire and where it must not.

Also the forms of data and the pass over them.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals
from tfamp.data import check

N = 2000


def rng(seed=0):
    return np.random.default_rng(seed)


def normal(*shape, seed=0):
    return rng(seed).normal(size=shape).astype(np.float32)


check32 = functools.partial(check, compute_dtype="float32")


def found(x, y=None, *, dtype="float16", **options):
    """Findings of a lone column, or of inputs with targets."""
    return check(x if y is None else (x, y), compute_dtype=dtype, **options)


def only(findings, rule):
    """The one finding of a rule."""
    (finding,) = findings.of(rule=rule)
    return finding


def fired(findings):
    return {finding.rule for finding in findings}


HEALTHY = {
    "normalized features": lambda s: (normal(N, 8, seed=s), rng(s).integers(0, 4, N)),
    "a regression": lambda s: (normal(N, 3, seed=s), normal(N, 1, seed=s + 50)),
    "tokens": lambda s: (
        rng(s).integers(0, 30_000, (N, 6)).astype(np.int32),
        rng(s).integers(0, 2, N).astype(bool),
    ),
}


@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_healthy_data_has_notes_at_most(make):
    for dtype in ("float32", "float16", "bfloat16"):
        findings = check(make(1), make(2), compute_dtype=dtype)
        assert (*findings.errors, *findings.warnings) == ()


def said(finding):
    """Severity and place, as the table below spells them."""
    return f"{finding.severity} {finding.column}"


def where(place, value, values):
    """The values with another one in some places."""
    values = values.copy()
    values[place] = value
    return values


NORMAL, PAIR = normal(N), normal(N, 2)
FLAT = where((slice(None), 0), np.float32(0.1), normal(N, 3))
YEARS = rng().integers(1990, 2025, N)
# Rules, data, and what they say of it in float16 or another dtype.
RULES = {
    "NaN in a target": ("nan", (PAIR, where(0, np.nan, NORMAL)), "error y"),
    "a large index": ("overflow", rng().integers(0, 2 * 10**5, N), "warning x"),
    "large tokens": ("overflow", rng().integers(0, 2 * 10**5, (N, 4)), "note x"),
    "an outlier that standardizing leaves too large": (
        *("overflow", where(0, 1e9, rng().normal(size=100_000)), "error x"),
    ),
    "a constant feature": ("constant", FLAT, "note x[0]"),
    "a constant column": (
        *("constant", {"a": FLAT[:, 0], "b": FLAT[:, 1]}, "warning x/a"),
    ),
    "constant targets": ("constant", (PAIR, np.zeros(N)), "warning y"),
    "squares that overflow": ("unnormalized", NORMAL * 1000, "warning x"),
    "float images": ("unnormalized", rng().uniform(0, 255, N), ""),
    # Steps of 8 round by 8 / sqrt(12), a quarter of the deviation.
    "years in bfloat16": ("resolution", {"year": YEARS}, "warning x/year", "bfloat16"),
    "latitude of a city": ("resolution", rng().normal(40.7, 0.03, N), "warning x"),
    "time": ("resolution", rng().normal(1.7e9, 1e7, N), "", "float32"),
    "a minute": ("resolution", rng().normal(1.7e9, 20, N), "error x", "float32"),
}


@pytest.mark.parametrize("row", RULES.values(), ids=RULES)
def test_rules_fire_where_they_must_and_nowhere_else(row):
    rules, data, expected, dtype = (*row, "float16")[:4]
    findings = check(data, compute_dtype=dtype)
    assert "".join(said(f) for f in findings if f.rule in rules.split()) == expected


def test_nan_and_inf_are_counted_and_hide_nothing():
    x = normal(N, 3)
    x[:20, 1], x[5, 2], x[6, 2] = np.nan, np.inf, -np.inf
    findings = found(x)
    nan, inf = only(findings, "nan"), only(findings, "inf")
    assert (nan.severity, nan.column, nan.figure) == ("error", "x[1]", 0.01)
    assert "20 of 2,000 values (1.0 %)" in nan.message
    assert (inf.severity, inf.column, inf.figure) == ("error", "x[2]", 0.001)


@pytest.mark.parametrize(
    "dtype, value, count",
    [
        ("float16", 65504.0, 0),
        ("float16", 65519.0, 0),  # rounds down
        ("float16", 65520.0, 1),  # rounds to inf
        ("bfloat16", 1e38, 0),
        ("bfloat16", 3.4e38, 1),  # ends at 3.39e38
        ("float32", 3.4e38, 0),
        ("float32", 1e39, 1),
    ],
)
def test_overflow_counts_what_becomes_inf(dtype, value, count):
    overflows = found(where(7, -value, rng().normal(size=N)), dtype=dtype)
    overflows = overflows.of(rule="overflow")
    assert [f"{count} of 2,000 values" in f.message for f in overflows] == [
        True
    ] * count


def test_a_class_that_only_validation_has_is_an_error():
    train, validation = np.arange(N) % 3, np.arange(N) % 4
    findings = check32((normal(N, 2), train), (normal(N, 2, seed=1), validation))
    finding = only(findings, "unseen_class")
    assert (finding.severity, finding.figure) == ("error", N // 4)


BASE = np.arange(300) % 3


def with_255(labels, value=255):
    labels = labels.copy()
    labels[::50] = value
    return labels


LABELS = {
    "int64": (with_255(BASE), 1),
    "float32": (with_255(BASE.astype("float32")), 1),
    "masks": (with_255(np.tile(BASE[:, None, None], (1, 4, 5))), 1),
    "two classes": ((BASE > 0).astype("uint8") * 255, 1),
    "254 and 255": (with_255(np.roll(with_255(BASE, 254), 1)), 1),
    "one-hot rows of 255": ((np.eye(3)[BASE] * 255).astype("uint8"), 1),
    "three classes": (BASE, 0),
    "one-hot": (np.eye(3)[BASE], 0),
    "a quantity": (np.round(np.geomspace(1, 5000, 300)).astype("int64"), 0),
    "counts": (np.minimum(rng().poisson(3, 300), 7), 0),
}


@pytest.mark.parametrize("labels, count", LABELS.values(), ids=LABELS)
def test_labels_far_beyond_the_others_are_found(labels, count):
    findings = check32((np.arange(300, dtype="float32")[:, None], labels))
    findings = [f for f in findings if f.rule in ("labels", "one_hot")]
    assert [f.severity for f in findings if f.severity != "note"] == ["warning"] * count


@pytest.mark.parametrize(
    "shared, severity", [(0, None), (1, "note"), (20, "warning"), (300, "error")]
)
def test_validation_examples_that_are_in_train_leak(shared, severity):
    train, validation = normal(N, 4), normal(N, 4, seed=1)
    validation[:shared] = train[:shared]
    leaks = check32(train, validation).of(rule="leak")
    told = [(leak.severity, leak.figure) for leak in leaks]
    assert told == [(severity, shared / N)] * bool(severity)


def test_rows_are_compared_over_all_columns_and_all_bytes():
    a, b = np.zeros(N, np.float32), np.arange(N, dtype=np.int32)
    assert "duplicates" not in fired(found({"a": a, "b": b}))
    assert "duplicates" in fired(found({"a": a, "b": b % 1900}))
    words = np.array(["ab", "a"])[np.arange(N) % 2]
    ends = np.array(["", "b"])[np.arange(N) % 2]
    finding = only(found({"a": words, "b": ends}), "duplicates")
    assert finding.figure == 1 - 2 / N  # "ab" + "" is not "a" + "b"


def test_labels_text_and_codes_drift_by_category():
    codes = np.repeat([0, 1, 2], [N // 2, N // 4, N // 4])
    moved = np.repeat([0, 1, 2], [N // 4, N // 4, N // 2])
    train = ({"code": codes, "word": codes.astype(str)}, codes)
    validation = ({"code": moved, "word": moved.astype(str)}, moved)
    findings = check32(train, validation).of(rule="drift")
    assert {finding.column for finding in findings} == {"x/code", "x/word", "y"}
    assert [finding.figure for finding in findings] == [pytest.approx(0.25)] * 3
    assert "drift" not in fired(check32(train, train))


def test_validation_of_its_own_faults_is_said():
    train, validation = normal(N, 2), normal(N, 2, seed=1)
    validation[0, 0] = np.nan
    finding = only(check32(train, validation), "nan")
    assert finding.message.startswith("In validation, x[0] holds NaN in 1 of 2,000")


RAGGED = tf.data.Dataset.from_tensors(tf.ragged.constant([[1], [1, 2]]))
ERRORS = {
    "endless": (
        lambda: check32(tf.data.Dataset.range(9).repeat()),
        "`train` is a dataset without end; expected one that ends",
    ),
    "ragged": (
        lambda: check32(RAGGED),
        "expected a dense tensor. Map it to one first: `.to_tensor()`",
        TypeError,
    ),
    "other columns": (
        lambda: check32({"a": np.zeros(3)}, {"b": np.zeros(3)}),
        "Columns ['x/a', 'x/b'] of `validation` are not those of `train`",
    ),
}


test_errors = refusals(ERRORS)
