"""The first steps of `fit` in float16: a starting scale that is too high costs none."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import same_bits
from tfamp.stepping.snapshots import take

layers = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
rng = np.random.default_rng(4)
FLAT = rng.normal(size=(64, 6)).astype("float32")
IMAGES = rng.normal(size=(32, 12, 12, 3)).astype("float32")
WORDS = rng.integers(0, 40, (32, 10))
PRICES = (FLAT[:, :1] * 90 + 400).astype("float32")


def stack(*parts, shape=(6,), dtype=None):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *parts])


def priced():
    """Prices that nobody has normalized."""
    return stack(layers.Dense(16, "relu"), layers.Dense(1)), "mse", FLAT, PRICES


def dear():
    """Prices whose gradients overflow without any scale, too."""
    model, loss, x, y = priced()
    return model, loss, x, y * 1000


def summed():
    """A loss that is a sum over the batch."""
    model = stack(layers.Dense(16, "relu"), layers.Dense(1))
    return model, keras.losses.MeanSquaredError("sum"), FLAT, FLAT[:, :1] * 9


def unnormalized():
    """Pixels from 0 to 255."""
    model = stack(
        layers.Conv2D(8, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(1),
        shape=IMAGES.shape[1:],
    )
    return model, "mse", np.clip(IMAGES * 60 + 128, 0, 255), FLAT[:32, :1]


def normalized():
    """Batch normalization and dropout in between."""
    model = stack(
        layers.Dense(16),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Dropout(0.3, seed=3),
        layers.Dense(1),
    )
    return model, "mse", FLAT, PRICES


def usual():
    """Nothing that overflows."""
    model = stack(layers.Dense(8, "tanh"), layers.Dense(1))
    return model, "mse", FLAT, FLAT[:, :1]


MODELS = (priced, dear, summed, unnormalized, normalized, usual)


def trained(make, policy="mixed_float16", epochs=2, **how):
    keras.utils.set_random_seed(1)
    with tfamp.scope(policy):
        model, loss, x, y = make()
        model.compile(keras.optimizers.SGD(1e-6), loss, metrics=["mae"], **how)
    logs = model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model, logs.history


@pytest.mark.quick("dear")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_healthy_model_skips_no_step(make):
    model, logs = trained(make)
    optimizer = model.optimizer
    steps = 2 * -(-len(make()[2]) // 16)
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (steps, 0)
    assert (optimizer.scale < 2**15) == (make is not usual), optimizer.scale
    expected = trained(make, "float32")[1]
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=0.02, err_msg=name)


HOW = {
    "XLA": {"jit_compile": True},
    "several steps a call": {"steps_per_execution": 3},
}


@pytest.mark.slow("the next test has several optimizers, and all else")
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_nor_does_it_however_steps_are_run(how):
    model, logs = trained(priced, **how)
    assert (model.optimizer.applied_steps, model.optimizer.skipped_steps) == (8, 0)
    np.testing.assert_allclose(logs["loss"], trained(priced)[1]["loss"], rtol=1e-2)


class Probed(keras.Model):
    """Two optimizers, given to `compile`; the first one's gradients are large."""

    def __init__(self):
        super().__init__()
        self.body, self.probe = layers.Dense(16, "relu"), layers.Dense(1)
        self.head, self.num_steps = layers.Dense(1), tf.Variable(0.0)

    def compile(self, optimizer, probe_optimizer, **how):
        super().compile(**how)
        self.body_optimizer, self.probe_optimizer = optimizer, probe_optimizer

    def train_step(self, data):
        x, y = data
        self.num_steps.assign_add(1.0)
        with tf.GradientTape() as tape:
            hidden = self.body(x)
            loss = tf.reduce_sum(tf.square(self.head(hidden) - y))
        weights = [*self.body.trainable_weights, *self.head.trainable_weights]
        gradients = tape.gradient(loss, weights)
        self.body_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        with tf.GradientTape() as tape:
            probed = tf.reduce_mean(tf.square(self.probe(tf.stop_gradient(hidden)) - 1))
        weights = self.probe.trainable_weights
        gradients = tape.gradient(probed, weights)
        self.probe_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "probed": probed}


@pytest.mark.quick("XLA")
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_nor_does_one_of_several_optimizers(how):
    def trained(policy):
        keras.utils.set_random_seed(1)
        with tfamp.scope(policy):
            model = Probed()
            sgd = keras.optimizers.SGD(1e-7, momentum=0.5)
            model.compile(sgd, keras.optimizers.Adam(0.01), **how)
        fitted = model.fit(FLAT, PRICES, batch_size=16, epochs=2, shuffle=False)
        return model, fitted.history

    model, logs = trained("mixed_float16")
    for optimizer in (model.body_optimizer, model.probe_optimizer):
        assert (optimizer.applied_steps, optimizer.skipped_steps) == (8, 0)
    assert model.body_optimizer.scale < 2**15
    assert model.num_steps.numpy() == 8, "what was tried counts once"
    expected = trained("float32")[1]
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=0.02, err_msg=name)


