"""`tfamp.records`: JSON both ways, findings, quantities, checks, versions, tables."""

import dataclasses
import importlib.metadata
import io
import os
import re
import sys
import types
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest

from tests.refusals import refusals
from tfamp.machine.speeds import Device, Recommendation
from tfamp.records import checks, console, formats, record, units, versions
from tfamp.records.findings import Finding, Findings
from tfamp.records.record import Record


@dataclasses.dataclass(frozen=True)
class Inner(Record):
    name: str
    numbers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outer(Record):
    SCHEMA = 3

    count: int
    share: float
    is_done: bool
    kind: Literal["one", "two"]
    inner: Inner
    several: tuple[Inner, ...]
    pair: tuple[str, float]
    by_name: dict[str, Inner]
    either: Device | Inner
    maybe: Inner | None = None
    values: list[float] = dataclasses.field(default_factory=list)
    anything: Any = None


OUTER = Outer(
    count=7,
    share=0.1,
    is_done=True,
    kind="two",
    inner=Inner("a", (1, 2)),
    several=(Inner("b"), Inner("c", (3,))),
    pair=("text", 2.5),
    by_name={"x": Inner("d", (4,))},
    either=Inner("e", (5,)),
    maybe=Inner("f", (6,)),
    values=[1.5, 2.5],
    anything={"free": [1, "two"]},
)
DEVICE = Device("gpu", "NVIDIA A100", (8, 0), 40 * 2**30, ("x", "y"))
NOTE = Finding("int64", "note", "x/id is int64.", "Cast it.", column="x/id")
WARNING = Finding("drift", "warning", "It moved.", "Shuffle.", column="x[3]")
ERROR = Finding(
    *("overflow", "error", "12 values pass 65504.", "Standardize it."),
    column="x/time",
    figure=12.0,
    details={"num_values": 12, "largest": 1.7e9, "first": None, "dtype": "int64"},
)
LAYER = Finding("softmax", "warning", "In float16.", "Keep it.", layer="head/softmax")
ALL = Findings(
    *((NOTE, WARNING, ERROR, LAYER), "100 examples", ("int64", "drift", "nan")),
    skipped=("drift: no validation",),
)


@pytest.mark.parametrize(
    "record", [OUTER, DEVICE, ALL], ids=lambda record: type(record).__name__
)
def test_every_field_survives_the_round_trip(record, tmp_path):
    path = tmp_path / "record.json"
    text = record.to_json(path)
    for source in (text, path, str(path)):
        again = type(record).from_json(source)
        for field in dataclasses.fields(record):
            before, after = getattr(record, field.name), getattr(again, field.name)
            assert after == before != field.default, field.name
            assert type(after) is type(before), field.name


BAD = {
    "missing field": (
        lambda: Recommendation.from_dict({"policy": "float32"}),
        "Fields ('reason',) of Recommendation are unknown, or missing; expected "
        "('policy', 'reason'). Correct them, or update tfamp if a later version wrote",
    ),
    "a field of nobody's": (
        lambda: DEVICE.from_dict(DEVICE.to_dict() | {"module": "os:abort"}),
        "Fields ('module',) of Device are unknown, or missing; expected ",
    ),
    "other class": (
        lambda: Recommendation.from_dict(
            {"class": "Device", "policy": "", "reason": ""}
        ),
        "Found a record of 'Device', schema 1; expected 'Recommendation', at most 1. ",
    ),
    "later schema": (
        lambda: Recommendation.from_dict({"schema": 2, "policy": "", "reason": ""}),
        "Found a record of 'Recommendation', schema 2; expected 'Recommendation', at ",
    ),
    "a number for a flag": (
        lambda: Outer.from_dict(OUTER.to_dict() | {"is_done": 1}),
        "`is_done` of Outer is 1; expected bool. Correct it, or write the record again",
    ),
    "no member of a union": (
        lambda: Outer.from_dict(OUTER.to_dict() | {"either": 3}),
        "`either` of Outer is 3; expected ",
    ),
    "no JSON": (
        lambda: Device.from_json('{"kind": '),
        "expected a record of Device. Write it again with `to_json`.",
    ),
    "what JSON cannot hold": (
        lambda: dataclasses.replace(OUTER, anything={1, 2}).to_json(),
        "`anything` of Outer holds {1, 2}, of type set; expected numbers, text, ",
        TypeError,
    ),
}
test_what_cannot_be_read_or_written_is_refused = refusals(BAD)


