"""`tfamp.triage`: why a step failed, where, what to do; no innocent is accused."""

import inspect
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import STYLES, Own, assembled
from tests.wild.fault_cases import CASES
from tests.wild.fault_steps import FAILURES
from tfamp import Triage, triage

# As an error the cast would be one of float16, for which a layer is kept in float32.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
]
L, ops = keras.layers, keras.ops
POLICIES = ("float32", "mixed_float16")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 16)
TARGETS = RNG.normal(size=(16, 1)).astype(np.float32)
ONES = np.ones((16, 1), "float32")
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


def made(layers, style="sequential", *, policy="float32", optimizer="adam"):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        if style == "own step":
            model = OwnStep([keras.Input((4,)), *layers()])
        else:
            model = assembled(layers(), style, (4,))
        model.compile(optimizer, LOSS)
    return model


def regressor(*layers, loss="mse", optimizer="sgd", policy="float32", inputs=None):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        inputs = keras.Input((4,)) if inputs is None else inputs
        model = keras.Sequential([inputs, *(layer() for layer in layers)])
    model.compile(optimizer, loss)
    return model


def dense():
    return L.Dense(1)


def test_the_known_set_is_as_large_as_it_is_said_to_be():
    assert sum(not case.is_healthy for case in CASES) >= 100
    assert sum(case.is_healthy for case in CASES) >= 75
    assert len({case.name for case in CASES}) == len(CASES)
    assert {failure.cause for failure in FAILURES} == {
        *("data", "model", "learning rate", "optimizer"),
        *("loss scale", "precision", "none"),
    }


QUICK = (
    *("NaN in the inputs, float32", "infinity in the inputs, mixed_bfloat16"),
    *("a huge target, float32", "NaN in the weights, float32", "a label out of range"),
    *("root", "share", "growth", "a NaN weight", "SGD explodes", "NaN in a slot"),
    *("a large scale, nested", "cube", "deviation", "healthy, mixed_float16"),
)


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_a_failing_step_is_told_with_its_cause_and_layer(failure):
    found = triage(*failure.build(0))
    assert found.cause == failure.cause
    assert not failure.layer or found.layer == failure.layer


WAYS = (*STYLES, "own step")


@pytest.mark.quick("subclassed")
@pytest.mark.parametrize("style", WAYS)
def test_a_root_at_zero_is_the_models_fault(style):
    # Half of what the first layer gives is 0, where the slope of a root is inf.
    root = lambda: parts(Own(tf.sqrt, name="root"))  # noqa: E731
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
    zeros = lambda: L.Dense(1, kernel_initializer="zeros")  # noqa: E731
    model = regressor(zeros, loss=loss, optimizer=keras.optimizers.SGD(rate))
    found = triage(model, (X, TARGETS))
    assert found.cause == ("learning rate" if leaves else "none")
    assert not leaves or found.evidence[0].startswith("One update takes the loss from")


def test_an_epsilon_of_zero_accuses_the_optimizer():
    model = made(parts, optimizer=keras.optimizers.Adam(epsilon=0.0))
    found = triage(model, (np.zeros_like(X), Y))
    assert found.cause == "optimizer"
    assert found.evidence[0].startswith("Loss and gradients are finite, and the update")


def normed():
    return parts(L.Rescaling(1e5, name="huge"), L.LayerNormalization(name="norm"))


def scaled_back():
    return parts(L.Rescaling(1e6, name="huge"), L.Rescaling(1e-6, name="back"))


# What a layer in float32 hands over is bad only in the hands of the next one.
BEYOND = {"alone": (normed, ("huge",)), "two": (scaled_back, ("huge", "back"))}


