"""`tfamp.ranges`: how large the numbers of a model are, and what formats would hold."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import STYLES, assembled

L = keras.layers
DATA = (np.float32([[1, 2], [3, 4], [5, 6]]), np.float32([[0], [0], [0]]))


def model_of(style="sequential"):
    parts = [
        L.Dense(4, kernel_initializer="ones", name="first"),
        L.Rescaling(1e6, name="large"),
        L.Rescaling(1e-6, name="small"),
        L.Dense(1, kernel_initializer="ones", name="head"),
    ]
    model = assembled(parts, style, (2,))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class Through(L.Layer):
    """Adds a weight of 0 to each number: by output and weight gradients are alike."""

    def build(self, shape):
        self.shift = self.add_weight(shape=shape[1:], initializer="zeros")

    def call(self, x):
        return x + self.shift


def gradients_of(values):
    """The ranges of a model through which these numbers go as gradients."""
    values = np.float32(values)[None]
    model = keras.Sequential([keras.Input(values.shape[1:]), Through()])
    model.compile("sgd", lambda y, p: tf.reduce_sum(y * p))
    return tfamp.ranges(model, (np.ones_like(values), values), num_batches=1)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_shares_are_those_of_a_cast(name):
    """Against TensorFlow's own cast of each number."""
    rng = np.random.default_rng(0)
    values = np.float32(2.0 ** rng.uniform(-45, 25, 20000) * rng.choice([-1, 1], 20000))
    cast = tf.cast(tf.cast(values, name), tf.float32).numpy()
    is_coarse = (cast != 0) & (
        np.abs(values) < 2.0 ** (-14 if "float16" == name else -126)
    )
    (seen,) = gradients_of(values).of("gradients")
    found = seen.fit(name)
    # Numbers are told apart to a power of two, of 70, where the limits lie at one.
    tolerance = 1e-3
    assert found.overflow == pytest.approx(np.mean(np.isinf(cast)), abs=tolerance)
    assert found.zero == pytest.approx(np.mean(cast == 0), abs=tolerance)
    assert found.coarse == pytest.approx(np.mean(is_coarse), abs=tolerance)


def test_zeros_and_what_is_not_finite_are_counted_apart():
    (seen,) = gradients_of([0.0, -0.0, np.nan, np.inf, -np.inf, 2.0]).of("gradients")
    assert (seen.count, seen.zeros, seen.nonfinite) == (12, 4, 6)
    assert (seen.smallest, seen.largest, seen.exponents) == (2.0, 2.0, {"1": 2})
    assert seen.fit("float16").total == 0


@pytest.mark.parametrize("power", [-30, -20, -5, 3, 14])
def test_the_best_scale_brings_gradients_into_range(power):
    rng = np.random.default_rng(0)
    found = gradients_of(2.0 ** rng.uniform(power - 12, power, 1000))
    low, high = found.loss_scales
    assert low <= found.best_loss_scale <= high
    assert 2.0**power * found.best_loss_scale < 2.0**16
    assert found.lost_gradients[1] == 0 or found.best_loss_scale == 2.0**24


@pytest.mark.quick("float32-nested", "mixed_bfloat16-subclassed")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_ranges_are_those_by_hand(style, policy):
    with tfamp.scope(policy):
        model = model_of(style)
    model(DATA[0])
    found = tfamp.ranges(model, DATA)
    prefix = "inner/" if style == "nested" else ""
    by = {(layer.path, layer.kind): layer for layer in found.layers}
    first = by[f"{prefix}first", "activations"]
    assert (first.smallest, first.largest, first.count) == (3.0, 11.0, 12)
    large = by[f"{prefix}large", "activations"]
    assert large.largest == pytest.approx(11e6)
    assert large.fit("float16").overflow == 1.0
    assert large.fit("bfloat16").overflow == 0.0
    # The loss is the mean of (4 * sum)^2; its derivative by the head's output is
    # 2 * 4 * sum / 3, and the layers behind it pass that times 1e-6 on.
    assert by["head", "gradients"].largest >= 8 * 11 / 3
    large = by[f"{prefix}large", "gradients"]
    assert large.largest == pytest.approx(8 * 11 / 3 * 1e-6, rel=1e-4)
    assert large.smallest == pytest.approx(8 * 3 / 3 * 1e-6, rel=1e-4)
    assert by[f"{prefix}first", "weights"].zeros == 4
    assert tfamp.Ranges.from_json(found.to_json()) == found


def test_a_sure_classifier_needs_no_smaller_scale():
    """The loss takes logits: the slope by a probability of 1e-6 is nobody's number."""
    head = L.Dense(2, activation="softmax", name="head")
    model = keras.Sequential([keras.Input((2,)), head])
    model.compile("sgd", "sparse_categorical_crossentropy")
    head.set_weights([np.float32([[7, -7], [0, 0]]), np.zeros(2, "float32")])
    found = tfamp.ranges(model, (np.float32([[1, 0], [1, 0]]), np.int32([1, 0])))
    assert found.loss_scales[1] >= 2.0**15
    assert {each.path for each in found.of("gradients")} == {"head"}


def test_the_table_and_the_plot_show_each_layer(tmp_path):
    pytest.importorskip("matplotlib")
    found = tfamp.ranges(model_of(), DATA)
    text = str(found)
    assert all(layer.path in text for layer in found.layers)
    assert max(map(len, text.splitlines())) <= 110
    assert "Gradients fit float16 best with a loss scale of" in text
    assert found.plot(tmp_path / "ranges.png") is not None
    assert (tmp_path / "ranges.png").stat().st_size > 10_000


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="Unknown `format` 'float64'"):
        tfamp.ranges(model_of(), DATA).layers[0].fit("float64")
    with pytest.raises(ValueError, match="is not compiled"):
        tfamp.ranges(keras.Sequential([keras.Input((2,)), L.Dense(1)]), DATA)
