"""`tfamp freeze`: statuses, what is printed and written."""

import sys

import keras
import numpy as np
import pytest

import tfamp
from tfamp.cli.main import main
from tfamp.cli.saved import Frozen


@pytest.fixture(autouse=True)
def path_of_modules(monkeypatch):
    """Takes back what a command adds to the places of modules."""
    monkeypatch.setattr(sys, "path", [*sys.path])


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
    "no model": ("freeze", 2, "Nothing is named"),
    "two": ("freeze a b", 2, "Unexpected argument 'b'"),
    "an unknown flag": ("freeze a --keep=3", 2, "Unknown command line flag 'keep'"),
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
