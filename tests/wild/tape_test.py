"""Training code that knows nothing of loss scales: the tape scales and unscales."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close
from tests.loops import COMPILED, in_each_way, spied
from tests.wild.tiny_losses import (
    TINY,
    TOLERANCE,
    network,
    nothing_of_other_tests,  # noqa: F401 - a fixture of every test
    sgd,
    x,
    y,
)
from tfamp.stepping.eager_step import run_step

layers = keras.layers
MODES = {**COMPILED, "several": {"jit_compile": False, "steps_per_execution": 2}}
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


class Regression(keras.Model):
    """A subclassed model with the train step that guides show."""

    def __init__(self, factor=TINY):
        super().__init__()
        self.hidden = layers.Dense(8, activation="tanh")
        self.out = layers.Dense(1)
        self.factor = factor
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.out(self.hidden(inputs))

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape() as tape:
            error = targets - self(inputs, training=True)
            loss = self.factor * tf.reduce_mean(tf.square(error))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_weights, strict=True)
        )
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result(), "norm": tf.norm(gradients[0])}


def fitted(policy, make=Regression, optimizer=None, data=(x, y), **how):
    keras.utils.set_random_seed(1)
    with tfamp.scope(policy):
        model = make()
        model.compile(optimizer or sgd(), **how)
    history = model.fit(*data, epochs=3, batch_size=32, shuffle=False, verbose=0)
    return model, history.history


@pytest.mark.quick("graph")
@pytest.mark.parametrize("mode", MODES)
def test_an_own_train_step_trains_as_in_float32(mode):
    _, exact = fitted("float32", **MODES[mode])
    model, half = fitted("mixed_float16", **MODES[mode])
    assert half["loss"] == pytest.approx(exact["loss"], rel=TOLERANCE)
    # What the user's code sees is the true gradient.
    assert half["norm"] == pytest.approx(exact["norm"], rel=TOLERANCE)
    assert exact["loss"][-1] < exact["loss"][0] / 2
    assert model.optimizer.applied_steps == 6
    assert model.optimizer.gradient_norm < 1e-5


def sum_of_squares(weight):
    """Half the sum of squares: its gradient is the weight itself."""
    return tf.reduce_sum(tf.square(tf.convert_to_tensor(weight))) / 2


def pair(scale=8.0, **options):
    weight = keras.Variable([1.0, 2.0])
    return weight, tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.5), scale, **options)


@pytest.mark.quick("eager-true", "eager-scaled by hand")
@pytest.mark.parametrize("by_hand", [False, True], ids=["true", "scaled by hand"])
@in_each_way
def test_a_persistent_tape_is_asked_twice(decorate, by_hand):
    first, optimizer = pair()
    second = keras.Variable([4.0])
    optimizer.build([first, second])

    @decorate
    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = sum_of_squares(first) + sum_of_squares(second)
            if by_hand:
                loss = 2 * optimizer.scale_loss(loss) / 2
        seen = tape.gradient(loss, second)
        optimizer.apply(tape.gradient(loss, [first]), [first])
        optimizer.apply(tape.gradient(loss, [second]), [second])
        return seen

    seen = step()
    np.testing.assert_allclose(first, [0.5, 1.0])
    np.testing.assert_allclose(second, [2.0])
    np.testing.assert_allclose(seen, [32.0 if by_hand else 4.0])


class Critic(keras.Model):
    """Learns with a gradient penalty: a tape around a tape."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(8, "tanh"),
                layers.Dense(1, use_bias=False),
            ]
        )

    def call(self, inputs):
        return self.net(inputs)

    def train_step(self, data):
        inputs = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(inputs)
                score = tf.reduce_mean(self(inputs, training=True))
            slopes = 32.0 * inner.gradient(score, inputs)
            norms = tf.norm(slopes, axis=1)
            penalty = tf.reduce_mean(tf.square(norms - 1.0))
        gradients = tape.gradient(penalty, self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_weights, strict=True)
        )
        return {"penalty": penalty}


