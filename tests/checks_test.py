"""Argument checks: what passes, and every message in full."""

import re
import sys

import numpy as np
import pytest

from tfamp.records import checks

# What Keras puts before the text of an error.
ENCOUNTERED = "Exception encountered when ..."
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


@pytest.mark.parametrize(
    "extra, command",
    [("data", "pip install 'tfamp[data]'"), (None, "pip install scikit-learn")],
    ids=["extra", "package"],
)
def test_a_missing_package_is_an_error_with_the_pip_line(monkeypatch, extra, command):
    # None in `sys.modules` makes an import fail as for a missing package.
    monkeypatch.setitem(sys.modules, "sklearn", None)
    message = (
        f"`from_tfds` needs scikit-learn, which is not installed. Run `{command}`."
    )
    with pytest.raises(ImportError, match=re.escape(message)) as caught:
        checks.require("sklearn", extra=extra, purpose="`from_tfds`")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    "value, advice",
    [
        ("fp16", "Did you mean 'mixed_float16'?"),
        ("bf16", "Did you mean 'mixed_bfloat16'?"),
        ("Mixed-BFloat16", "Did you mean 'mixed_bfloat16'?"),
        ("flaot32", "Did you mean 'float32'?"),
        ("", "Pass one of these."),
    ],
)
def test_an_unknown_choice_is_an_error_with_the_likely_one(value, advice):
    message = (
        f"Unknown `policy` {value!r}; expected 'float32', 'mixed_float16' or "
        f"'mixed_bfloat16'. {advice}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        checks.choice("policy", value, POLICIES)


@pytest.mark.parametrize("value", [32.0, True, "32", None, np.ones(2)], ids=repr)
def test_positive_int_refuses_other_types(value):
    message = f"`batch_size` is {value!r}, "
    with pytest.raises(TypeError, match=re.escape(message)) as caught:
        checks.positive_int("batch_size", value)
    assert str(caught.value).endswith(
        "expected an integer of at least 1. Pass a whole number, as in `batch_size=1`."
    )


@pytest.mark.parametrize("value, minimum", [(0, 1), (-4, 1), (-1, 0), (1, 2)])
def test_positive_int_has_a_minimum(value, minimum):
    message = (
        f"`batch_size` is {value}; expected an integer of at least {minimum}. "
        f"Pass a larger number."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        checks.positive_int("batch_size", value, minimum=minimum)


@pytest.mark.parametrize(
    "value, closed, rest",
    [
        (1.5, True, "in [0, 1]. Did you mean 0.015?"),
        (25.0, True, "in [0, 1]. Did you mean 0.25?"),
        (-0.1, True, "in [0, 1]. Pass a part of one."),
        (float("nan"), True, "in [0, 1]. Pass a part of one."),
        (0.0, False, "above 0 and below 1. Pass a part of one."),
        (1.0, False, "above 0 and below 1. Pass a part of one."),
    ],
)
def test_fraction_lies_between_0_and_1(value, closed, rest):
    message = f"`split` is {value!r}; expected a number {rest}"
    with pytest.raises(ValueError, match=re.escape(message)):
        checks.fraction("split", value, closed=closed)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")], ids=repr)
def test_positive_is_finite_and_above_0(value):
    message = (
        f"`scale` is {float(value)!r}; expected a finite number above 0. "
        f"Pass a positive number."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        checks.positive("scale", value)


@pytest.mark.parametrize(
    "text, line, short",
    [
        ("", "ValueError", "ValueError"),
        ("no\n\nshape", "no", "ValueError: no shape"),
        (
            f"{ENCOUNTERED}\n\n\x1b[1mIs bad.\x1b[0m\n\nArguments",
            *(
                "Is bad.",
                f"ValueError: {ENCOUNTERED} Is bad. Arguments",
            ),
        ),
        (
            "Graph execution error:\n\n  OOM when allocating x\n\tFile a",
            *("OOM when allocating x",) * 2,
        ),
        ("x" * 400, "x" * 200, f"ValueError: {'x' * 300}…"),
    ],
    ids=["empty", "lines", "of Keras", "memory", "long"],
)
def test_an_error_is_shortened_to_the_line_that_tells(text, line, short):
    error = ValueError(text)
    assert (checks.first_line(error), checks.short_error(error)) == (line, short)
