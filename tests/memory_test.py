"""`tfamp.estimate_memory`: bytes of a step by kind, against sums made by hand."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.refusals import refusals
from tests.replicas import two_replicas

BATCH = 32


@contextlib.contextmanager
def quietly():
    """Takes away the warning that half precision is slow on most CPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def mlp(policy="float32", units=256, **options):
    """Returns a compiled model of two layers; weights are 4 x 256 x 256 numbers."""
    with quietly(), tfamp.scope(policy):
        model = keras.Sequential(
            [
                keras.Input((units,)),
                keras.layers.Dense(units, activation="relu", use_bias=False),
                keras.layers.Dense(units, activation="relu", use_bias=False),
                keras.layers.Dense(10, use_bias=False),
            ]
        )
        options = {"optimizer": "adam", "loss": "mse"} | options
        model.compile(**options)
    return model


def num_weights(model):
    return sum(int(np.prod(w.shape)) for w in model.trainable_weights)


def test_parameters_slots_and_inputs_are_exact():
    model = mlp()
    estimate = tfamp.estimate_memory(model, BATCH)
    weights = num_weights(model)
    # Adam: two slots, the number of steps (int64) and the learning rate.
    assert estimate.by_kind["optimizer slots"] == 2 * 4 * weights + 8 + 4
    # The loss has a mean and a count.
    assert 0 <= estimate.by_kind["parameters"] - 4 * weights <= 16
    assert estimate.by_kind["inputs"] == BATCH * (256 + 10) * 4
    assert estimate.peak_bytes == sum(estimate.by_kind.values())


def test_activations_of_a_large_batch_are_what_the_gradient_keeps():
    batch = 2**16
    estimate = tfamp.estimate_memory(mlp(), batch)
    # Two outputs of relu; the peak comes with the gradient of one of them on top.
    each = batch * 256 * 4
    assert 2 * each <= estimate.by_kind["activations"] <= 2.1 * each
    assert each <= estimate.by_kind["workspace"] <= 2.1 * each