def test_findings_are_kept_worst_first_and_otherwise_in_order():
    assert list(ALL) == [ERROR, WARNING, LAYER, NOTE]
    assert (ALL[0], len(ALL)) == (ERROR, 4)
    assert (ALL.errors, ALL.notes) == ((ERROR,), (NOTE,))
    assert ALL.warnings == ALL.of(severity="warning") == (WARNING, LAYER)
    assert ALL.of(rule="drift") == (WARNING,)
    assert len({ERROR, ERROR, NOTE}) == 2, "hashable in spite of details"


def test_the_table_shows_every_field_and_no_line_is_too_wide():
    text = str(ALL)
    for finding in ALL:
        for word in (finding.severity, finding.place, finding.rule, finding.message):
            assert word in text
    assert text.startswith("100 examples")
    assert max(map(len, text.splitlines())) <= 110


def test_a_note_on_several_layers_is_one_row_with_their_number():
    notes = [Finding("odd", "note", "12 units.", "16.", layer=f"d{i}") for i in (1, 2)]
    bad = [Finding("head", "error", "Half.", "Wide.", layer=f"h{i}") for i in (1, 2)]
    text = str(Findings((*notes, *bad)))
    assert text.count("12 units.") == 1
    assert "d1 and 1 more" in text and "d2" not in text
    # What spoils the result is told of each.
    assert text.count("Half.") == 2


@pytest.mark.parametrize("format", formats.FORMATS.values(), ids=formats.FORMATS)
def test_limits_of_formats_and_the_next_numbers_are_those_of_ml_dtypes(format):
    oracle = ml_dtypes.finfo(format.name)
    assert format.max == float(oracle.max)
    assert format.smallest_normal == float(oracle.smallest_normal)
    assert format.smallest_subnormal == float(oracle.smallest_subnormal)
    assert format.epsilon == float(oracle.eps)
    exponents = np.random.default_rng(0).uniform(-9, 8, size=50)
    for value in np.concatenate([[0.0, 1.0, 2.0], 2.0**exponents]).astype(oracle.dtype):
        after = float(np.nextafter(value, np.array(format.max, oracle.dtype)))
        assert formats.spacing(format, float(value)) == after - float(value)
        assert formats.spacing(format, -float(value)) == after - float(value)
    assert formats.needs_loss_scale(format) == (format.name == "float16")


TEXTS = {
    # In the largest unit that they fill; 1023.9 KiB is the next one's 1.0.
    "1023 bytes": units.format_bytes(1023),
    "1.0 MiB": units.format_bytes(2**20 - 100),
    "-1.5 GiB": units.format_bytes(-3 * 2**29),
    "0 s": units.format_seconds(0),
    "12.3 us": units.format_seconds(12.34e-6),
    "1.0 ms": units.format_seconds(0.99996e-3),
    "1 min 00 s": units.format_seconds(59.6),
    "1 h 00 min": units.format_seconds(3599.7),
    "-500 ms": units.format_seconds(-0.5),
    "4,971 examples/s": units.format_rate(4971.3),
    "< 0.1 %": units.format_share(0.0001),
    "91.2 %": units.format_share(0.9125),
}


@pytest.mark.parametrize("text", TEXTS)
def test_quantities_are_written_in_the_unit_and_digits_that_suit(text):
    assert TEXTS[text] == text