def test_an_optimizer_that_never_steps_has_no_more_steps_tried(monkeypatch):
    """Each is tried by a data set of its own."""
    made, original = [], tf.data.Dataset.from_tensors

    def from_tensors(*args, **kwargs):
        made.append(1)
        return original(*args, **kwargs)

    with tfamp.scope("mixed_float16"):
        model = Probed()
        model.compile(keras.optimizers.SGD(1e-7), keras.optimizers.SGD(0.01))
    monkeypatch.setattr(tf.data.Dataset, "from_tensors", from_tensors)
    model.fit(FLAT, FLAT[:, :1], batch_size=2, epochs=1, shuffle=False, verbose=0)
    assert model.optimizer.applied_steps == 0
    assert model.probe_optimizer.applied_steps == model.num_steps.numpy() == 32
    assert 10 <= len(made) < 20


def test_an_error_of_the_first_step_is_that_of_the_program():
    class Wrong(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(1)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                outputs = self.head(x)
                loss = keras.losses.binary_crossentropy(y[:, 0], outputs)
            tape.gradient(loss, self.trainable_variables)
            return {}

    with tfamp.scope("mixed_float16"):
        model = Wrong()
        model.compile("adam")
    with pytest.raises(ValueError, match="must have the same rank"):
        model.fit(FLAT, FLAT[:, :1], verbose=0)


def test_what_was_tried_leaves_no_trace():
    """Dropout, moving statistics, metrics: as with the right scale from the start."""
    tried, logs = trained(normalized)
    scale = tried.optimizer.scale

    keras.utils.set_random_seed(1)
    options = {"initial_scale": scale}
    with tfamp.scope("mixed_float16", loss_scale_options=options):
        model, loss, x, y = normalized()
        model.compile(keras.optimizers.SGD(1e-6), loss, metrics=["mae"])
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    assert history == logs
    assert same_bits(take(model), take(tried))


def test_bad_data_are_skipped_once_and_lower_the_scale_once():
    with tfamp.scope("mixed_float16"):
        model, loss, x, y = usual()
        model.compile(keras.optimizers.SGD(0.1), loss)
    x = x.copy()
    x[3] = np.nan
    model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    assert (model.optimizer.applied_steps, model.optimizer.skipped_steps) == (3, 1)
    assert model.optimizer.scale == 2**14


def test_a_model_that_gives_nan_is_skipped_as_before():
    def hopeless():
        model = stack(
            layers.Dense(4),
            layers.Lambda(lambda x: tf.sqrt(-1 - x * x)),
            layers.Dense(4),
        )
        return model, "mse", FLAT, FLAT[:, :4]

    model, logs = trained(hopeless, epochs=1)
    assert (model.optimizer.applied_steps, model.optimizer.skipped_steps) == (0, 4)
    assert model.optimizer.scale == 2**11
    assert np.isnan(logs["loss"]).all()


class Doubled(keras.layers.Layer):
    """A layer of the user's, at which a first batch is looked at."""

    def call(self, inputs):
        return 2 * inputs


def built_by_fit(policy, **options):
    """Returns a model that was built by the first batch of a `fit`."""
    with tfamp.scope(policy):
        model = keras.Sequential([Doubled(), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        x, y = np.ones((7, 4)), np.ones((7, 2))
        model.fit(x, y, shuffle=False, verbose=0, **options)
    return model


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_model_that_fit_builds_is_built_for_any_number_of_examples(policy):
    assert built_by_fit(policy).input_shape == (None, 4)


def test_so_is_one_that_goes_on(tmp_path):
    def resume():
        return tfamp.callbacks.Resume(tmp_path, every_steps=1)

    stop = keras.callbacks.TerminateOnNaN()
    stop.on_epoch_begin = lambda epoch, logs=None: 1 // (1 - epoch)
    with pytest.raises(ZeroDivisionError):
        built_by_fit(
            "mixed_float16", epochs=2, batch_size=2, callbacks=[resume(), stop]
        )
    last = resume()
    model = built_by_fit("mixed_float16", epochs=2, batch_size=2, callbacks=[last])
    assert last.resumed_at is not None
    assert model.input_shape == (None, 4)


class Mistaken(keras.layers.Layer):
    """A layer whose dtypes do not fit."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2))

    def call(self, inputs):
        return tf.matmul(inputs, tf.cast(self.kernel, "float64"))


def test_an_error_of_a_layer_in_a_model_that_fit_builds_is_what_one_sees():
    with tfamp.scope("mixed_float16"):
        model = keras.Sequential([Mistaken()])
        model.compile("sgd", "mse")
        with pytest.raises(TypeError, match="type float64 that does not match"):
            model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)


class WithAProbe(keras.Model):
    """Trains a layer that its `call` never comes to."""

    def __init__(self):
        super().__init__()
        self.body, self.probe = keras.layers.Dense(4), keras.layers.Dense(3)

    def call(self, x):
        return self.body(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            error = tf.reduce_mean((self.probe(self.body(x)) - y) ** 2)
        weights = [*self.body.trainable_variables, *self.probe.trainable_variables]
        gradients = tape.gradient(error, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"error": error}


@pytest.mark.parametrize("how", [{}, {"run_eagerly": True}, {"jit_compile": True}])
def test_a_step_may_train_layers_that_the_models_call_never_comes_to(how):
    x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
    found = []
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(0)
        with tfamp.scope(policy):
            model = WithAProbe()
            model.compile(keras.optimizers.Adam(0.01), **how)
            found.append(model.fit(x, x[:, :3], verbose=0).history["error"][-1])
    assert found[1] == pytest.approx(found[0], rel=0.01)
