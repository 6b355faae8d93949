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


def compared(rows):
    x = np.random.default_rng(0).random((rows, WIDTH), dtype=np.float32)
    y = (x[:, :1] > 0.5).astype("float32")
    found = tfamp.compare(
        build,
        (x, y),
        (x[:200], y[:200]),
        policies=("float32", "keras:float32"),
        seeds=1,
        batch_size=500,
        latency_batch_sizes=(1,),
    )
    return [run.memory for run in found.runs]


@pytest.fixture(scope="module")
def measured():
    if not memory.reset_peak():
        pytest.skip("the system cannot begin to count a process's peak anew")
    # 2 MB of data, and 100.
    return compared(500), compared(25_000)


def mib(memories, name):
    return [(getattr(each, name) - each.start_bytes) / MIB for each in memories]


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_data(measured):
    few, many = (mib(each, "training_bytes") for each in measured)
    # 93 MiB more of data, once as NumPy has them and once as TensorFlow does.
    assert abs(np.mean(many) - np.mean(few)) < 45


@pytest.mark.slow
def test_peak_memory_of_training_holds_weights_gradients_and_state(measured):
    for memories in measured:
        # Weights, gradients, two of Adam's; and as much again for what is on the way.
        assert all(
            4 * WEIGHTS < x < 8 * WEIGHTS + 100 for x in mib(memories, "training_bytes")
        )
