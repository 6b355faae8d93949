"""Programs that hold a `keras.optimizers.LossScaleOptimizer`, alone or in a GAN."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import DECORATORS, in_each_way
from tests.replicas import two_replicas

layers, sgd = keras.layers, keras.optimizers.SGD
wrapped = keras.optimizers.LossScaleOptimizer
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
# The gradients of such a loss are 0 in float16, were they not scaled.
TINY = 1e-6
TOLERANCE = 0.02  # of float16 in a few steps
x = np.random.default_rng(5).normal(size=(64, 4)).astype("float32")
y = np.tanh(x @ np.array([[0.4], [0.8], [-0.4], [0.2]], "float32"))


@pytest.fixture(autouse=True)
def nothing_is_left_enabled():
    yield
    tfamp.disable()
    keras.config.set_dtype_policy("float32")


def network(seed=2, inputs=4, outputs=1, policy="mixed_float16"):
    keras.utils.set_random_seed(seed)
    with tfamp.scope(policy):
        return keras.Sequential(
            [
                keras.Input((inputs,)),
                layers.Dense(8, activation="tanh"),
                layers.Dense(outputs),
            ]
        )


def error_of(model):
    return float(np.mean((y - model(x).numpy().astype("float64")) ** 2))


def loss_of(model, factor=TINY, inputs=x, targets=y):
    outputs = tf.cast(model(inputs, training=True), "float32")
    return factor * tf.reduce_mean(tf.square(outputs - targets))


def trained(optimizer, policy="mixed_float16", scale=lambda loss: loss, steps=5):
    """Trains a model by an eager loop; returns it with the error that is left."""
    model = network(policy=policy)
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = scale(loss_of(model))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
    return model, error_of(model)


@pytest.fixture(scope="module")
def exact():
    """The error that float32 leaves, well below that of the start."""
    left = trained(sgd(0.1 / TINY), "float32")[1]
    assert left < error_of(network()) / 4
    return left


# --- two optimizers, one of them Keras's wrapper ----------------------------------


class Gan(keras.Model):
    """Two players with tiny losses, each with an optimizer of its own."""

    def __init__(self, scaled, tapes, **options):
        super().__init__(**options)
        self.scaled, self.tapes = scaled, tapes
        self.generator = keras.Sequential(
            [keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(1)]
        )
        self.critic = keras.Sequential(
            [keras.Input((1,)), layers.Dense(8, "tanh"), layers.Dense(1)]
        )

    def compile(self, d_optimizer, g_optimizer, **options):
        super().compile(**options)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def call(self, inputs):
        return self.critic(self.generator(inputs))

    def losses_of(self, inputs, targets):
        made = self.generator(inputs, training=True)
        score = tf.cast(self.critic(made, training=True), "float32")
        real = tf.cast(self.critic(targets + 2.0, training=True), "float32")
        critic = tf.square(score + 1.0) + tf.square(real - 1.0)
        generator = tf.square(score - 1.0)
        return TINY * tf.reduce_mean(critic), TINY * tf.reduce_mean(generator)

    def train_step(self, data):
        inputs, targets = data
        d_weights = self.critic.trainable_variables
        g_weights = self.generator.trainable_variables

        def scale(optimizer, loss):
            is_stock = "scale_loss" in self.scaled
            return optimizer.scale_loss(loss) if is_stock else loss

        if self.tapes == "one tape":
            with tf.GradientTape(persistent=True) as d_tape:
                d_loss, g_loss = self.losses_of(inputs, targets)
                d_scaled = scale(self.d_optimizer, d_loss)
            g_tape, g_scaled = d_tape, g_loss
        else:
            with tf.GradientTape() as d_tape, tf.GradientTape() as g_tape:
                d_loss, g_loss = self.losses_of(inputs, targets)
                d_scaled = scale(self.d_optimizer, d_loss)
                g_scaled = g_loss
        d_gradients = d_tape.gradient(d_scaled, d_weights)
        g_gradients = g_tape.gradient(g_scaled, g_weights)
        self.d_optimizer.apply_gradients(zip(d_gradients, d_weights, strict=True))
        self.g_optimizer.apply_gradients(zip(g_gradients, g_weights, strict=True))
        return {"critic": d_loss / TINY, "generator": g_loss / TINY}


def played(policy, d_optimizer, g_optimizer, scaled, tapes, way):
    """Lets two players play; returns the losses of both, step by step."""
    keras.utils.set_random_seed(4)
    with tfamp.scope(policy):
        gan = Gan(scaled, tapes)
    gan.compile(d_optimizer, g_optimizer, jit_compile=False)
    if way == "fit":
        logs = gan.fit(x, y, batch_size=64, epochs=5, shuffle=False, verbose=0)
        steps = logs.history
    else:
        gan(x[:2])
        step = gan.train_step if way == "eager loop" else tf.function(gan.train_step)
        if way == "graph loop":
            d_optimizer.build(gan.critic.trainable_variables)
            g_optimizer.build(gan.generator.trainable_variables)
        found = [step((tf.constant(x), tf.constant(y))) for _ in range(5)]
        steps = {k: [float(each[k]) for each in found] for k in found[0]}
    return [*steps["critic"], *steps["generator"]]


TAPES = ("two tapes", "one tape")
OTHERS = {
    "plain": sgd,
    "ours": lambda rate: tfamp.LossScaleOptimizer(sgd(rate)),
    "stock": lambda rate: wrapped(sgd(rate)),
}


@pytest.fixture(scope="module")
def float32_game():
    one, other = sgd(0.1 / TINY), sgd(0.1 / TINY)
    found = played("float32", one, other, "true", TAPES[0], "eager loop")
    assert found[4] < 0.9 * found[0]
    return found


@pytest.mark.quick("plain-scale_loss-two tapes-*", "ours-scale_loss-one tape-*")
@pytest.mark.parametrize("way", ["fit", "eager loop", "graph loop"])
@pytest.mark.parametrize("tapes", TAPES)
@pytest.mark.parametrize("scaled", ["scale_loss", "true"])
@pytest.mark.parametrize("other", ["plain", "ours"])
def test_a_gan_of_which_one_player_has_the_wrapper_of_keras(
    other, scaled, tapes, way, float32_game
):
    stock, second = wrapped(sgd(0.1 / TINY)), OTHERS[other](0.1 / TINY)
    found = played("mixed_float16", stock, second, scaled, tapes, way)
    assert found == pytest.approx(float32_game, rel=TOLERANCE)


# --- the same optimizer under two names -------------------------------------------


def test_the_wrapper_given_to_compile_scales_and_applies_as_the_models_own(exact):
    optimizer = wrapped(sgd(0.1 / TINY))
    model = network()
    model.compile(optimizer, "mse")
    for step in range(5):
        first, second = optimizer, model.optimizer
        if step % 2:
            first, second = second, first
        with tf.GradientTape() as tape:
            loss = first.scale_loss(loss_of(model))
        gradients = tape.gradient(loss, model.trainable_variables)
        second.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert error_of(model) == pytest.approx(exact, rel=TOLERANCE)
    assert model.optimizer.applied_steps == 5


# --- loops with a wrapper that no compile has seen --------------------------------

LOSSES = {
    "scaled": lambda optimizer: optimizer.scale_loss,
    "scaled, then halved and doubled": lambda optimizer: (
        lambda loss: 2.0 * (optimizer.scale_loss(loss) / 2.0)
    ),
    "true": lambda optimizer: lambda loss: loss,
}


@pytest.mark.quick("eager-scaled")
@pytest.mark.parametrize("name", LOSSES)
@in_each_way
def test_an_overflow_skips_its_step_and_halves_the_scale(decorate, name):
    model, optimizer = network(), wrapped(keras.optimizers.Adam(0.01), 1024.0)
    optimizer.build(model.trainable_variables)
    scale = LOSSES[name](optimizer)

    @decorate
    def step(factor):
        with tf.GradientTape() as tape:
            loss = scale(loss_of(model, factor))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    step(tf.constant(1.0))
    before = [
        v.numpy() for v in (*model.variables, *optimizer.inner_optimizer.variables)
    ]
    step(tf.constant(1e30))
    after = [
        v.numpy() for v in (*model.variables, *optimizer.inner_optimizer.variables)
    ]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert float(optimizer.dynamic_scale) == 512.0
    step(tf.constant(1.0))
    assert int(optimizer.iterations) == 2


@pytest.mark.quick("<lambda>-scaled")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("decorate", [DECORATORS["eager"], DECORATORS["graph"]])
def test_on_replicas(decorate, name, exact):
    strategy = two_replicas()
    with strategy.scope():
        model, optimizer = network(), wrapped(sgd(0.1 / TINY))
        optimizer.build(model.trainable_variables)
    scale = LOSSES[name](optimizer)

    def on_replica():
        with tf.GradientTape() as tape:
            loss = scale(loss_of(model, TINY / 2))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    @decorate
    def step():
        strategy.run(on_replica)

    for _ in range(5):
        step()
    assert error_of(model) == pytest.approx(exact, rel=TOLERANCE)


@pytest.mark.quick("waits")
@pytest.mark.parametrize("other", ["waits", "has trained"])
def test_a_program_without_tfamp_is_left_alone_beside_a_managed_model(other):
    found = []
    for beside in (None, other):
        kept = network() if beside else None
        if kept is not None:
            kept.compile(sgd(0.1), "mse")
        if beside == "has trained":
            kept.fit(x, y, batch_size=32, verbose=0)
        keras.config.set_dtype_policy("mixed_float16")
        keras.utils.set_random_seed(2)
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(1)]
        )
        optimizer = wrapped(sgd(0.1 / TINY))
        for scale in (optimizer.scale_loss, lambda loss: loss) * 2:
            with tf.GradientTape() as tape:
                loss = scale(loss_of(model))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
        found.append(model.get_weights())
        keras.config.set_dtype_policy("float32")
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
