"""GANs with two optimizers, and programs that hold Keras's own wrapper."""

import keras
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close
from tests.loops import COMPILED, DECORATORS, in_each_way
from tests.replicas import two_replicas
from tests.wild.tiny_losses import (
    TINY,
    TOLERANCE,
    error_of,
    gradients_of,
    network,
    nothing_of_other_tests,  # noqa: F401 - a fixture of every test
    replica_trainer,
    sgd,
    trainer,
    x,
    y,
)

layers = keras.layers
wrapped = keras.optimizers.LossScaleOptimizer
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


@pytest.fixture(scope="module")
def exact():
    """The error that float32 leaves, well below that of the start."""
    model = network("float32")
    before, step = error_of(model), trainer(model, sgd())
    for _ in range(5):
        step()
    assert error_of(model) < before / 4
    return error_of(model)


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

    @property
    def both(self):
        return self.d_optimizer, self.g_optimizer

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
                d_scaled = scale(self.both[0], d_loss)
            g_tape, g_scaled = d_tape, g_loss
        else:
            with tf.GradientTape() as d_tape, tf.GradientTape() as g_tape:
                d_loss, g_loss = self.losses_of(inputs, targets)
                d_scaled = scale(self.both[0], d_loss)
                g_scaled = g_loss
        d_gradients = d_tape.gradient(d_scaled, d_weights)
        g_gradients = g_tape.gradient(g_scaled, g_weights)
        d_optimizer, g_optimizer = self.both
        d_optimizer.apply_gradients(zip(d_gradients, d_weights, strict=True))
        g_optimizer.apply_gradients(zip(g_gradients, g_weights, strict=True))
        return {"critic": d_loss / TINY, "generator": g_loss / TINY}


class InAList(Gan):
    """Holds its optimizers where `compile` does not look either."""

    def compile(self, d_optimizer, g_optimizer, **options):
        super().compile(None, None, **options)
        self.optimizers = [d_optimizer, g_optimizer]

    @property
    def both(self):
        return self.optimizers


def played(
    policy,
    d_optimizer,
    g_optimizer,
    scaled="true",
    tapes="two tapes",
    way="fit",
    cls=Gan,
    **how,
):
    """Lets two players play; returns the losses of both, step by step, and the game."""
    keras.utils.set_random_seed(4)
    with tfamp.scope(policy):
        gan = cls(scaled, tapes)
    gan.compile(d_optimizer, g_optimizer, **{"jit_compile": False, **how})
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
    return [*steps["critic"], *steps["generator"]], gan


TAPES = ("two tapes", "one tape")
OTHERS = {
    "plain": sgd,
    "ours": lambda: tfamp.LossScaleOptimizer(sgd()),
}


@pytest.fixture(scope="module")
def float32_game():
    found, _ = played("float32", sgd(), sgd(), way="eager loop")
    assert found[4] < 0.9 * found[0]
    return found


@pytest.mark.quick("plain-scale_loss-two tapes-*", "ours-scale_loss-one tape-*")
@pytest.mark.parametrize("way", ["fit", "eager loop", "graph loop"])
@pytest.mark.parametrize("tapes", TAPES)
@pytest.mark.parametrize("scaled", ["scale_loss", "true"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_gan_of_which_one_player_has_the_wrapper_of_keras(
    other, scaled, tapes, way, float32_game
):
    stock, second = wrapped(sgd()), OTHERS[other]()
    found, _ = played("mixed_float16", stock, second, scaled, tapes, way)
    assert found == pytest.approx(float32_game, rel=TOLERANCE)


@pytest.mark.quick("Gan-graph")
@pytest.mark.parametrize("mode", COMPILED)
@pytest.mark.parametrize("cls", [Gan, InAList])
def test_each_player_gets_a_scale_of_its_own(cls, mode, float32_game):
    found, gan = played("mixed_float16", sgd(), sgd(), cls=cls, **COMPILED[mode])
    assert found == pytest.approx(float32_game, rel=TOLERANCE)
    one, other = gan.both
    assert one is not other
    for each in (one, other):
        assert isinstance(each, tfamp.LossScaleOptimizer)
        assert isinstance(each.inner_optimizer, keras.optimizers.SGD)
        assert each.applied_steps == 5


# --- the same optimizer under two names -------------------------------------------


def test_the_wrapper_given_to_compile_scales_and_applies_as_the_models_own(exact):
    model, optimizer = network(), wrapped(sgd())
    model.compile(optimizer, "mse")
    for step in range(5):
        first, second = optimizer, model.optimizer
        if step % 2:
            first, second = second, first
        _, gradients = gradients_of(model, scale=first.scale_loss)
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
    step = trainer(model, optimizer, decorate, LOSSES[name](optimizer))
    step(1.0)
    state = [*model.variables, *optimizer.inner_optimizer.variables]
    before = [v.numpy() for v in state]
    step(1e30)
    assert_close(state, before)
    assert float(optimizer.dynamic_scale) == 512.0
    step(1.0)
    assert int(optimizer.iterations) == 2


@pytest.mark.quick("<lambda>-scaled")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("decorate", [DECORATORS["eager"], DECORATORS["graph"]])
def test_on_replicas(decorate, name, exact):
    strategy = two_replicas()
    with strategy.scope():
        model, optimizer = network(), wrapped(sgd())
        optimizer.build(model.trainable_variables)
    step = replica_trainer(
        strategy, model, optimizer, decorate, LOSSES[name](optimizer)
    )
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
            kept.compile("sgd", "mse")
        if beside == "has trained":
            kept.fit(x, y, batch_size=32, verbose=0)
        keras.config.set_dtype_policy("mixed_float16")
        keras.utils.set_random_seed(2)
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(1)]
        )
        optimizer = wrapped(sgd())
        for scale in (optimizer.scale_loss, lambda loss: loss) * 2:
            _, gradients = gradients_of(model, scale=scale)
            optimizer.apply(gradients, model.trainable_variables)
        found.append(model.get_weights())
        keras.config.set_dtype_policy("float32")
    assert_close(*found)
