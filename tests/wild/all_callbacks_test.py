"""All callbacks in one `fit`: bad batches, Ctrl-C, too little memory, and kill -9."""

import csv
import json
import os
import signal
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, signal, sys
import keras
import numpy as np
import tensorflow as tf
import tfamp

folder, *lives = sys.argv[1:]
ROWS, BATCH = 96, 8


class Stop(keras.callbacks.Callback):
    def __init__(self, how):
        super().__init__()
        self.how, self.left = how, 7

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left == 0 and self.how == "ctrl-c":
            raise KeyboardInterrupt
        if self.left == 0 and self.how == "memory":
            text = "OOM when allocating tensor with shape[8,4096] on device:CPU:0"
            raise tf.errors.ResourceExhaustedError(None, None, text)


def live(how):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, 5)).astype("float32")
    y = (x.sum(1, keepdims=True) > 0).astype("float32")
    if how == "faults":
        x[19, 3] = np.nan
        y[56:72] = np.inf  # two steps in a row
    keras.utils.set_random_seed(5)
    with tfamp.scope("float32"):
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(6, activation="relu"),
                keras.layers.Dropout(0.3),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.01), 64.0)
        model.compile(optimizer, "mse", metrics=["mae"])
    good = tfamp.callbacks.NanRecovery(
        f"{folder}/good", every_seconds=0, max_recoveries=9
    )
    resume = tfamp.callbacks.Resume(f"{folder}/run", every_steps=5)
    callbacks = [
        tfamp.callbacks.PrecisionMonitor(csv_path=f"{folder}/steps.csv"),
        tfamp.callbacks.Throughput(),
        tfamp.callbacks.DeviceStats(),
        good,
        resume,
        Stop(how),
    ]
    error = None
    try:
        model.fit(
            x, y, batch_size=BATCH, epochs=3, shuffle=how != "faults", verbose=0,
            callbacks=callbacks if how != "plain" else [],
        )
    except BaseException as raised:
        error = raised
    weights = [w.astype("float64").ravel().tolist() for w in model.get_weights()]
    told = {
        "history": {k: model.history.history.get(k) for k in ("loss", "mae")},
        "names": sorted(model.history.history),
        "weights": weights,
        "resumed at": resume.resumed_at,
        "found": [[each.cause, each.remedy] for each in good.recoveries],
        "error": type(error).__name__,
        "notes": getattr(error, "__notes__", []),
        "left": type(model.train_function).__module__.startswith("tfamp"),
    }
    print("TOLD", json.dumps(told), flush=True)


for how in lives:
    live(how)
"""


def lived(folder, *lives):
    """Returns what each life of a program told, and the status it ended with."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), *lives],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOLD")]
    assert len(lines) == len([x for x in lives if x != "kill"]), done.stderr[-3000:]
    return [json.loads(line[5:]) for line in lines], done.returncode


@pytest.mark.slow
def test_ctrl_c_an_error_of_memory_and_kill_9_lose_nothing(tmp_path):
    (plain, stopped, full), status = lived(
        *(tmp_path, "plain", "ctrl-c", "memory", "kill")
    )
    assert status == -signal.SIGKILL
    assert (stopped["error"], stopped["left"]) == ("KeyboardInterrupt", False)
    assert (full["error"], full["left"]) == ("ResourceExhaustedError", False)
    if sys.version_info >= (3, 11):
        assert "the largest step that fits is of about" in full["notes"][0]
    (again,), status = lived(tmp_path, "again")
    assert status == 0 and again["error"] == "NoneType"
    # Each life has gone on behind the last state of the one before.
    assert full["resumed at"] == [0, 5] and again["resumed at"] == [1, 3]
    assert again["history"] == plain["history"]
    assert again["weights"] == plain["weights"]
    assert again["found"] == []
    with open(tmp_path / "steps.csv", newline="") as file:
        steps = {int(row["step"]) for row in csv.DictReader(file)}
    # What was trained when Python was told of the end is written; of kill -9 it isn't.
    assert {7, 12, 24, 36} <= steps


@pytest.mark.slow
def test_faults_of_the_data_end_nothing_and_are_named(tmp_path):
    (told,), _ = lived(tmp_path, "faults")
    assert told["found"] and all(x == ["data", "drop batch"] for x in told["found"])
    assert all(0 < loss < 100 for loss in told["history"]["loss"])
    numbers = (number for weight in told["weights"] for number in weight)
    assert all(abs(number) < 100 for number in numbers)
    assert {"recoveries", "examples_per_second", "skipped_steps"} <= {*told["names"]}