@pytest.mark.parametrize(
    "text, num_bytes",
    [("1", 1), ("2kB", 2000), ("0.5 TB", 5 * 10**11), ("2 gib", 2**31)],
)
def test_bytes_are_read_in_units_of_1000_and_of_1024(text, num_bytes):
    assert units.parse_bytes("limit", text) == num_bytes


@pytest.mark.parametrize("text", ["", "0", "-1GB", "GB", "16 gigabytes", "1.2.3GB"])
def test_what_is_no_number_of_bytes_is_refused(text):
    message = f"`--max_memory` is {text!r}; expected a number of bytes, or one with a "
    with pytest.raises(ValueError, match=re.escape(message)):
        units.parse_bytes("--max_memory", text)


POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
ARGUMENTS = {
    "fp16": (
        lambda: checks.choice("policy", "fp16", POLICIES),
        "Unknown `policy` 'fp16'; expected 'float32', 'mixed_float16' or "
        "'mixed_bfloat16'. Did you mean 'mixed_float16'?",
    ),
    "another spelling": (
        lambda: checks.choice("policy", "Mixed-BFloat16", POLICIES),
        "Did you mean 'mixed_bfloat16'?",
    ),
    "nothing alike": (
        lambda: checks.choice("policy", "", POLICIES),
        "Pass one of these.",
    ),
    "a float": (
        lambda: checks.positive_int("batch_size", 32.0),
        "`batch_size` is 32.0, of type float; expected an integer of at least 1. Pass "
        "a whole number, as in `batch_size=1`.",
        TypeError,
    ),
    "a flag": (
        lambda: checks.positive_int("batch_size", True),
        "`batch_size` is True, of type bool; expected an integer",
        TypeError,
    ),
    "too small": (
        lambda: checks.positive_int("batch_size", -1, minimum=0),
        "`batch_size` is -1; expected an integer of at least 0. Pass a larger number.",
    ),
    "no part": (
        lambda: checks.fraction("split", 1.5),
        "`split` is 1.5; expected a number in [0, 1]. Pass a part of one.",
    ),
    "at the edge": (
        lambda: checks.fraction("split", 0.0, closed=False),
        "`split` is 0.0; expected a number above 0 and below 1.",
    ),
    "not finite": (
        lambda: checks.positive("scale", float("inf")),
        "`scale` is inf; expected a finite number above 0. Pass a positive number.",
    ),
}
test_arguments_are_checked = refusals(ARGUMENTS)


def test_a_missing_package_is_an_error_with_the_pip_line(monkeypatch):
    # None in `sys.modules` makes an import fail as for a missing package.
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for extra, name in (("data", "'tfamp[data]'"), (None, "scikit-learn")):
        message = (
            f"`x` needs scikit-learn, which is not installed. Run `pip install {name}"
        )
        with pytest.raises(ImportError, match=re.escape(message)):
            checks.require("sklearn", extra=extra, purpose="`x`")


KERAS = "Exception encountered when ..."
ERRORS = {
    "empty": ("", "ValueError", "ValueError"),
    "lines": ("no\n\nshape", "no", "ValueError: no shape"),
    "of Keras": (
        f"{KERAS}\n\n\x1b[1mIs bad.\x1b[0m\n\nArguments",
        *("Is bad.", f"ValueError: {KERAS} Is bad. Arguments"),
    ),
    "memory": (
        "Graph execution error:\n\n  OOM when allocating x\n\tFile a",
        *("OOM when allocating x",) * 2,
    ),
    "long": ("x" * 400, "x" * 200, f"ValueError: {'x' * 300}…"),
}


@pytest.mark.parametrize("text, line, short", ERRORS.values(), ids=ERRORS)
def test_an_error_is_shortened_to_the_line_that_tells(text, line, short):
    error = ValueError(text)
    assert (checks.first_line(error), checks.short_error(error)) == (line, short)


