"""Memory that is measured: a process that trains, told from two small ones."""

import re

import keras
import numpy as np
import pytest

import tfamp

pytest.importorskip("cloudpickle", reason="needs the extra `report`")
pytest.importorskip("psutil", reason="needs the extra `report`")
SIZE = 256


def build():
    # Each example holds 2**16 numbers of float32, a quarter of a MiB.
    wide = keras.layers.Dense(2**16, activation="tanh")
    model = keras.Sequential([keras.Input((1,)), wide, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


@pytest.mark.slow
def test_a_process_is_told_with_all_it_holds():
    given = build()
    traced = tfamp.estimate_memory(given, SIZE)
    found = tfamp.estimate_memory(given, SIZE, measure=True)
    assert (traced.source, found.source) == ("graph", "measured")
    # An interpreter with TensorFlow alone holds hundreds of MiB.
    assert found.peak_bytes > traced.peak_bytes + 2**27
    assert found.by_kind["process"] == found.peak_bytes - traced.peak_bytes
    each = (found.bytes_at(2 * SIZE) - found.bytes_at(SIZE)) / SIZE
    assert 2**18 < each < 8 * 2**18
    limit = found.bytes_at(1000)
    assert found.largest_batch(limit) == 1000
    assert re.search(r"Measured at batches of [\d,]+ and [\d,]+\.", str(found))


def test_a_function_is_enough_to_trace():
    found, expected = (tfamp.estimate_memory(each, 8) for each in (build, build()))
    assert found.by_kind == expected.by_kind
    assert found.curve == expected.curve


def test_inference_is_not_measured():
    with pytest.raises(ValueError, match="`measure` came with `training=False`"):
        tfamp.estimate_memory(build, 8, training=False, measure=True)


def test_a_model_that_cannot_be_built_anew_asks_for_its_function():
    class Own(keras.Model):
        def __init__(self, width):
            super().__init__()
            self.dense = keras.layers.Dense(width)

        def call(self, x):
            return self.dense(x)

    model = Own(4)
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((2, 3)), np.ones((2, 4)))
    with pytest.raises(TypeError, match="a function that returns it"):
        tfamp.estimate_memory(model, 8, measure=True)