@pytest.mark.quick("graph")
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_a_gradient_penalty_trains_as_in_float32(mode):
    how = MODES[mode]
    _, exact = fitted("float32", Critic, keras.optimizers.SGD(0.1), (x,), **how)
    model, half = fitted(
        "mixed_float16", Critic, keras.optimizers.SGD(0.1), (x,), **how
    )
    exact, half = exact["penalty"], half["penalty"]
    assert half == pytest.approx(exact, rel=TOLERANCE)
    assert exact[-1] < 0.9 * exact[0]
    assert model.optimizer.skipped_steps == 0


class Adversarial(Regression):
    """Learns from examples moved along the gradient of a tiny loss."""

    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = TINY * tf.reduce_mean(tf.square(targets - self(inputs)))
        moved = inputs + 0.1 * tf.sign(tape.gradient(loss, inputs))
        logs = super().train_step((moved, targets))
        return {**logs, "moved": tf.reduce_mean(tf.abs(moved - inputs))}


@pytest.mark.quick("graph")
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_adversarial_examples_of_a_tiny_loss(mode):
    _, exact = fitted("float32", Adversarial, **MODES[mode])
    _, half = fitted("mixed_float16", Adversarial, **MODES[mode])
    assert half["moved"] == pytest.approx([0.1] * 3, rel=TOLERANCE)
    assert half["loss"] == pytest.approx(exact["loss"], rel=0.05)


@pytest.mark.quick("eager")
@in_each_way
def test_clipping_by_value_hides_no_overflow(decorate):
    weight, optimizer = pair(2.0**10)
    optimizer.build([weight])

    @decorate
    def step():
        with tf.GradientTape() as tape:  # its gradient overflows above a scale of 64
            half = tf.cast(weight.value, "float16") * tf.constant(1000.0, "float16")
            loss = tf.reduce_sum(tf.cast(half, "float32"))
        gradient = tape.gradient(loss, weight)
        optimizer.apply_gradients([(tf.clip_by_value(gradient, -1.0, 1.0), weight)])

    for _ in range(4):
        step()
    assert optimizer.skipped_steps == 4
    np.testing.assert_allclose(weight, [1.0, 2.0])
    step()  # at 64
    assert (optimizer.applied_steps, optimizer.scale) == (1, 64.0)
    np.testing.assert_allclose(weight, [0.5, 1.5])


@pytest.mark.quick("scaled by hand")
@pytest.mark.parametrize("by_hand", [True, False], ids=["scaled by hand", "true"])
def test_tools_that_run_a_step_scale_it_once(by_hand):
    class Step(Regression):
        def train_step(self, data):
            inputs, targets = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self(inputs) - targets)
                if by_hand:
                    loss = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            return {"sum": loss}

    seen = []

    with tfamp.scope("mixed_float16"):
        model = Step()
    model.compile(keras.optimizers.SGD())
    model.fit(x, y, batch_size=64, verbose=0)
    before = model.get_weights()
    model.out.activation = spied(seen)
    step = run_step(model, (tf.constant(x[:2]), tf.constant(y[:2])), loss_scale=8.0)
    assert float(tf.reduce_max(seen)) == 8.0
    bias = next(g for v, g in step.gradients if v is model.out.bias)
    np.testing.assert_allclose(bias, [2.0])
    assert_close(before, model)


def plain_loop(model, optimizer):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)


class ByHand:
    """Updates variables past all optimizers of Keras."""

    def apply(self, gradients, variables):
        for gradient, variable in zip(gradients, variables, strict=True):
            variable.assign_sub(0.01 * gradient)


def test_a_loop_without_any_scale_is_told_once():
    model, optimizer = network("mixed_float16"), ByHand()
    plain_loop(model, optimizer)  # which may make an optimizer known
    with pytest.warns(UserWarning, match="computed with no loss scale") as caught:
        plain_loop(model, optimizer)
    plain_loop(model, optimizer)
    assert len(caught) == 1
    assert caught[0].filename == __file__
