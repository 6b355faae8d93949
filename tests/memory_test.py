"""`tfamp.estimate_memory`: bytes of a step by kind, against sums and real processes."""

import contextlib
import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.refusals import refusals
from tests.replicas import two_replicas
from tfamp.machine import memory

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
L = keras.layers
BATCH, MIB = 32, 2**20


def mlp(units=(256, 256, 10), width=256, **options):
    """Returns a compiled model, by default with 256 x 522 weights."""
    layers = [L.Dense(n, "relu", use_bias=False) for n in units]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile(**{"optimizer": "adam", "loss": "mse"} | options)
    return model


WEIGHTS = 256 * (256 + 256 + 10)


def test_parameters_slots_and_inputs_are_exact():
    estimate = tfamp.estimate_memory(mlp(), BATCH)
    # Adam: two slots, the number of steps (int64) and the learning rate.
    assert estimate.by_kind["optimizer slots"] == 2 * 4 * WEIGHTS + 8 + 4
    # The loss has a mean and a count.
    assert 0 <= estimate.by_kind["parameters"] - 4 * WEIGHTS <= 16
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
        with tfamp.scope(policy):
            # The input is narrow, and so is what the head has in float32.
            model = mlp((*[256] * 4, 16, 10), 16)
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
    policies = ("float32", "mixed_float16")
    found = [tfamp.estimate_memory(model, 2**12, policy=each) for each in policies]
    assert [each.policy for each in found] == ["float32", "mixed_float16"]
    assert found[0].by_kind == tfamp.estimate_memory(model, 2**12).by_kind
    assert "casts" in found[1].by_kind
    assert model.optimizer is optimizer and model.compute_dtype == "float32"


def test_the_largest_batch_fits_and_one_more_does_not():
    model = mlp()
    limit = 64 * MIB
    size = tfamp.estimate_memory(model, 4096).largest_batch(limit)
    assert tfamp.estimate_memory(model, size).peak_bytes <= limit
    assert tfamp.estimate_memory(model, round(1.05 * size)).peak_bytes > limit
    eights = tfamp.estimate_memory(model, 4096).largest_batch(limit, multiple_of=8)
    assert eights == size - size % 8


