"""All callbacks in one `fit`, through a missing number, overflows, and kill -9."""

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
import tfamp

folder, how = sys.argv[1:3]
ROWS, BATCH = 96, 8
rng = np.random.default_rng(1)
x = rng.normal(size=(ROWS, 5)).astype("float32")
y = (x.sum(1, keepdims=True) > 0).astype("float32")
if how == "faults":
    x[19, 3] = np.nan
    y[56:58] = np.inf
keras.utils.set_random_seed(5)
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


class Kill(keras.callbacks.Callback):
    left = 17

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


callbacks = []
if how != "plain":
    callbacks = [
        tfamp.callbacks.PrecisionMonitor(csv_path=f"{folder}/steps.csv"),
        tfamp.callbacks.Throughput(),
        tfamp.callbacks.DeviceStats(),
        tfamp.callbacks.NanRecovery(
            f"{folder}/good", every_seconds=0, max_recoveries=9
        ),
        tfamp.callbacks.Resume(f"{folder}/run", every_steps=5),
    ]
if how == "kill":
    callbacks.append(Kill())
run = model.fit(
    x, y, batch_size=BATCH, epochs=3, shuffle=how != "faults", verbose=0,
    callbacks=callbacks,
)
told = {
    "loss": run.history["loss"],
    "mae": run.history["mae"],
    "weights": [w.astype("float64").ravel().tolist() for w in model.get_weights()],
    "names": sorted(run.history),
}
if callbacks:
    found = callbacks[3].recoveries
    told["resumed at"] = callbacks[4].resumed_at
    told["causes"] = [each.cause for each in found]
    told["remedies"] = [each.remedy for each in found]
print("TOLD", json.dumps(told))
"""


def trained(folder, how):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), how],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        timeout=600,
        check=False,
    )
    if how == "kill":
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
        return None
    assert "TOLD" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.rsplit("TOLD ", 1)[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def plain(folder):
    return trained(folder, "plain")


@pytest.mark.slow
def test_kill_9_under_all_of_them_loses_nothing(plain, folder):
    trained(folder, "kill")
    again = trained(folder, "again")
    # Behind the fifth step of twelve in the second epoch, at most five were lost.
    assert again["resumed at"] in ([1, 0], [1, 3], [1, 5])
    assert again["loss"] == plain["loss"] and again["mae"] == plain["mae"]
    assert again["weights"] == plain["weights"]
    assert again["causes"] == []


@pytest.mark.slow
def test_their_files_hold_both_lives(plain, folder):
    with open(folder / "steps.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    # The rows of the steps that were trained again are there at least once.
    assert {*range(1, 13), *range(16, 37)} <= {*steps}


@pytest.mark.slow
def test_faults_of_the_data_end_nothing_and_are_named(tmp_path):
    told = trained(tmp_path, "faults")
    assert {*told["causes"]} == {"data"}
    assert {*told["remedies"]} == {"drop batch"}
    assert all(0 < loss < 100 for loss in told["loss"])
    numbers = (number for weight in told["weights"] for number in weight)
    assert all(abs(number) < 100 for number in numbers)
    assert {"recoveries", "examples_per_second", "skipped_steps"} <= {*told["names"]}
