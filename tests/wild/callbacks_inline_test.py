"""Callbacks made inside the call of `fit`, in a script without other parts of tfamp."""

import json
import os
import subprocess
import sys

import pytest

# A process of its own: nothing of tfamp may have touched `fit` before it is looked up.
SCRIPT = """
import json, sys
import keras
import numpy as np
import tfamp

folder = sys.argv[1]
x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
y = x @ np.float32([[1], [2], [-1]])
answers = {"left": {}}


class Interrupt(keras.callbacks.Callback):
    seen = 0

    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.after:
            raise KeyboardInterrupt


def regression():
    keras.utils.set_random_seed(11)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def told(model):
    return [w.astype("float64").ravel().tolist() for w in model.get_weights()]


def left_behind(model):
    return type(model.train_function).__module__.startswith("tfamp")


halted = regression()
try:
    halted.fit(
        x, y, batch_size=8, epochs=3, verbose=0,
        callbacks=[
            tfamp.callbacks.Resume(folder + "/run", every_steps=2), Interrupt(9)
        ],
    )
except KeyboardInterrupt:
    answers["left"]["Resume"] = left_behind(halted)
again = regression()
history = again.fit(
    x, y, batch_size=8, epochs=3, verbose=0,
    callbacks=[tfamp.callbacks.Resume(folder + "/run", every_steps=2)],
)
answers["resumed"] = [told(again), history.history["loss"]]
# Last, as tfamp mends the order of arrays in Keras 3.16 (keras#23046) from here on.
whole = regression()
history = whole.fit(x, y, batch_size=8, epochs=3, verbose=0)
answers["whole"] = [told(whole), history.history["loss"]]

others = {
    "NanRecovery": lambda: tfamp.callbacks.NanRecovery(folder + "/good"),
    "Throughput": lambda: tfamp.callbacks.Throughput(),
    "DeviceStats": lambda: tfamp.callbacks.DeviceStats(),
}
for name, make in others.items():
    model = regression()
    try:
        model.fit(
            x, y, batch_size=8, epochs=2, verbose=0, callbacks=[make(), Interrupt(7)]
        )
    except KeyboardInterrupt:
        answers["left"][name] = left_behind(model)

bad = x.copy()
bad[21] = np.nan
model = regression()
history = model.fit(
    bad, y, batch_size=8, shuffle=False, verbose=0,
    callbacks=[tfamp.callbacks.NanRecovery(folder + "/other")],
)
answers["recoveries"] = history.history["recoveries"]
answers["loss"] = history.history["loss"][0]
# The same model again, plainly: as stock, which knows of no recovery.
history = model.fit(bad, y, batch_size=8, shuffle=False, verbose=0)
answers["plain"] = sorted(history.history)
answers["plain loss"] = str(history.history["loss"][0])
print("ANSWERS", json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inline")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        timeout=1200,
        check=False,
    )
    assert "ANSWERS" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.rsplit("ANSWERS ", 1)[1])


def test_a_resume_made_inside_the_call_goes_on_to_the_bit(answers):
    assert answers["resumed"] == answers["whole"]


def test_ctrl_c_leaves_nothing_around_the_training_function(answers):
    names = ("Resume", "NanRecovery", "Throughput", "DeviceStats")
    assert answers["left"] == dict.fromkeys(names, False)


def test_a_recovery_made_inside_the_call_works_and_is_gone_in_the_next_fit(answers):
    assert answers["recoveries"] == [1]
    assert 0 < answers["loss"] < 100
    assert answers["plain"] == ["loss", "mae"]
    assert answers["plain loss"] == "nan"
