"""`tfamp.quantize_aware`: the arithmetic of int8, in every way to train."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import COMPILED
from tests.replicas import two_replicas
from tfamp.keras_hooks import fake_quantization
from tfamp.serving.exports import writers

layers = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_.*float16' will be slow")
RNG = np.random.default_rng


def int8_values(kernel, channels):
    """What an export stores of a kernel: 127 steps to each side of 0, a scale each."""
    kernel = np.asarray(kernel, "float64")
    others = tuple(i for i in range(kernel.ndim) if i not in channels)
    most = np.abs(kernel).max(axis=others, keepdims=True)
    scale = np.where(most > 0, most, 1.0) / 127
    return np.round(kernel / scale) * scale


def in_steps(x, low, high):
    """What an export makes of an input: 256 steps that hold 0."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255
    zero = np.round(-low / scale)
    steps = np.clip(np.round(np.asarray(x, "float64") / scale) + zero, 0, 255)
    return ((steps - zero) * scale).astype("float32")


OUT = layers.EinsumDense("abcd,cde->abe", (None, 3))
# A layer, the shape of its input, and the axes of channels by weight.
LAYERS = {
    "Dense": (layers.Dense(3), (5,), {0: (1,)}),
    "Conv2D": (layers.Conv2D(3, 2), (5, 5, 2), {0: (3,)}),
    "SeparableConv1D": (layers.SeparableConv1D(3, 2), (6, 4), {0: (1, 2), 1: (2,)}),
    "Conv2DTranspose": (layers.Conv2DTranspose(3, 2), (4, 4, 2), {0: (2,)}),
    "EinsumDense out": (OUT, (4, 2, 5), {0: (2,)}),
}


@pytest.mark.parametrize("made, shape, channels", LAYERS.values(), ids=LAYERS)
def test_a_layer_computes_with_int8_values_of_kernel_and_input(made, shape, channels):
    layer, twin = (type(made).from_config(made.get_config()) for _ in range(2))
    model = keras.Sequential([keras.Input(shape), layer])
    x = RNG(0).normal(size=(8, *shape)).astype("float32")
    twin.build((None, *shape))
    weights = [RNG(1).normal(size=w.shape).astype("float32") for w in layer.weights]
    layer.set_weights(weights)
    for place, axes in channels.items():
        weights[place] = int8_values(weights[place], axes)
    twin.set_weights(weights)
    tfamp.quantize_aware(model)
    model(x, training=True)
    expected = twin(in_steps(x, x.min(), x.max()))
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)


def test_a_range_begins_with_the_first_batch_and_follows_the_others():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, use_bias=False)])
    model.layers[0].set_weights([np.eye(2)])
    tfamp.quantize_aware(model)
    model(np.float32([[-1, 3]]), training=True)
    model(np.float32([[-2, 7]]), training=True)
    low, high = 0.99 * -1 + 0.01 * -2, 0.99 * 3 + 0.01 * 7
    model(np.float32([[np.nan, 1]]), training=True)  # moves nothing
    x = np.float32([[-1.5, 1], [0.003, 5]])
    np.testing.assert_allclose(model(x), in_steps(x, low, high), rtol=1e-5)