@pytest.mark.quick("alone-own step", "two-sequential")
@pytest.mark.parametrize("style", WAYS)
@pytest.mark.parametrize("layers, blamed", BEYOND.values(), ids=BEYOND)
def test_the_layers_that_float16_cannot_hold_are_named(layers, blamed, style):
    found = triage(made(layers, style, policy="mixed_float16"), (X, Y))
    prefix = "inner/" if style == "nested" else ""
    paths = [prefix + each for each in blamed]
    assert (found.cause, found.layers) == ("precision", tuple(paths))
    assert found.remedy == f"Keep them in float32: `keep_float32={paths}`."
    assert Triage.from_json(found.to_json()) == found
    lines = str(found).splitlines()
    assert lines[0].startswith(
        f"{found.model}: the cause is precision, layer '{prefix}"
    )
    assert max(map(len, lines)) <= 110
    assert "; float16 holds 65504." in found.evidence[1]


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
    found = triage(regressor(lambda: Masked(bad), dense), (X, TARGETS))
    assert (found.cause, found.layer.rpartition("/")[2]) == ("model", "bad")
    bad = lambda: Own(lambda x: x * 1e6 / 1e6, name="bad")  # noqa: E731
    identity = lambda: Masked(L.Activation("linear"))  # noqa: E731
    model = regressor(identity, bad, dense, policy="mixed_float16")
    found = triage(model, (X, TARGETS))
    assert found.cause == "precision" and "bad" in found.layer


# --- large weights are no fault by themselves


def ingredients(rows=48, words=4000):
    """Recipes as the ingredients in them, 30 of 4,000 each."""
    x = np.zeros((rows, words), "float32")
    for row in x:
        row[RNG.choice(words, 30, replace=False)] = 1
    return x


def known_cook(*after, policy):
    """A linear model that was trained elsewhere: a weight of size one an ingredient."""
    words = lambda: L.Dense(2, name="ingredients")  # noqa: E731
    model = regressor(words, *after, policy=policy, inputs=keras.Input((4000,)))
    kernel = RNG.normal(size=(4000, 2)).astype("float32")
    model.layers[0].set_weights([kernel, np.zeros(2, "float32")])
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    return model


FAULTS = {"log": ops.log, "quotient": lambda x: x / ops.relu(x)}


@pytest.mark.quick("None-float32", "log-float32")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_large_weights_are_no_fault_and_hide_none(fault, policy):
    faulty = [lambda: Own(FAULTS[fault], name="faulty")] if fault else []
    x, model = ingredients(), known_cook(*faulty, policy=policy)
    y = np.ones((48, 2), "float32") if fault else model.predict(x, verbose=0) + 0.1
    found = triage(model, (x, y))
    told = ("model", "faulty") if fault else ("none", None)
    assert (found.cause, found.layer) == told


# --- numbers of the data that float32 cannot square, labels and ids without a meaning

COLUMN = np.where(np.arange(4) == 2, 1e25 * (1.5 + X), X).astype("float32")
HUGE = {
    "a column": ((COLUMN, TARGETS), "x"),
    "all targets": ((X, TARGETS * np.float32(1e24)), "y"),
    "weights of examples": ((X, TARGETS, ONES[:, 0] * 3e38), "sample_weight"),
}


@pytest.mark.quick("a column")
@pytest.mark.parametrize("batch, name", HUGE.values(), ids=HUGE)
def test_numbers_too_large_for_float32_are_the_datas_fault(batch, name):
    model = regressor(lambda: L.Dense(8), dense, optimizer=keras.optimizers.Adam(1e-3))
    found = triage(model, batch)
    assert (found.cause, found.layer) == ("data", None)
    assert f"`{name}`" in found.evidence[0]


def test_labels_that_the_loss_ignores_are_no_bad_labels():
    model = made(parts)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(ignore_class=-1))
    labels = np.where(np.arange(16) % 4, Y, -1)
    assert triage(model, (X, labels)).cause == "none"
    labels[1] = -2
    assert triage(model, (X, labels)).cause == "data"


class Gathered(L.Layer):
    """Looks its rows up by hand."""

    def build(self, shape):
        self.table = self.add_weight(shape=(10, 4), initializer="uniform")

    def call(self, ids):
        return tf.gather(self.table, ids)


LOOKUPS = {"embedding": lambda: L.Embedding(10, 4), "gather": Gathered}