@pytest.mark.quick("bfloat16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_halves_activations_and_adds_casts(dtype):
    def estimated(policy):
        with quietly(), tfamp.scope(policy):
            # The input is narrow, and so is what the head has in float32.
            units = [256] * 4 + [16, 10]
            layers = [keras.layers.Dense(n, "relu", use_bias=False) for n in units]
            model = keras.Sequential([keras.Input((16,)), *layers])
            model.compile("adam", "mse")
        return tfamp.estimate_memory(model, 2**14).by_kind

    plain, mixed = estimated("float32"), estimated(f"mixed_{dtype}")
    # Four wide outputs of half the bytes.
    ratio = mixed["activations"] / plain["activations"]
    assert 3 / 8 <= ratio <= 0.55
    # Three wide kernels and the small ones; the first casts may be over.
    assert 3 * 256 * 256 * 2 <= mixed["casts"] <= 3.2 * 256 * 256 * 2
    assert "casts" not in plain


def test_a_step_of_predict_has_neither_slots_nor_gradients():
    estimate = tfamp.estimate_memory(mlp(), 2**12, training=False)
    assert {*estimate.by_kind} == {"parameters", "inputs", "activations"}
    # One output is made while the one before is read.
    assert estimate.by_kind["activations"] == 2 * 2**12 * 256 * 4


@pytest.mark.slow
def test_other_policies_are_of_copies():
    model = mlp()
    optimizer = model.optimizer
    found = [
        tfamp.estimate_memory(model, 2**12, policy=policy)
        for policy in ("float32", "mixed_float16")
    ]
    assert [each.policy for each in found] == ["float32", "mixed_float16"]
    assert found[0].by_kind == tfamp.estimate_memory(model, 2**12).by_kind
    assert "casts" in found[1].by_kind
    assert model.optimizer is optimizer and model.compute_dtype == "float32"


def test_the_largest_batch_fits_and_one_more_does_not():
    model = mlp()
    limit = 64 * 2**20
    size = tfamp.estimate_memory(model, 4096).largest_batch(limit)
    assert tfamp.estimate_memory(model, size).peak_bytes <= limit
    assert tfamp.estimate_memory(model, round(1.05 * size)).peak_bytes > limit
    eights = tfamp.estimate_memory(model, 4096).largest_batch(limit, multiple_of=8)
    assert eights == size - size % 8


class Own(keras.Model):
    """A subclassed model with a train step of its own."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(64, activation="relu")
        self.head = keras.layers.Dense(4)

    def call(self, x):
        return self.head(self.inner(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_a_subclassed_model_is_asked_with_data():
    model = Own()
    model.compile("sgd")
    data = np.ones((2, 16), np.float32), np.ones((2, 4), np.float32)
    estimate = tfamp.estimate_memory(model, 4096, data=data)
    assert 4096 * 64 * 4 <= estimate.by_kind["activations"] <= 1.5 * 4096 * 64 * 4
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(2)
    again = tfamp.estimate_memory(model, 4096, data=dataset)
    assert again.by_kind == estimate.by_kind


def test_each_replica_has_its_part_of_the_batch():
    strategy = two_replicas()
    with strategy.scope():
        model = mlp()
    single = tfamp.estimate_memory(mlp(), 2**14)
    both = tfamp.estimate_memory(model, 2**14)
    # Activations of both replicas together are those of the whole batch.
    ratio = both.by_kind["activations"] / single.by_kind["activations"]
    assert 0.9 < ratio < 1.3
    assert both.by_kind["inputs"] == single.by_kind["inputs"]
    with pytest.raises(ValueError, match=r"`batch_size` is 33 on 2 replicas"):
        tfamp.estimate_memory(model, 33)


ERRORS = {
    "no model": (
        lambda: tfamp.estimate_memory("model", 8),
        "expected a `keras.Model`",
        TypeError,
    ),
    "not compiled": (
        lambda: tfamp.estimate_memory(
            keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), 8
        ),
        "Compile it, or pass `optimizer='adam'`",
    ),
    "optimizer for inference": (
        lambda: tfamp.estimate_memory(mlp(), 8, optimizer="sgd", training=False),
        "`optimizer` came with `training=False`",
    ),
    "unknown sizes": (
        lambda: tfamp.estimate_memory(texts(), 8),
        "Model 'texts' leaves sizes of its inputs open: 'padding_mask' (None, None), "
        "'token_ids' (None, None); expected sizes that are known but for the batch. "
        "Pass an example as `data`",
    ),
}


def texts():
    """Returns a classifier of texts, with the inputs of those of KerasHub."""
    inputs = {
        name: keras.Input((None,), dtype="int32", name=name)
        for name in ("token_ids", "padding_mask")
    }
    x = keras.layers.Embedding(32, 8)(inputs["token_ids"])
    x = x * keras.ops.cast(inputs["padding_mask"], x.dtype)[..., None]
    outputs = keras.layers.Dense(4)(keras.layers.LSTM(8)(x))
    model = keras.Model(inputs, outputs, name="texts")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("training", [True, False], ids=["fit", "predict"])
def test_sizes_that_a_model_leaves_open_are_an_example_s(training):
    names = ("token_ids", "padding_mask")
    example = {name: np.ones((2, 50), np.int32) for name in names}
    for data in (example, (example, np.ones(2, np.int32))[: 1 + training]):
        found = tfamp.estimate_memory(texts(), 8, data=data, training=training)
        # Two numbers a token and one class, of four bytes each.
        assert found.by_kind["inputs"] == 8 * (2 * 50 + training) * 4


test_wrong_calls_are_refused = refusals(ERRORS)


def test_accumulation_and_moving_averages_are_slots():
    weights = 4 * num_weights(mlp())
    plain = tfamp.estimate_memory(mlp(optimizer=keras.optimizers.SGD()), BATCH)
    averaged = keras.optimizers.SGD(use_ema=True)
    accumulated = tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(), 1.0, dynamic=False, accumulation_steps=4
    )
    for optimizer in (averaged, accumulated):
        more = tfamp.estimate_memory(mlp(optimizer=optimizer), BATCH)
        grown = more.by_kind["optimizer slots"] - plain.by_kind["optimizer slots"]
        # Ours keeps the totals of 1,024 steps.
        assert weights <= grown <= weights + 2**15
