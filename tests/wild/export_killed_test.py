"""A process that is killed while it exports again leaves an export that loads."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import tfamp

PROGRAM = """
import sys, keras, numpy as np, tfamp
layers = keras.layers.Dense(2**18), keras.layers.Dense(2)
model = keras.Sequential([keras.Input((8,)), *layers])
for value in (1.0, 2.0):  # the former one, and the one trained anew
    model.set_weights([np.full_like(each, value) for each in model.get_weights()])
    tfamp.export(model, sys.argv[1], format="saved_model")
    print("written", flush=True)
"""
# Of one row of ones: 2**18 sums of 8 weights and a bias, and the last bias.
ANSWERS = {9.0 * 2**18 + 1, 2 * 18.0 * 2**18 + 2}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["-9", "-2"])
@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_the_former_export_or_the_whole_new_one_is_there(number, tmp_path):
    path = tmp_path / "model"
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)],
        env={**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout.readline() == "written\n"
        while process.poll() is None and len(os.listdir(tmp_path)) < 2:
            time.sleep(0.001)  # until the new one is copied beside the former
        process.send_signal(number)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    found = tfamp.load_exported(path).predict(np.ones((1, 8), "float32"))
    assert float(found[0, 0]) in ANSWERS
    # What was left half-written goes with the next export of that name.
    tfamp.export(small(), path, format="saved_model")
    assert os.listdir(tmp_path) == ["model"]


def small():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])


def test_an_export_that_was_moved_away_when_its_process_was_killed_comes_back(tmp_path):
    path, model = tmp_path / "model", small()
    tfamp.export(model, path, format="saved_model")
    path.rename(tmp_path / ".model.former")
    with pytest.raises(ValueError, match="`keep_float32` names 'nowhere'"):
        tfamp.export(model, path, format="saved_model", keep_float32=["nowhere"])
    tfamp.load_exported(path)
    assert os.listdir(tmp_path) == ["model"]
