"""What `triage` and `sensitivity` judge: layers with dropout, added losses, masks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.numerics.sensitivity import sensitivity
from tfamp.numerics.triage import triage
from tfamp.stepping.unchanged import same_draws

layers, ops = keras.layers, keras.ops
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 8)).astype("float32")
Y = RNG.normal(size=(32, 1)).astype("float32")
CLASSES = RNG.integers(0, 3, 32)


def compiled(*parts, loss="mse", policy="float32", optimizer="sgd", shape=(8,)):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        model = keras.Sequential([keras.Input(shape), *(part() for part in parts)])
    model.compile(optimizer, loss)
    return model


# Randomness


class Noisy(layers.Layer):
    """A block with dropout inside whose own operations overflow float16."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.dropout = layers.Dropout(0.2, seed=1)

    def call(self, x, training=False):
        y = self.dropout(x, training=training)
        return ops.square(y * self.factor) / self.factor**2


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1e3, "layers"), (1.0, "safe")], ids=["bad", "good"]
)
def test_a_block_with_dropout_inside_is_judged(factor, verdict):
    model = compiled(lambda: Noisy(factor), lambda: layers.Dense(1))
    found = sensitivity(model, (X, Y))
    assert found.verdict in (verdict, *(("loss scale",) if verdict == "safe" else ()))
    assert all("noisy" in path for path in found.guilty)


class Handing(layers.Layer):
    """Overflows float16 in its own operations, and hands what comes out to a child."""

    def __init__(self, child):
        super().__init__()
        self.child = child

    def call(self, x):
        return self.child(ops.square(x * 1e3) * 1e-6)


@pytest.mark.quick("dropout")
@pytest.mark.parametrize(
    "child",
    [
        lambda: layers.Activation("relu", name="same"),
        lambda: layers.Dropout(0.0, name="same"),
        lambda: layers.Dropout(0.2, name="same"),
    ],
    ids=["relu", "no dropout", "dropout"],
)
def test_a_block_whose_last_layer_changes_nothing_is_judged(child):
    model = compiled(lambda: Handing(child()), lambda: layers.Dense(1))
    found = sensitivity(model, (X, Y))
    assert [path.partition("_")[0] for path in found.guilty] == ["handing"]


def test_a_layer_that_draws_past_the_seeds_of_keras_is_not_judged():
    draw = layers.Lambda(lambda x: x + 1e6 * tf.random.normal(tf.shape(x)))
    model = compiled(lambda: draw, lambda: layers.Dense(1))
    assert draw.name not in sensitivity(model, (X, Y)).guilty


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dropout_drops_the_same_in_every_dtype(dtype):
    def dropped(dtype):
        layer = layers.Dropout(0.5, seed=3, dtype=dtype)
        return np.asarray(layer(tf.ones((64, 8), dtype), training=True), "float32")

    with same_draws():
        np.testing.assert_array_equal(dropped(dtype), dropped("float32"))
    assert (dropped(dtype) != dropped("float32")).any()  # TensorFlow alone


@pytest.mark.parametrize("function", ["uniform", "normal", "truncated_normal"])
def test_noise_is_the_same_up_to_rounding(function):
    draw = getattr(keras.random, function)
    with same_draws():
        low = tf.cast(draw((100,), dtype="float16", seed=1), tf.float32)
        np.testing.assert_allclose(low, draw((100,), seed=1), rtol=1e-3, atol=1e-4)


