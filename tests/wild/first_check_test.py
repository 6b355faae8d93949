"""The first `fit` looks at a user's own layers, and keeps those that half spoils."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import Subclassed
from tests.wild import own_layers
from tests.wild.own_layers import HEALTHY, SPOILT, Own, model_of, numbers, rms_norm

pytestmark = [
    pytest.mark.filterwarnings("ignore:'mixed_.*float16' will be slow"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
]
# Where the right outputs themselves are below what float16 holds, and what it stands.
LEFT = {"harmonic mean"}


def fitted(layer, x, policy="mixed_float16", before=None, **options):
    with tfamp.scope(policy, **options):
        model, y = model_of(layer, x)
        if before is not None:
            before(model)
        model.fit(x, y, batch_size=32, verbose=0)
    return model


def assert_predicts_as_in_float32(model, layer, x):
    exact, _ = model_of(layer, x)
    exact.set_weights(model.get_weights())
    want, found = (m.predict(x, verbose=0) for m in (exact, model))
    assert np.abs(found - want).max() < 0.1 * max(np.abs(want).max(), want.std())


def row_of(model, path="own"):
    (row,) = [row for row in tfamp.assignment(model).layers if row.path == path]
    return row


@pytest.mark.quick("rms norm", "softmax")
@pytest.mark.parametrize("name", sorted(SPOILT.keys() - LEFT))
def test_a_spoilt_layer_computes_in_float32_as_the_same_weights_do(name):
    layer, x = SPOILT[name]
    model = fitted(layer, x)
    assert row_of(model).rule == "check"
    assert row_of(model).compute_dtype == "float32"
    assert_predicts_as_in_float32(model, layer, x)


def test_what_was_traced_before_it_is_traced_anew():
    layer, x = SPOILT["rms norm"]
    model = fitted(layer, x, before=lambda model: model.predict(x, verbose=0))
    assert_predicts_as_in_float32(model, layer, x)


@pytest.mark.quick("rms norm", "softmax", "swish")
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_layer_stays_in_half_precision(name):
    layer, x = HEALTHY[name]
    assert row_of(fitted(layer, x)).compute_dtype == "float16"


def test_it_says_which_layer_and_the_way_back_or_warns_or_is_left_out(caplog):
    layer, x = SPOILT["rms norm"]
    fitted(layer, x)
    (line,) = [text for text in caplog.messages if "'own'" in text]
    assert line.startswith("Layer 'own' computes in float32: in float16 its outputs")
    assert "off by" in line and "check=None" in line
    with pytest.warns(UserWarning, match=r"keep_float32=\['own'\]"):
        model = fitted(layer, x, check="warn")
    assert row_of(model).compute_dtype == "float16"
    assert row_of(fitted(layer, x, check=None)).compute_dtype == "float16"
    with pytest.raises(ValueError, match="check"):
        tfamp.enable("mixed_float16", check="always")


def test_a_dataset_is_drawn_from_as_ever():
    layer, x = SPOILT["rms norm"]
    orders, drawn = [], []

    def noted(a, b):
        orders[-1].append(float(a[0]))
        return a, b

    for check in (None, "keep"):
        orders.append([])
        tf.random.set_seed(3)
        with tfamp.scope("mixed_float16", check=check):
            model, y = model_of(layer, x)
            pairs = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64)
            pairs = pairs.map(
                lambda a, b: tf.numpy_function(noted, [a, b], [tf.float32] * 2)
            )
            pairs = pairs.map(lambda *ab: tuple(map(tf.ensure_shape, ab, ([16], [1]))))
            model.fit(pairs.batch(32), epochs=2, verbose=0)
        drawn.append(len(orders[-1]))
    assert row_of(model).rule == "check"
    assert orders[0] == orders[1] and drawn[1] == 2 * len(x)


class Block(keras.layers.Layer):
    """Keras's layers around a few operations of its own, without a `build`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = keras.layers.Dense(16, name="first")
        self.second = keras.layers.Dense(16, name="second")
        self.num_calls = 0

    def call(self, x):
        self.num_calls += 1
        print("called")
        return self.second(rms_norm(self.first(x) * 300.0))


def net():
    """Blocks in a subclassed model that nobody has built."""
    return Subclassed([Block(name="block"), keras.layers.Dense(1)])


@pytest.mark.quick("fit")
@pytest.mark.parametrize("way", ["fit", "train_on_batch", "xla", "eager"])
def test_a_blocks_own_operations_are_kept_and_its_products_stay(way, capsys):
    x = numbers()
    counts = []
    for check in (None, "keep"):
        keras.utils.set_random_seed(0)
        with tfamp.scope("mixed_float16", check=check):
            model = net()
            options = {"jit_compile": way == "xla", "run_eagerly": way == "eager"}
            model.compile("sgd", "mse", **options)
            if way == "train_on_batch":
                model.train_on_batch(x, x[:, :1])
            else:
                model.fit(x, x[:, :1], verbose=0)
        counts.append(
            (model.parts[0].num_calls, capsys.readouterr().out.count("called"))
        )
    assert row_of(model, "block").rule == "check"
    assert row_of(model, "block/first").compute_dtype == "float16"
    assert counts[1] <= counts[0]