class Own(keras.Model):
    """A subclassed model with a train step of its own, that no file makes anew."""

    def __init__(self, width):
        super().__init__()
        self.inner, self.head = L.Dense(width, activation="relu"), L.Dense(4)

    def call(self, x):
        return self.head(self.inner(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_a_subclassed_model_is_asked_with_data_and_measured_by_its_function():
    model = Own(64)
    model.compile("sgd")
    data = np.ones((2, 16), np.float32), np.ones((2, 4), np.float32)
    estimate = tfamp.estimate_memory(model, 4096, data=data)
    assert 4096 * 64 * 4 <= estimate.by_kind["activations"] <= 1.5 * 4096 * 64 * 4
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(2)
    again = tfamp.estimate_memory(model, 4096, data=dataset)
    assert again.by_kind == estimate.by_kind
    with pytest.raises(TypeError, match="a function that returns it"):
        tfamp.estimate_memory(model, 8, measure=True)


def test_each_replica_has_its_part_of_the_batch():
    with two_replicas().scope():
        model = mlp()
    single = tfamp.estimate_memory(mlp(), 2**14).by_kind
    both = tfamp.estimate_memory(model, 2**14).by_kind
    # Activations of both replicas together are those of the whole batch.
    assert 0.9 < both["activations"] / single["activations"] < 1.3
    assert both["inputs"] == single["inputs"]
    with pytest.raises(ValueError, match=r"`batch_size` is 33 on 2 replicas"):
        tfamp.estimate_memory(model, 33)


def texts():
    """Returns a classifier of texts, with the inputs of those of KerasHub."""
    names = ("token_ids", "padding_mask")
    inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in names}
    x = L.Embedding(32, 8)(inputs["token_ids"])
    x = x * keras.ops.cast(inputs["padding_mask"], x.dtype)[..., None]
    model = keras.Model(inputs, L.Dense(4)(L.GlobalAveragePooling1D()(x)), name="texts")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def asked(model, batch_size=8, **options):
    return lambda: tfamp.estimate_memory(model(), batch_size, **options)


test_wrong_calls_are_refused = refusals(
    {
        "no model": (asked(lambda: 3), "expected a `keras.Model`", TypeError),
        "not compiled": (
            asked(lambda: keras.Sequential([keras.Input((2,)), L.Dense(1)])),
            "Compile it, or pass `optimizer='adam'`",
        ),
        "optimizer for inference": (
            asked(mlp, optimizer="sgd", training=False),
            "`optimizer` came with `training=False`",
        ),
        "unknown sizes": (
            asked(texts),
            "Model 'texts' leaves sizes of its inputs open: 'padding_mask' (None, "
            "None), 'token_ids' (None, None); expected sizes that are known but for "
            "the batch. Pass an example as `data`",
        ),
        "inference measured": (
            asked(mlp, training=False, measure=True),
            "`measure` came with `training=False`",
        ),
    }
)


@pytest.mark.parametrize("training", [True, False], ids=["fit", "predict"])
def test_sizes_that_a_model_leaves_open_are_an_example_s(training):
    names = ("token_ids", "padding_mask")
    example = {name: np.ones((2, 50), np.int32) for name in names}
    for data in (example, (example, np.ones(2, np.int32))[: 1 + training]):
        found = tfamp.estimate_memory(texts(), 8, data=data, training=training)
        # Two numbers a token and one class, of four bytes each.
        assert found.by_kind["inputs"] == 8 * (2 * 50 + training) * 4


def test_accumulation_and_moving_averages_are_slots():
    def slots(optimizer):
        found = tfamp.estimate_memory(mlp(optimizer=optimizer), BATCH)
        return found.by_kind["optimizer slots"]

    sgd = keras.optimizers.SGD
    plain, how = slots(sgd()), {"dynamic": False, "accumulation_steps": 4}
    for optimizer in (
        sgd(use_ema=True),
        tfamp.LossScaleOptimizer(sgd(), 1.0, **how),
    ):
        # Ours keeps the totals of 1,024 steps.
        assert 4 * WEIGHTS <= slots(optimizer) - plain <= 4 * WEIGHTS + 2**15


# --- mixed precision, accumulation, remat and EMA on two replicas, all together


def trained(micro_batches, with_trades):
    """Returns weights, losses and the count after a few updates of the same batches."""
    strategy = two_replicas() if with_trades else contextlib.nullcontext()
    keras.utils.set_random_seed(1)
    with tfamp.scope("mixed_float16"), strategy.scope() if with_trades else strategy:
        layers = [L.Dense(32, activation="tanh") for _ in range(2)]
        model = keras.Sequential([keras.Input((16,)), *layers, L.Dense(1)])
        inner = keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.5)
        how = {"dynamic": False, "accumulation_steps": micro_batches}
        model.compile(tfamp.LossScaleOptimizer(inner, 2.0**8, **how), "mse")
    if with_trades:
        tfamp.remat(model)
    x = np.random.default_rng(0).normal(size=(2 * BATCH, 16)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] - x[:, 1:2]))
    data = data.batch(BATCH // micro_batches)
    losses = model.fit(data, epochs=2, verbose=0).history["loss"]
    # At the end of `fit` Keras puts the averages into the weights.
    weights = [np.array(w) for w in model.get_weights()]
    return weights, losses, int(model.optimizer.inner_optimizer.iterations.numpy())


def test_all_trades_together_equal_the_large_batch():
    plain, traded = trained(1, with_trades=False), trained(2, with_trades=True)
    assert plain[2] == traded[2] == 4
    # Sums of a batch in other orders, in a format with so many digits.
    for a, b in zip(plain[0], traded[0], strict=True):
        scale = np.abs(a).max() + 1e-3
        np.testing.assert_allclose(a / scale, b / scale, atol=4e-3)
    np.testing.assert_allclose(plain[1], traded[1], rtol=4e-3)


# --- real processes


def compiled(inputs, outputs):
    model = keras.Model(inputs, L.Dense(10, activation="softmax")(outputs))
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def perceptron():
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


FAMILIES = (perceptron, cnn, transformer, lstm, resnet50)


@pytest.mark.slow
@pytest.mark.parametrize("build", FAMILIES, ids=lambda build: build.__name__)
def test_a_line_through_two_sizes_tells_the_process_at_eight_times_the_larger(build):
    pytest.importorskip("cloudpickle", reason="needs the extra `report`")
    model = build()
    traced = tfamp.estimate_memory(model, 4096)  # where the batch outweighs weights
    each = (traced.bytes_at(8192) - traced.bytes_at(4096)) / 4096
    size = 8 * math.ceil(2**28 / each)
    found = tfamp.estimate_memory(build, size, measure=True)
    _, larger = re.findall(r"[\d,]*\d", found.notes[-1])
    assert size / int(larger.replace(",", "")) == pytest.approx(8, rel=0.1)
    others = sum(n for kind, n in found.by_kind.items() if kind != "process")
    assert found.by_kind["process"] == found.peak_bytes - others

    def batches():
        x = tf.zeros((2, *model.input_shape[1:]), model.inputs[0].dtype)
        return tf.data.Dataset.from_tensors((x, tf.zeros(2, "int32"))).repeat()

    how = {"policy": "keras:float32", "start": size, "max_batch_size": size}
    (trial,) = tfamp.find_batch_size(build, batches, **how).trials
    assert found.peak_bytes == pytest.approx(trial.peak_bytes, rel=0.15)
    assert found.largest_batch(found.bytes_at(1000)) == 1000


@pytest.mark.slow
def test_peak_memory_of_compare_is_the_models_however_large_the_data():
    """What a process holds of data, libraries and earlier phases is left out."""
    pytest.importorskip("cloudpickle", reason="needs the extra `report`")
    if not memory.reset_peak():
        pytest.skip("the system cannot begin to count a process's peak anew")

    def build():
        return mlp((4000, 1), 1000)

    x = np.random.default_rng(0).random((60_000, 1000), dtype=np.float32)
    y = (x[:, :1] > 0.5).astype("float32")
    how = {"policies": ("float32", "keras:float32"), "seeds": 1, "batch_size": 500}
    for run in tfamp.compare(build, (x, y), (x[:200], y[:200]), **how).runs:
        held = (run.memory.training_bytes - run.memory.start_bytes) / MIB
        # Weights, gradients, two of Adam's; as much again for what is on the way; and
        # up to 200 for TensorFlow's own, by the machine. The data alone are 229 MiB,
        # as NumPy has them and as TensorFlow does.
        weights = 4000 * 1000 * 4 / MIB
        assert 4 * weights < held < 8 * weights + 200