def test_gradients_pass_the_rounding():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    kernel = RNG(0).normal(size=(3, 2)).astype("float32")
    model.layers[0].set_weights([kernel, np.zeros(2)])
    tfamp.quantize_aware(model)
    x = tf.constant(RNG(1).uniform(-1, 1, size=(4, 3)), tf.float32)
    model(np.float32([[-2, 2, 0]]), training=True)
    factors = tf.constant(RNG(2).normal(size=(4, 2)), tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(model(x, training=False) * factors)
    of_x, of_kernel = tape.gradient(loss, [x, model.layers[0].kernel])
    rounded = in_steps(x, -2, 2)
    np.testing.assert_allclose(of_kernel, rounded.T @ factors, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        of_x, factors @ int8_values(kernel, (1,)).T, rtol=1e-5, atol=1e-6
    )


def cnn():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


X = RNG(0).normal(size=(32, 8, 8, 1)).astype("float32")
Y = RNG(1).integers(0, 3, 32)


def compiled(model, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, **options)
    return model


@pytest.mark.slow("each is in another test of this file")
def test_it_trains_alike_in_every_way():
    losses = []
    for options in (*COMPILED.values(), {"steps_per_execution": 2}):
        keras.utils.set_random_seed(1)
        model = compiled(tfamp.quantize_aware(cnn()), **options)
        history = model.fit(X, Y, batch_size=16, epochs=4, verbose=0, shuffle=False)
        losses.append(history.history["loss"])
    assert losses[0][-1] < losses[0][0]
    for each in losses[1:]:
        np.testing.assert_allclose(each, losses[0], rtol=1e-3)


@pytest.mark.quick("LSTM-*", "GRU-True")
@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("made", [layers.LSTM, layers.GRU, layers.SimpleRNN])
def test_ranges_of_a_recurrent_layer_begin_with_all_steps_of_a_batch(made, unroll):
    layer = made(3, return_sequences=True, unroll=unroll)
    model = keras.Sequential([keras.Input((8, 8)), layer])
    x, states = X[..., 0], []
    exact = model(x)
    tfamp.quantize_aware(model)
    for number, size in enumerate((1, 4)):
        states.append(np.array(model(size * x, training=True))[:, :-1])
        part = 0.01**number  # of it in the range, beside what was there before
        ends = [(v.min(), v.max()) for v in (x, states[0], size * x, states[-1])]
        expected = (1 - part) * np.array(ends[:2]) + part * np.array(ends[2:])
        found = np.array(fake_quantization.ranges_in(layer.cell))[:, :2]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert 0 < np.abs(model(x) - exact).max() < 0.1


@pytest.mark.slow
def test_it_trains_in_half_precision_on_replicas_that_share_one_range():
    with two_replicas().scope(), tfamp.scope("mixed_bfloat16"):
        model = compiled(tfamp.quantize_aware(cnn()), jit_compile=False)
    losses = model.fit(X, Y, batch_size=16, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert model.layers[0].compute_dtype == "bfloat16"
    ranges = [v for v in model.non_trainable_variables if "input_range" in v.path]
    assert len(ranges) == 6  # low, high and a count for two layers
    for each in ranges:
        first, second = (part.numpy() for part in each.value.values)
        assert first == second


def test_a_trained_model_that_has_predicted_is_rounded_from_then_on():
    model = compiled(cnn())
    before = model.predict(X, verbose=0)
    tfamp.quantize_aware(model, activations=None)
    after = model.predict(X, verbose=0)
    assert 0 < np.abs(after - before).max() < 0.1
    tfamp.quantize_aware(model, keep=["conv2d", "dense"])
    np.testing.assert_array_equal(model.predict(X, verbose=0), before)


def test_what_cannot_be_rounded_is_told():
    with pytest.raises(ValueError, match="'dence'.*matches no layer"):
        tfamp.quantize_aware(cnn(), keep=["dence"])
    with pytest.raises(ValueError, match="built"):
        tfamp.quantize_aware(keras.Sequential([layers.Dense(2)]))


@keras.saving.register_keras_serializable()
class Residual(layers.Layer):
    """A block as users write it, without `build` and without `training`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.second = layers.Dense(8), layers.Dense(8)

    def call(self, x):
        return x + self.second(keras.ops.relu(self.first(x)))


@keras.saving.register_keras_serializable()
class Blocks(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.blocks = [Residual() for _ in range(2)]
        self.head = layers.Dense(3)

    def call(self, x):
        x = keras.ops.reshape(x, (-1, 8))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_blocks_that_are_told_nothing_of_training_learn_ranges_and_keep_them(tmp_path):
    x, y = X[:, 0], Y
    model = Blocks()
    model(x)
    compiled(tfamp.quantize_aware(model))
    model.fit(x, y, epochs=2, verbose=0)
    seen = [v for v in model.non_trainable_variables if v.path.endswith("num_seen")]
    assert [int(each.numpy()) for each in seen] == [2] * len(seen) and seen
    model.predict(x, verbose=0)
    assert int(seen[0].numpy()) == 2
    model.save(tmp_path / "model.keras")
    loaded = tfamp.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x), model(x))


def trained():
    model = compiled(tfamp.quantize_aware(cnn()), metrics=["accuracy"])
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0)
    return model


def test_a_file_keeps_the_rounding_and_stock_keras_loads_it(tmp_path):
    model = trained()
    model.save(tmp_path / "model.keras")
    loaded = tfamp.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(X), model(X))
    loaded.fit(X, Y, verbose=0)
    assert len(loaded.weights) == len(model.weights)
    stock = keras.saving.load_model(tmp_path / "model.keras")
    assert stock(X).shape == (32, 3)
    clone = keras.models.clone_model(model)
    assert len(clone.weights) == len(model.weights) - 6


def int8_export(model, path, format):
    far = 3 * X  # of a wider range than training had
    how = {"dtype": "int8", "scheme": "static", "calibration": far}
    return tfamp.export(model, path, format=format, **how).load()


@pytest.mark.parametrize("format", ["litert", "onnx"])
@pytest.mark.quick("onnx")
def test_an_export_answers_as_the_model_was_trained(tmp_path, format, monkeypatch):
    pytest.importorskip({"litert": "ai_edge_litert", "onnx": "onnx"}[format])
    if format == "onnx" and writers._reduces_range():  # it rounds to 7 bits here
        monkeypatch.setattr(fake_quantization, "STEPS", 64)
    keras.utils.set_random_seed(5)
    model = trained()
    made = int8_export(model, tmp_path / "int8", format)
    expected = model.predict(X, verbose=0)
    step = (expected.max() - expected.min()) / 255
    off = np.abs(made.predict(X) - expected)
    # LiteRT rounds what a product gives as well, to the range of its calibration.
    assert (off / step).max() < {"litert": 8, "onnx": 1}[format]
    assert (off / step).mean() < {"litert": 1.5, "onnx": 0.1}[format]
    tfamp.quantize_aware(model, keep=["conv2d", "dense"])
    other = int8_export(model, tmp_path / "without", format)
    worse = np.abs(other.predict(X) - expected)
    assert worse.mean() > 1.2 * off.mean()