GOOD = {"python": "3.12.1", "tensorflow": "2.20.0", "keras": "3.10.0", "numpy": "2.0"}
PASSING = [
    *[("tensorflow", each) for each in ("2.19.1", "2.21.7+nv25.3")],
    *[("keras", each) for each in ("3.15.1", "4.0")],
    ("python", "3.13.9"),
]


@pytest.mark.parametrize("package, version", PASSING)
def test_supported_versions_pass(package, version, tmp_path):
    environ = {"HOME": str(tmp_path)}
    versions.check_environment(environ, {**GOOD, package: version}, {})


def imported_keras(backend):
    """A stand-in for the Keras module that runs on a backend."""
    config = types.SimpleNamespace(backend=lambda: backend)
    return {"keras": types.SimpleNamespace(config=config)}


def checked(environ=None, modules=None, **packages):
    environ = {"HOME": "/nowhere", **(environ or {})}
    return lambda: versions.check_environment(environ, GOOD | packages, modules or {})


REFUSED = {
    "TensorFlow": (
        checked(tensorflow="2.22.0.dev20260101"),
        "Found TensorFlow 2.22.0.dev20260101; tfamp supports TensorFlow 2.19 to 2.21. "
        "Run `pip install 'tensorflow>=2.19,<2.22'`.",
        ImportError,
    ),
    "no Keras": (
        checked(keras=None),
        "Keras is not installed; tfamp supports Keras 3.10 and later. Run",
        ImportError,
    ),
    "Python": (checked(python="3.9.18"), "supports Python 3.10 to 3.13", ImportError),
    "backend": (
        checked({"KERAS_BACKEND": "jax"}),
        "KERAS_BACKEND is 'jax'; tfamp needs 'tensorflow'. Set "
        "KERAS_BACKEND=tensorflow before Keras is imported, in a new process.",
    ),
    "running backend": (
        checked({"KERAS_BACKEND": "tensorflow"}, imported_keras("jax")),
        "Keras is already running on the backend 'jax'; tfamp needs 'tensorflow'.",
    ),
}
test_environments_are_refused = refusals(REFUSED)


def test_tensorflow_is_found_under_its_other_names(monkeypatch):
    def version(distribution):
        if distribution == "tf-nightly":
            return "2.20.1"
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = versions.installed_versions()
    assert (found["tensorflow"], found["keras"]) == ("2.20.1", None)


def test_an_import_that_fails_is_blamed_on_a_keras_that_was_not_tested():
    error = ImportError("cannot import name 'Layer' from 'keras.src'\nmore")
    text = versions.blame_untested_keras(error, {"keras": "3.99.0"})
    assert "Keras 3.99.0: ImportError: cannot import name 'Layer'" in text
    assert "pip install 'keras==" in text
    tested = {"keras": versions.TESTED_KERAS[0]}
    assert versions.blame_untested_keras(error, tested) is None


def test_a_table_holds_cells_as_they_were_given_below_a_whole_title():
    title = "a title that is longer than its table"
    shown = console.text_of(console.table({"a": {}}, [["x[0]"]], title=title))
    assert shown.startswith(f"{title}\n┏") and "x[0]" in shown


def test_work_shows_what_is_done_of_how_much(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("FORCE_COLOR", "1")
    with console.progress("Starting", 4) as update:
        update(3)
    assert capsys.readouterr().err == "", "no bar goes into a file"
    monkeypatch.setattr(sys, "stderr", Terminal())
    with console.progress("Starting", 4, unit="of 4 runs", decimals=1) as update:
        update(2.5, "auto, seed 0")
    found = sys.stderr.getvalue()
    assert all(text in found for text in ("auto, seed 0", "2.5 of 4 runs"))


def test_a_text_takes_the_place_of_the_one_before_whole_or_not_at_all(
    tmp_path, monkeypatch
):
    path = tmp_path / "record.json"
    record.write_whole(path, "before")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", None)
        with pytest.raises(TypeError):
            record.write_whole(path, "half of it")
    assert path.read_text() == "before"
    record.write_whole(path, "after")
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["record.json"]
