"""`tfamp.triage`: why a step failed, where, and what to do about it."""

import inspect
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import STYLES, Own, assembled
from tfamp import Triage, triage

# As an error the cast would be one of float16, for which a layer is kept in float32.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
]
L, ops = keras.layers, keras.ops
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 16)
TARGETS = RNG.normal(size=(16, 1)).astype(np.float32)
LOSS = "sparse_categorical_crossentropy"


class OwnStep(keras.Sequential):
    """A model with a train step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        return {"own": loss}


def parts(*middle):
    return [
        L.Dense(8, activation="relu", name="first"),
        *middle,
        L.Dense(3, activation="softmax", name="head"),
    ]


def made(layers, style="sequential", *, policy="float32", optimizer="adam", **options):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy, **options):
        layers = layers()
        if style == "own step":
            model = OwnStep([keras.Input((4,)), *layers])
        else:
            model = assembled(layers, style, (4,))
        model.compile(optimizer, LOSS)
    return model


def regressor(*layers, loss="mse", optimizer="sgd", policy="float32"):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        model = keras.Sequential([keras.Input((4,)), *(layer() for layer in layers)])
    model.compile(optimizer, loss)
    return model


WAYS = (*STYLES, "own step")


def test_labels_that_the_loss_ignores_are_no_bad_labels():
    model = made(parts)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(ignore_class=-1))
    labels = np.where(np.arange(16) % 4, Y, -1)
    assert triage(model, (X, labels)).cause == "none"
    labels[1] = -2
    assert triage(model, (X, labels)).cause == "data"


def root():
    # Half of what the first layer gives is 0, where the slope of a root is inf.
    return parts(Own(tf.sqrt, name="root"))


@pytest.mark.quick("subclassed")
@pytest.mark.parametrize("style", WAYS)
def test_a_root_at_zero_is_the_models_fault(style):
    found = triage(made(root, style, policy="mixed_float16"), (X, Y))
    prefix = "inner/" if style == "nested" else ""
    assert (found.cause, found.layer) == ("model", f"{prefix}root")
    assert "on the way backward" in found.evidence[0]
    _, line = inspect.getsourcelines(Own.call)
    assert found.source == f"{inspect.getsourcefile(Own)}:{line}"


def test_an_update_that_throws_the_loss_up_accuses_the_learning_rate():
    falling = keras.optimizers.schedules.CosineDecay(1e4, 100)
    optimizer = keras.optimizers.SGD(falling)
    model = made(parts, policy="mixed_float16", optimizer=optimizer)
    before = [variable.numpy() for variable in model.variables]
    found = triage(model, (X, Y))
    assert (found.cause, found.rate_factor) == ("learning rate", 0.1)
    assert found.evidence[0].startswith("One update takes the loss from 1.")
    twin = made(parts, optimizer=keras.optimizers.SGD(1e3))
    twin.train_on_batch(X, Y)
    after = float(twin.evaluate(X, Y, verbose=0))
    assert "cut the learning rate from 1e+04 to 1e+03 or less, at which" in found.remedy
    told = re.search(r"one update takes the loss to (\S+);", found.remedy)
    assert float(told.group(1)) == pytest.approx(after, rel=1e-2)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def zeros():
    return L.Dense(1, kernel_initializer="zeros")


def shifted(start):
    """Returns a loss that is `start` for a model that gives 0."""
    shift = start - float(np.mean(np.square(TARGETS)))
    return lambda y, y_pred: keras.losses.mean_squared_error(y, y_pred) + shift


def exponential(y, y_pred):
    return -ops.mean(ops.exp(y_pred))


def critic(y, y_pred):
    return -ops.mean(y_pred) - 1


# Loss, learning rate, and whether an update is one that leaves.
BELOW_ZERO = {
    "up through 0": (shifted(-0.05), 2.0, False),
    "down": (shifted(-0.05), 0.01, False),
    "exponential": (exponential, 0.1, False),
    "to -8": (critic, 5.0, False),
    "far up": (shifted(-5.0), 1e3, True),
    "to -inf": (exponential, 1e3, True),
    "far down": (critic, 1e6, True),
}


@pytest.mark.parametrize("loss, rate, leaves", BELOW_ZERO.values(), ids=BELOW_ZERO)
def test_a_loss_below_zero_blames_a_learning_rate_that_leaves(loss, rate, leaves):
    model = regressor(zeros, loss=loss, optimizer=keras.optimizers.SGD(rate))
    found = triage(model, (X, TARGETS))
    assert found.cause == ("learning rate" if leaves else "none")
    assert not leaves or found.evidence[0].startswith("One update takes the loss from")


def test_an_epsilon_of_zero_accuses_the_optimizer():
    model = made(parts, optimizer=keras.optimizers.Adam(epsilon=0.0))
    found = triage(model, (np.zeros_like(X), Y))
    assert found.cause == "optimizer"
    assert found.evidence[0].startswith("Loss and gradients are finite, and the update")


def huge():
    return parts(L.Rescaling(1e5, name="huge"), L.LayerNormalization(name="norm"))


@pytest.mark.quick("own step")
@pytest.mark.parametrize("style", WAYS)
def test_a_layer_that_float16_cannot_hold_is_named(style):
    found = triage(made(huge, style, policy="mixed_float16"), (X, Y))
    prefix = "inner/" if style == "nested" else ""
    assert (found.cause, found.layer) == ("precision", f"{prefix}huge")
    assert Triage.from_json(found.to_json()) == found
    lines = str(found).splitlines()
    assert lines[0] == f"{found.model}: the cause is precision, layer '{prefix}huge'"
    assert max(map(len, lines)) <= 110
    assert "; float16 holds 65504." in found.evidence[1]
    assert found.remedy == (f"Keep them in float32: `keep_float32=['{prefix}huge']`.")


@pytest.mark.quick("sequential")
@pytest.mark.parametrize("style", WAYS)
def test_the_layer_that_takes_huge_numbers_is_named_with_the_one_that_makes_them(style):
    """What a layer in float32 hands over is bad only in the hands of the next one."""
    middle = lambda: [L.Rescaling(1e6, name="huge"), L.Rescaling(1e-6, name="back")]  # noqa: E731
    model = made(lambda: parts(*middle()), style, policy="mixed_float16")
    found = triage(model, (X, Y))
    prefix = "inner/" if style == "nested" else ""
    assert found.cause == "precision"
    assert found.layers == (f"{prefix}huge", f"{prefix}back")
    keep = f"['{prefix}huge', '{prefix}back']"
    assert found.remedy == f"Keep them in float32: `keep_float32={keep}`."


def test_operations_are_named_with_a_remedy_that_can_be_followed():
    """`keep_float32` takes layers only."""
    keras.utils.set_random_seed(0)
    with tfamp.scope("mixed_float16"):
        x = keras.Input((4,))
        h = L.Dense(8, name="first")(x) * 1e6 * 1e-6
        model = keras.Model(x, L.Dense(3, activation="softmax", name="head")(h))
        model.compile("adam", LOSS)
    first, second = (o.name for o in model.operations if type(o).__name__ == "Multiply")
    found = triage(model, (X, Y))
    assert (found.cause, found.layers) == ("precision", (first, second))
    assert found.remedy == (
        f"Operations of a Functional graph have no dtype: put {first!r}, {second!r} "
        "into a layer of your own and make that with `dtype='float32'`."
    )
    assert found.remedy in tfamp.sensitivity(model, (X, Y)).advice


class Masked(L.Layer):
    """Weighs its inputs by a softmax, of which a mask leaves some out."""

    def __init__(self, then):
        super().__init__()
        mask = lambda x: tf.where(tf.range(4) < 3, x, tf.constant(-np.inf, x.dtype))  # noqa: E731
        self.mask, self.softmax = Own(mask, name="mask"), L.Softmax(name="weights")
        self.then = then

    def call(self, x):
        return self.then(self.softmax(self.mask(x)))


def test_a_mask_of_infinities_is_not_to_blame():
    bad = Own(lambda x: tf.math.log(x - x), name="bad")
    model = regressor(lambda: Masked(bad), lambda: L.Dense(1))
    found = triage(model, (X, TARGETS))
    assert (found.cause, found.layer.rpartition("/")[2]) == ("model", "bad")
    bad = lambda: Own(lambda x: x * 1e6 / 1e6, name="bad")  # noqa: E731
    identity = lambda: Masked(L.Activation("linear"))  # noqa: E731
    model = regressor(identity, bad, lambda: L.Dense(1), policy="mixed_float16")
    found = triage(model, (X, TARGETS))
    assert found.cause == "precision" and "bad" in found.layer


def test_a_bundle_is_as_good_as_its_batch(tmp_path):
    # Without a ReLU, which would hide the bad number from the loss.
    model = made(lambda: [L.Dense(3, activation="softmax", name="head")])
    x, y = np.tile(X, (3, 1)), np.tile(Y, 3)
    x[20] = np.inf
    recovery = tfamp.callbacks.NanRecovery(tmp_path)
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=[recovery], **options)
    (bundle,) = recovery.bundles
    after = [w.copy() for w in model.get_weights()]
    found = triage(model, bundle)
    assert found.cause == "data"
    assert "`x` holds 4 numbers that are inf or NaN, in 1 of 16" in found.evidence[0]
    for a, b in zip(after, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