def test_nothing_else_of_the_model_moves():
    x = numbers()

    def weights(check):
        keras.utils.set_random_seed(0)
        with tfamp.scope("mixed_bfloat16", check=check):
            swish = Own(lambda x: x * keras.ops.sigmoid(x), name="own")
            regular = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
            parts = [keras.layers.Dense(16), swish, *regular, keras.layers.Dense(1)]
            model = keras.Sequential(parts)
            model.compile("adam", "mse")
            model.fit(x, x[:, :1], epochs=2, verbose=0)
        return model.get_weights()

    for one, other in zip(weights(None), weights("keep"), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_file_holds_what_was_kept(tmp_path):
    model = fitted(own_layers.RunningSquares, numbers(1e-4))
    model.save(tmp_path / "model.keras")
    known = {"RunningSquares": own_layers.RunningSquares}
    loaded = tfamp.load_model(tmp_path / "model.keras", custom_objects=known)
    assert row_of(loaded).rule == "check"
    assert row_of(loaded).compute_dtype == "float32"


class Players(keras.Model):
    """Has no `call`, and a step that trains a model inside, as a GAN."""

    def __init__(self, critic):
        super().__init__()
        self.critic = critic
        self.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    def train_step(self, data):
        x, y = data
        weights = self.critic.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.critic(x, training=True) - y))
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


def test_of_a_gan_the_models_that_take_the_batch_are_looked_at():
    layer, x = SPOILT["rms norm"]
    with tfamp.scope("mixed_float16"):
        critic, y = model_of(layer, x)
        model = Players(critic)
        model.compile("sgd")
    model.fit(x, y, batch_size=32, verbose=0)
    assert row_of(critic).rule == "check"


def test_a_model_that_cannot_be_called_so_trains_as_ever(caplog):
    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            double = Own(lambda z: z * 2.0)
            self.maker = keras.Sequential([double, keras.layers.Dense(1)])

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.maker(data[0], training=True) ** 2)
            weights = self.maker.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    caplog.set_level("INFO", logger="absl")
    with tfamp.scope("mixed_float16"), warnings.catch_warnings():
        model = Gan()
        model.compile("sgd")
        history = model.fit(numbers(), numbers(shape=(1,)), verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert "not checked at its first training" in caplog.text


def test_steps_that_are_lost_now_and_then_are_told(caplog):
    x = np.ones((64, 4), "float32")
    with tfamp.scope("mixed_float16"):
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(x, x[:, :1], batch_size=2, verbose=0)
        assert "were skipped" not in caplog.text
        x[40:50:2] = np.nan
        model.fit(x, x[:, 1:2], batch_size=2, shuffle=False, verbose=0, epochs=2)
    assert caplog.text.count("5 of the 32 steps of this epoch of model") == 1


def drop_path(x):
    """Leaves out whole examples, few of them, as a path of a network that is deep."""
    kept = tf.floor(0.98 + tf.random.uniform((tf.shape(x)[0], 1), dtype=x.dtype))
    return x / tf.cast(0.98, x.dtype) * kept


def test_what_a_layer_draws_seldom_is_no_error_of_its():
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    for seed in range(3):
        model = fitted(drop_path, x, before=lambda _, n=seed: tf.random.set_seed(n))
        assert row_of(model).rule != "check"


class FourParts(Subclassed):
    """Takes its data in a form of its own."""

    def train_step(self, data):
        a, b, y, weights = data
        return super().train_step((a + b, y, weights))


def test_data_of_a_form_of_ones_own_are_left_to_the_step(tmp_path):
    x, y = numbers()[:32], np.ones((32, 1), "float32")
    for epochs in (1, 2):
        resume = tfamp.callbacks.Resume(tmp_path, every_steps=1)
        with tfamp.scope("mixed_float16"):
            model = FourParts([keras.layers.Dense(4), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            data = tf.data.Dataset.from_tensor_slices((x, x, y, y)).batch(8)
            model.fit(data, epochs=epochs, verbose=0, callbacks=[resume])
    assert resume.resumed_at is not None


class OnlyInTraining(keras.layers.Layer):
    """Raises in half precision, but not before it trains."""

    def call(self, x, training=False):
        return x * tf.fill([1], 0.99) if training else x


def test_a_layer_that_fails_in_training_alone_does_not_end_the_check(caplog):
    x = 50 * np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    with tfamp.scope("mixed_float16"):
        inputs = keras.Input((64,))
        own = keras.layers.Dense(64, kernel_initializer="identity")
        noisy = OnlyInTraining()(own(inputs))
        shares = Own(lambda x: x / keras.ops.sum(x * x, -1, keepdims=True), name="own")
        outputs = keras.layers.Dense(1)(shares(noisy))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        model.fit(x, x[:, :1], verbose=0)
    assert row_of(model).rule == "check"
    assert "are not checked" not in caplog.text


class RootMeanSquare(keras.layers.Layer):
    """Divides by the root of a mean of squares, which overflow."""

    def call(self, x):
        return x * keras.ops.rsqrt(keras.ops.sum(x * x, -1, keepdims=True) / 64)


def test_layers_of_a_class_that_are_spoiled_alike_are_told_of_in_two_lines(caplog):
    x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    with tfamp.scope("mixed_float16"):
        blocks = [[keras.layers.Rescaling(300.0), RootMeanSquare()] for _ in range(4)]
        model = keras.Sequential([*sum(blocks, []), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(x, x[:, :1], verbose=0)
    kept = [row for row in tfamp.assignment(model) if row.rule == "check"]
    assert [row.class_name for row in kept] == ["RootMeanSquare"] * 4
    first, second = [
        r.getMessage() for r in caplog.records if "root_mean_square" in r.getMessage()
    ]
    assert "computes in float32: in float16 its outputs" in first
    assert second.startswith("So do 3 others of RootMeanSquare, as 'root_mean_")