@pytest.mark.quick("embedding-beyond-float32")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [10, -3], ids=["beyond", "negative"])
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_an_id_without_a_row_is_the_datas_fault(lookup, bad, policy):
    layers = (LOOKUPS[lookup], L.GlobalAveragePooling1D, dense)
    inputs = keras.Input((3,), dtype="int32")
    model = regressor(*layers, policy=policy, inputs=inputs)
    ids = RNG.integers(0, 10, (16, 3)).astype("int32")
    ids[4, 1] = bad
    found = triage(model, (ids, ONES))
    assert found.cause == "data"
    assert str(bad) in found.evidence[0]


def test_ids_are_asked_for_by_a_gpu_that_raises_nothing(monkeypatch):
    """There a row of zeros comes back, and the step is finite."""
    inputs = keras.Input((2,), dtype="int32")
    model = regressor(lambda: L.Embedding(4, 3), L.Flatten, dense, inputs=inputs)
    ids = np.int32([[0, 1], [2, 9]])
    call = L.Embedding.call
    within = lambda self, inputs: call(self, ops.minimum(inputs, 3))  # noqa: E731
    monkeypatch.setattr(L.Embedding, "call", within)
    assert triage(model, (ids, ONES[:2])).cause == "data"


# --- constraints, what is added to the loss, and arithmetic of a train step's own


class Shares(keras.constraints.Constraint):
    """Weights that add up to one, of which none may be negative."""

    def __call__(self, w):
        w = ops.relu(w)
        return w / ops.sum(w)


@pytest.mark.quick("kernel-float32")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", ["kernel", "bias"])
def test_a_constraint_that_divides_by_zero_is_the_layers_fault(where, policy):
    options = {f"{where}_constraint": Shares(), f"{where}_initializer": "zeros"}
    mix = lambda: L.Dense(1, name="mix", **options)  # noqa: E731
    # The first update leaves no weight above 0.
    loss = lambda y, p: ops.mean(p, axis=-1)  # noqa: E731
    model = regressor(lambda: L.Dense(4), mix, loss=loss, policy=policy)
    model.layers[0].set_weights([np.zeros((4, 4)), np.ones(4)])
    found = triage(model, (X, ONES))
    assert (found.cause, found.layer) == ("model", "mix")
    assert "constraint" in found.evidence[0] and "constraint" in found.remedy
    assert "epsilon" not in found.remedy


class Entropy(keras.regularizers.Regularizer):
    def __call__(self, w):
        return ops.sum(w * ops.log(w))  # of weights of either sign


def test_a_regularizer_that_fails_is_told_with_its_layer():
    mix = lambda: L.Dense(4, kernel_regularizer=Entropy(), name="mix")  # noqa: E731
    found = triage(regressor(mix, dense), (X, TARGETS))
    assert (found.cause, found.layer) == ("model", "mix")


class Custom(keras.Model):
    """A train step as in Keras's guides, with a loss that is written in it."""

    def __init__(self, loss):
        super().__init__()
        self.top = L.Dense(4, activation="relu", name="top")
        self.own_loss = loss

    def call(self, x):
        return self.top(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.own_loss(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


LOSSES = {
    "quotient": lambda y, p: tf.reduce_mean(y / p),
    "log of ratio": lambda y, p: tf.reduce_mean(y * tf.math.log(y / p)),
    # Finite, with a slope that is not.
    "distance": lambda y, p: tf.reduce_mean(tf.sqrt(tf.nn.relu(p - 100.0))),
}


@pytest.mark.quick("quotient-float32")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("loss", LOSSES)
def test_arithmetic_of_a_train_step_accuses_no_layer(loss, policy):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        model = Custom(LOSSES[loss])
        model.compile("adam")
    model(X)
    found = triage(model, (X, np.ones((16, 4), "float32")))
    assert (found.cause, found.layer) == ("model", None)
    assert "train_step" in found.evidence[0]
    _, line = inspect.getsourcelines(Custom.train_step)
    assert found.source == f"{inspect.getsourcefile(Custom)}:{line}"