# What matters


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_head_that_is_off_by_its_targets_spread_is_found(dtype):
    """Its gradients are a small part of all; what it gives is wrong all the same."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(32, "relu"),
            layers.Dense(1, bias_initializer=keras.initializers.Constant(1500.0)),
        ]
    )
    model.compile("sgd", "mse")
    found = sensitivity(model, (X, 1500 + Y), dtype=dtype)
    assert found.verdict == "layers"
    assert [path.partition("_")[0] for path in found.guilty] == ["dense"]


# Losses that layers add


ADDED = {
    "log": lambda x: -ops.mean(ops.log(1 - ops.sigmoid(x * 10 + 12))),
    "square": lambda x: ops.mean(ops.square(x * 10 + 600)),
}


class Adding(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        self.add_loss(1e-3 * self.function(x))
        return x


@pytest.mark.parametrize("name", ADDED)
def test_a_loss_that_a_layer_adds_counts(name):
    model = compiled(lambda: Adding(ADDED[name]), lambda: layers.Dense(1))
    found = sensitivity(model, (X / 10, Y))
    assert found.verdict == "layers"
    assert any("adding" in path for path in found.guilty)


@pytest.mark.quick("0-3000.0-guilty1")
@pytest.mark.parametrize(
    "offset, guilty", [(0.0, set()), (3000.0, {"offset", "second"})]
)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_that_a_later_normalization_cancels_are_no_fault(
    offset, guilty, seed
):
    """What the second one takes out again, the first one's scale cannot change."""
    x = np.random.default_rng(seed).normal(size=(32, 8)).astype("float32")
    model = compiled(
        lambda: layers.Dense(8, name="before"),
        lambda: layers.BatchNormalization(name="first"),
        lambda: layers.Rescaling(1.0, offset=offset, name="offset"),
        lambda: layers.BatchNormalization(name="second"),
        lambda: layers.Dense(1, name="head"),
    )
    found = sensitivity(model, (x, Y), dtype="bfloat16")
    assert set(found.guilty) == guilty
    assert found.verdict == ("layers" if guilty else "safe")


def test_a_small_loss_that_a_layer_adds_is_no_alarm():
    model = compiled(
        lambda: Adding(lambda x: ops.mean(ops.square(x))), lambda: layers.Dense(1)
    )
    found = sensitivity(model, (X, Y))
    assert (found.verdict, found.guilty) in (("safe", {}), ("loss scale", {}))


