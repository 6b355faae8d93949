"""`tfamp replay` and `tfamp freeze`: statuses, what is printed and written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import tfamp
from tests.failure_bundles_test import compiled, fit, keeping
from tfamp.cli.main import main
from tfamp.cli.saved import Frozen
from tfamp.stepping.bundle_records import Replayed, ReplayedStep

CLASSES = """
import keras


class Noisy(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(4, activation="relu")
        self.drop = keras.layers.Dropout(0.5)

    def call(self, x, training=False):
        return self.drop(self.dense(x), training=training)
"""


@pytest.fixture(autouse=True)
def path_of_modules(monkeypatch):
    """Takes back what a command adds to the places of modules."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    recovery = keeping(tmp_path_factory.mktemp("bundles"))
    fit(compiled(), recovery)
    return recovery.bundles[0]


def test_a_failure_is_reproduced_printed_and_written(bundle, tmp_path, capsys):
    path = tmp_path / "outcome.json"
    assert main(["replay", bundle, "--noexplain", f"--json={path}"]) == 0
    text = capsys.readouterr().out
    assert "Reproduced: the step fails as it did, bit by bit." in text
    assert text.splitlines()[0] == f"{bundle}: loss is nan."
    outcome = Replayed.from_json(path)
    assert outcome.is_reproduced and outcome.is_exact and outcome.triage == ""
    assert outcome.steps[-1].step == 13


def test_what_differs_is_told_and_is_a_failure(bundle, capsys, monkeypatch):
    # The recorded digest stands; the variables afterwards are said to be others.
    from tfamp.stepping import snapshots

    monkeypatch.setattr(snapshots, "digest", lambda state: "another")
    assert main(["replay", bundle, "--noexplain"]) == 1
    text = capsys.readouterr().out
    assert "Not reproduced: the step fails again, but not bit by bit." in text
    assert "- Some variables differ from those after the failing step." in text


def test_an_unknown_module_is_told(bundle, capsys):
    assert main(["replay", bundle, "--build=nowhere:build"]) == 1
    assert "There is no module 'nowhere'" in capsys.readouterr().err


STEP = ReplayedStep(0, 3, 0.5, 0.25, ("loss",))
VERDICTS = {
    "not failing": ((False, True, True), False, "Not reproduced: the step does not"),
    "exact": ((True, True, True), True, "Reproduced: the step fails as it did, bit"),
    "other bits": ((True, False, True), False, "Not reproduced: the step fails again"),
    "other device": ((True, False, False), True, "Reproduced: the step fails again, o"),
    "no bits": ((True, None, True), True, "Reproduced: the step fails again; there"),
}


@pytest.mark.parametrize("facts, is_good, text", VERDICTS.values(), ids=VERDICTS)
def test_the_verdict_follows_from_the_facts(facts, is_good, text):
    outcome = Replayed("b", "loss", "The loss is nan.", *facts, (STEP,), ("d",), ("n",))
    assert outcome.is_reproduced is is_good and outcome.verdict.startswith(text)
    lines = outcome.table().splitlines()
    row = "    0        3              0.5             0.25  differs: loss"
    assert row in lines and lines[-2:] == ["- d", "- n"]
    assert Replayed.from_json(outcome.to_json()) == outcome


def test_a_fresh_process_replays_every_bit(tmp_path, monkeypatch):
    (tmp_path / "noisy_classes.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(tmp_path)
    from noisy_classes import Noisy

    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((3,)), Noisy(), keras.layers.Dense(1)])
    inner = keras.optimizers.Adam(0.01)
    model.compile(tfamp.LossScaleOptimizer(inner, 64.0), "mse", metrics=["mae"])
    recovery = keeping(tmp_path / "failures")
    fit(model, recovery)
    command = [sys.executable, "-m", "tfamp", "replay", recovery.bundles[0]]
    # The recording process has two devices and one thread, the other what is usual.
    replayed = subprocess.run(
        [*command, "--json=outcome.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert replayed.returncode == 0, replayed.stderr
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["is_exact"] is True and outcome["is_same_device"] is True
    assert [step["differing"] for step in outcome["steps"]] == [[]]
    assert "the cause is data" in outcome["triage"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_saved_model_is_frozen_to_another_file(tmp_path, capsys, dtype):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)], name="tiny"
    )
    source, out = tmp_path / "model.keras", tmp_path / f"model.{dtype}.keras"
    model.save(source)
    argv = ["freeze", str(source), f"--dtype={dtype}"]
    assert main([*argv, f"--json={tmp_path / 'found.json'}"]) == 0
    # A kernel and a bias in half; those of the head stay.
    found = Frozen("tiny", str(out), dtype, 2, 4, 4 * 58, 2 * 40 + 4 * 18)
    assert Frozen.from_json(tmp_path / "found.json") == found
    assert capsys.readouterr().out == f"{found}\n"
    assert "2 of 4 weights of 'tiny' are stored in" in str(found)
    x = np.ones((3, 4), "float32")
    expected = tfamp.freeze(tfamp.load_model(source), dtype)(x)
    np.testing.assert_array_equal(tfamp.load_model(out)(x), expected)


FAILURES = {
    "no bundle": ("replay", 2, "Nothing is named"),
    "two": ("replay a b", 2, "Unexpected argument 'b'"),
    "an unknown flag": ("replay a --keep=3", 2, "Unknown command line flag 'keep'"),
    "a target": ("replay a --build=x", 2, "`--build` is 'x'; expected 'module:func"),
    "no folder": ("replay /nowhere", 1, "Found no bundle in '/nowhere'"),
    "no file": ("freeze /nowhere.keras", 1, "/nowhere.keras"),
    "dtype": ("freeze a.keras --dtype=float8", 2, "Unknown `--dtype` 'float8'"),
    "out": ("freeze a.keras --out=b.h5", 2, "`--out` is 'b.h5'; expected a name with"),
}


@pytest.mark.parametrize("line, status, text", FAILURES.values(), ids=FAILURES)
def test_calls_that_cannot_be_followed_have_their_status(line, status, text, capsys):
    assert main(line.split()) == status
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"tfamp {line.split()[0]}: ")) == ("", True)
    assert text in err
