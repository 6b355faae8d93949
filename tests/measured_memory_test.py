"""Memory that is measured: a process that trains, told from two small ones."""

import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

pytest.importorskip("cloudpickle", reason="needs the extra `report`")
pytest.importorskip("psutil", reason="needs the extra `report`")
L = keras.layers


def compiled(inputs, outputs):
    model = keras.Model(inputs, L.Dense(10, activation="softmax")(outputs))
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def mlp():
    x = h = keras.Input((32,))
    for units in (2048, 64, 2048):
        h = L.Dense(units, activation="relu")(h)
    return compiled(x, h)


def cnn():
    x = h = keras.Input((32, 32, 3))
    for filters in (32, 64):
        h = L.BatchNormalization()(L.Conv2D(filters, 3, padding="same")(h))
        h = L.MaxPooling2D()(L.ReLU()(h))
    return compiled(x, L.GlobalAveragePooling2D()(h))


def transformer():
    x = keras.Input((64,), dtype="int32")
    h = L.Embedding(1000, 128)(x)
    for _ in range(2):
        normed = L.LayerNormalization()(h)
        h = h + L.MultiHeadAttention(4, 32)(normed, normed)
        hidden = L.Dense(512, activation="gelu")(L.LayerNormalization()(h))
        h = h + L.Dense(128)(hidden)
    return compiled(x, L.GlobalAveragePooling1D()(h))


def lstm():
    x = keras.Input((64, 32))
    return compiled(x, L.LSTM(128)(L.LSTM(128, return_sequences=True)(x)))


def resnet50():
    options = {"weights": None, "include_top": False, "pooling": "avg"}
    model = keras.applications.ResNet50(input_shape=(64, 64, 3), **options)
    return compiled(model.input, model.output)


FAMILIES = (mlp, cnn, transformer, lstm, resnet50)


@pytest.mark.slow
@pytest.mark.parametrize("build", FAMILIES, ids=lambda build: build.__name__)
def test_a_line_through_two_sizes_tells_the_process_at_eight_times_the_larger(build):
    model = build()
    traced = tfamp.estimate_memory(model, 4096)  # where the batch outweighs weights
    each = (traced.bytes_at(8192) - traced.bytes_at(4096)) / 4096
    size = 8 * math.ceil(2**28 / each)
    found = tfamp.estimate_memory(build, size, measure=True)
    _, larger = re.findall(r"[\d,]*\d", found.notes[-1])
    assert size / int(larger.replace(",", "")) == pytest.approx(8, rel=0.1)
    assert found.by_kind["process"] == found.peak_bytes - sum(
        number for kind, number in found.by_kind.items() if kind != "process"
    )

    def batches():
        x = tf.zeros((2, *model.input_shape[1:]), model.inputs[0].dtype)
        return tf.data.Dataset.from_tensors((x, tf.zeros(2, "int32"))).repeat()

    how = {"policy": "keras:float32", "start": size, "max_batch_size": size}
    (trial,) = tfamp.find_batch_size(build, batches, **how).trials
    assert found.peak_bytes == pytest.approx(trial.peak_bytes, rel=0.15)
    assert found.largest_batch(found.bytes_at(1000)) == 1000


def test_inference_is_not_measured():
    with pytest.raises(ValueError, match="`measure` came with `training=False`"):
        tfamp.estimate_memory(mlp, 8, training=False, measure=True)


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