def test_a_step_that_cannot_run_is_told_so():
    class OwnStep(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.cast(y, tf.float32) - self(x)))
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    model = OwnStep([keras.Input((8,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    found = sensitivity(model, (X, Y))
    assert found.verdict == "cannot run"
    assert "raises in float16" in found.advice and "float" in found.advice


# Triage


@pytest.mark.parametrize("size, cause", [(1.0, "none"), (0.05, "none"), (1e3, None)])
def test_an_embedding_has_exploded_once_its_rows_have_run_away(size, cause):
    rows = {"embeddings_initializer": keras.initializers.RandomNormal(0, size)}
    model = compiled(
        lambda: layers.Embedding(2000, 4, **rows),
        layers.Flatten,
        lambda: layers.Dense(1),
        shape=(3,),
    )
    found = triage(model, (RNG.integers(0, 2000, (8, 3)), Y[:8]))
    assert found.cause == (cause or "learning rate")
    assert cause or "embedding" in found.layer


def test_labels_that_the_loss_ignores_are_no_bad_labels():
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)
    model = compiled(lambda: layers.Dense(3, "softmax"), loss=loss)
    labels = np.where(np.arange(32) % 4, CLASSES, -1)
    assert triage(model, (X, labels)).cause == "none"
    labels[1] = -2
    assert triage(model, (X, labels)).cause == "data"


class Masked(layers.Layer):
    """Weighs its inputs by a softmax, of which a mask leaves some out."""

    def __init__(self, then):
        super().__init__()
        self.mask = layers.Lambda(
            lambda x: tf.where(tf.range(8) < 6, x, tf.constant(-np.inf, x.dtype)),
            name="mask",
        )
        self.softmax = layers.Softmax(name="weights")
        self.then = then

    def call(self, x):
        return self.then(self.softmax(self.mask(x)))


def test_a_mask_of_infinities_is_not_to_blame():
    bad = layers.Lambda(lambda x: tf.math.log(x - x), name="bad")
    model = compiled(lambda: Masked(bad), lambda: layers.Dense(1))
    found = triage(model, (X, Y))
    assert (found.cause, found.layer.rpartition("/")[2]) == ("model", "bad")


# As an error it would be one of float16, for which a layer is kept in float32.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_mask_of_infinities_is_not_to_blame_for_float16():
    bad = lambda: layers.Lambda(lambda x: x * 1e6 / 1e6, name="bad")  # noqa: E731
    identity = lambda: Masked(layers.Activation("linear"))  # noqa: E731
    model = compiled(identity, bad, lambda: layers.Dense(1), policy="mixed_float16")
    found = triage(model, (X, Y))
    assert found.cause == "precision" and "bad" in found.layer


def test_a_replay_leaves_nothing_to_the_next_one():
    """The moving statistics of a step on NaN are NaN, and were not before."""
    x = X.copy()
    x[0, 0] = np.nan
    bad = lambda: layers.Lambda(lambda x: tf.math.log(x - x), name="bad")  # noqa: E731
    model = compiled(layers.BatchNormalization, bad, lambda: layers.Dense(1))
    found = triage(model, (x, Y))
    assert not any("moving" in sentence for sentence in found.evidence)


def test_a_loss_near_zero_does_not_blame_the_learning_rate():
    """Adam's first updates are as large as its rate, however small gradients are."""
    model = compiled(lambda: layers.Dense(1), optimizer=keras.optimizers.Adam(0.02))
    y = np.asarray(model(X)) + 1e-5
    assert triage(model, (X, y)).cause == "none"


def zeros():
    return layers.Dense(1, kernel_initializer="zeros")


def shifted(start):
    """Returns a loss that is `start` for a model that gives 0."""
    shift = start - float(np.mean(np.square(Y)))
    return lambda y, y_pred: keras.losses.mean_squared_error(y, y_pred) + shift


def likelihood(y, y_pred):
    """Returns the negative log-likelihood of narrow normal distributions."""
    return ops.mean(0.5 * ops.square((0.03 * y - y_pred) * np.exp(3.0))) - 3.0


def exponential(y, y_pred):
    return -ops.mean(ops.exp(y_pred))


def critic(y, y_pred):
    return -ops.mean(y_pred) - 1


@pytest.mark.quick("to -8")
@pytest.mark.parametrize(
    "loss, rate, rises",
    [
        (shifted(-0.05), 2.0, True),
        (shifted(-5.0), 1.5, True),
        (shifted(-0.05), 0.01, False),
        (likelihood, 1e-3, False),
        (exponential, 0.1, False),
        (critic, 5.0, False),
    ],
    ids=["up through 0", "up", "down", "likelihood", "exponential", "to -8"],
)
def test_a_loss_below_zero_does_not_blame_the_learning_rate(loss, rate, rises):
    model = compiled(zeros, loss=loss, optimizer=keras.optimizers.SGD(rate))
    found = triage(model, (X, Y))
    assert (found.cause, found.evidence) == ("none", ())
    before = model.train_on_batch(X, Y)
    after = float(model.evaluate(X, Y, verbose=0))
    assert before < 0 and (after > before + 0.05 if rises else after < before - 0.005)


@pytest.mark.quick("to -inf")
@pytest.mark.parametrize(
    "loss, rate, after",
    [
        (shifted(-5.0), 1e3, "9.987e+05."),
        (shifted(-0.05), 1e3, "9.987e+05."),
        (exponential, 1e3, "-inf."),
        (critic, 1e6, "-1.21e+06."),
    ],
    ids=["up", "up through 0", "to -inf", "far down"],
)
def test_a_loss_below_zero_that_leaves_blames_the_learning_rate(loss, rate, after):
    model = compiled(zeros, loss=loss, optimizer=keras.optimizers.SGD(rate))
    found = triage(model, (X, Y))
    assert found.cause == "learning rate"
    (sentence,) = found.evidence
    assert sentence.startswith("One update takes the loss from -")
    assert sentence.endswith(after)
    # The rate that is named does no harm, nor does the next update at it.
    rate *= found.rate_factor
    model = compiled(zeros, loss=loss, optimizer=keras.optimizers.SGD(rate))
    before = model.train_on_batch(X, Y)
    assert -100 < float(model.evaluate(X, Y, verbose=0)) < before
    assert triage(model, (X, Y)).cause == "none"


def test_weights_that_a_loss_without_end_drew_away_blame_the_learning_rate():
    model = compiled(zeros, loss=critic, optimizer=keras.optimizers.SGD(1e3))
    model.fit(X, Y, epochs=3, verbose=0)
    found = triage(model, (X, Y))
    assert found.cause == "learning rate"
    assert "initializers make that about 1" in found.evidence[-1]
