"""The memory that `compare` shows is that of the model, whatever the size of the data.

Runs are real processes, as users have them: what a process holds of data, libraries and
earlier phases is what the figures have to leave out.
"""

import keras
import numpy as np
import pytest

import tfamp
from tfamp.machine import memory

pytest.importorskip("cloudpickle", reason="needs the extra `report`")
pytest.importorskip("psutil", reason="needs the extra `report`")

MIB = 2**20
WIDTH = 1000
UNITS = 4000
WEIGHTS = UNITS * WIDTH * 4 / MIB  # of `build`, in MiB: about 15


def build():
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            keras.layers.Dense(UNITS, activation="relu", use_bias=False),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.slow
def test_peak_memory_is_that_of_weights_gradients_and_state_however_large_the_data():
    if not memory.reset_peak():
        pytest.skip("the system cannot begin to count a process's peak anew")
    x = np.random.default_rng(0).random((25_000, WIDTH), dtype=np.float32)
    y = (x[:, :1] > 0.5).astype("float32")
    found = tfamp.compare(
        build,
        (x, y),
        (x[:200], y[:200]),
        policies=("float32", "keras:float32"),
        seeds=1,
        batch_size=500,
    )
    for run in found.runs:
        held = (run.memory.training_bytes - run.memory.start_bytes) / MIB
        # Weights, gradients, two of Adam's; and as much again for what is on the way.
        # The data alone are 95 MiB, as NumPy has them and as TensorFlow does.
        assert 4 * WEIGHTS < held < 8 * WEIGHTS + 100
