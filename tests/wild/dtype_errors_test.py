"""Layers whose `call` mixes float32 into half precision run, where stock raises."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers = keras.layers
POLICIES = ["mixed_float16", "mixed_bfloat16"]
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")


class Scaled(layers.Layer):
    """Multiplies by a float32 constant between two products."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first = layers.Dense(8)
        self.second = layers.Dense(4)
        self.norm = layers.LayerNormalization()

    def call(self, inputs):
        hidden = self.first(inputs) * tf.math.sqrt(8.0)
        return self.norm(inputs + self.second(hidden))


class CastByHand(layers.Layer):
    def call(self, inputs):
        return inputs * tf.cast(tf.reduce_mean(inputs), "float32")


class Concatenated(layers.Layer):
    def call(self, inputs):
        return tf.concat([inputs, tf.zeros([tf.shape(inputs)[0], 2])], axis=-1)


class Subclassed(keras.Model):
    def __init__(self, make):
        super().__init__()
        self.part = make()
        self.out = layers.Dense(1)

    def call(self, inputs):
        return self.out(self.part(inputs))


def functional(make):
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(1)(make()(inputs)))


def sequential(make):
    return keras.Sequential([make(), layers.Dense(1)])


def a_lambda():
    """Whose shape Keras asks its function for, with an error of its own if it fails."""
    return layers.Lambda(lambda t: t * tf.constant(2.0))


STYLES = {"functional": functional, "sequential": sequential, "subclassed": Subclassed}
MAKERS = [Scaled, CastByHand, Concatenated, a_lambda]


def low(policy):
    """Returns settings under which no gradient overflows, and no step is skipped."""
    is_scaled = policy == "mixed_float16"
    return {"loss_scale_options": {"initial_scale": 64.0}} if is_scaled else {}


def fit(model, **how):
    model.compile(keras.optimizers.SGD(0.01), "mse", **how)
    history = model.fit(x, x[:, :1], epochs=2, batch_size=8, shuffle=False, verbose=0)
    return history.history["loss"]


@pytest.mark.quick("functional-Scaled-mixed_float16")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_a_layer_runs_and_trains_as_in_float32(style, make, policy):
    losses = []
    for each in ("float32", policy):
        keras.utils.set_random_seed(3)
        with tfamp.scope(each, **low(each)):
            losses.append(fit(style(make), jit_compile=False))
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


def test_one_line_names_layer_and_expression(caplog):
    with tfamp.scope("mixed_float16"), caplog.at_level("WARNING", "absl"):
        layer = CastByHand(name="by_hand")
        layer(x)
        layer(x)
    (record,) = caplog.records
    text = record.getMessage()
    assert "'by_hand'" in text
    assert "inputs * tf.cast(tf.reduce_mean(inputs), " in text


def test_a_model_that_mixes_in_its_own_call():
    class Mixing(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed = layers.Dense(4)
            self.out = layers.Dense(1)

        def call(self, inputs):
            hidden = self.embed(inputs)
            hidden *= tf.math.sqrt(8.0)
            return self.out(hidden)

    losses = []
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(3)
        with tfamp.scope(policy, **low(policy)):
            model = Mixing()
        losses.append(fit(model, jit_compile=False))
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert model.embed.compute_dtype == "float16"
    assert model(x).dtype == "float32"
    assert isinstance(model.optimizer, tfamp.LossScaleOptimizer)


def test_the_error_of_the_code_comes_through_where_float32_does_not_help():
    class Wrong(layers.Layer):
        def __init__(self):
            super().__init__()
            self.norm = layers.LayerNormalization(name="norm")

        def call(self, inputs):
            raise TypeError("no float16, please")

    with tfamp.scope("mixed_float16"):
        layer = Wrong()
        with pytest.raises(TypeError, match="no float16, please") as caught:
            layer(x)
    assert layer.compute_dtype == "float16"
    notes = getattr(caught.value, "__notes__", ["norm"])
    assert any("norm" in note for note in notes)


def test_other_errors_are_not_tried():
    calls = []

    class Failing(layers.Layer):
        def call(self, inputs):
            calls.append(inputs)
            raise ValueError("a shape is wrong")

    with tfamp.scope("mixed_float16"), pytest.raises(ValueError, match="shape is"):
        Failing()(tf.constant(x))
    # Traces may have looked for a dtype in which it runs; it has run once.
    assert [tf.is_symbolic_tensor(each) for each in calls].count(False) == 1


# Keras's own, of a layer that has no `build`.
@pytest.mark.quick("mixed_bfloat16")
@pytest.mark.filterwarnings("ignore:`build[(][)]` was called on layer")
@pytest.mark.parametrize("policy", POLICIES)
def test_saved_and_loaded(policy, tmp_path):
    keras.saving.register_keras_serializable("dtype_errors")(Scaled)
    with tfamp.scope(policy):
        model = functional(Scaled)
    fit(model, jit_compile=False)
    model.save(tmp_path / "model.keras")
    again = tfamp.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        model.predict(x, verbose=0), again.predict(x, verbose=0)
    )
