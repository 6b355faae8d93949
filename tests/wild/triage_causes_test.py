"""`tfamp.triage` on programs as people write them: no innocent part is accused."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfamp

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
POLICIES = ("float32", "mixed_float16")
RNG = np.random.default_rng(3)


def ingredients(rows=48, words=4000):
    """Recipes as the ingredients in them, 30 of 4,000 each."""
    x = np.zeros((rows, words), "float32")
    for row in x:
        row[RNG.choice(words, 30, replace=False)] = 1
    return x


def known_cook(*after, policy="float32", optimizer=None, spread=1.0):
    """A linear model that was trained elsewhere: a weight of size one an ingredient."""
    with tfamp.scope(policy):
        words = layers.Dense(2, name="ingredients")
        parts = [keras.Input((4000,)), words, *after]
        model = keras.Sequential(parts)
        model.compile(optimizer or keras.optimizers.Adam(1e-3), "mse")
    kernel = spread * RNG.normal(size=(4000, 2))
    words.set_weights([kernel.astype("float32"), np.zeros(2, "float32")])
    return model


class Own(layers.Layer):
    """A layer of somebody's."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, x):
        return self.function(x)


# --- large weights are no fault by themselves


@pytest.mark.quick("float32")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_healthy_model_with_large_weights_is_accused_of_nothing(policy):
    x = ingredients()
    model = known_cook(policy=policy)
    found = tfamp.triage(model, (x, model.predict(x, verbose=0) + 0.1))
    assert (found.cause, found.layer) == ("none", None)


FAULTS = {
    "log": lambda x: ops.log(x),
    "quotient": lambda x: x / ops.relu(x),
}


@pytest.mark.quick("log-float32")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_model_is_found_behind_large_weights(fault, policy):
    model = known_cook(Own(FAULTS[fault], name="faulty"), policy=policy)
    found = tfamp.triage(model, (ingredients(), np.ones((48, 2), "float32")))
    assert (found.cause, found.layer) == ("model", "faulty")


# --- numbers of the data that float32 cannot square


def regression(loss="mse", width=5):
    keras.utils.set_random_seed(4)
    hidden = [layers.Dense(8), layers.Dense(1)]
    model = keras.Sequential([keras.Input((width,)), *hidden])
    model.compile(keras.optimizers.Adam(1e-3), loss)
    return model


def features():
    x = RNG.normal(size=(32, 5)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def a_column(x, y):
    x[:, 2] = 1e25 * (1 + RNG.random(32))
    return x, y


def all_targets(x, y):
    return x, y * np.float32(1e24)


def weights_of_examples(x, y):
    return x, y, np.full(32, 3e38, "float32")


HUGE = {
    "a column": (a_column, "x"),
    "all targets": (all_targets, "y"),
    "weights of examples": (weights_of_examples, "sample_weight"),
}


@pytest.mark.quick("a column")
@pytest.mark.parametrize("case", HUGE)
def test_numbers_too_large_for_float32_are_the_datas_fault(case):
    spoil, name = HUGE[case]
    found = tfamp.triage(regression(), spoil(*features()))
    assert (found.cause, found.layer) == ("data", None)
    assert f"`{name}`" in found.evidence[0]


# --- ids and labels that nothing stands for


class Taken(layers.Layer):
    """Looks its rows up by hand."""

    def build(self, shape):
        self.table = self.add_weight(shape=(10, 4), initializer="uniform")

    def call(self, ids):
        return ops.take(self.table, ids, axis=0)


class Gathered(Taken):
    def call(self, ids):
        return tf.gather(self.table, ids)


LOOKUPS = {
    "embedding": lambda: layers.Embedding(10, 4, name="items"),
    "gather": lambda: Gathered(name="items"),
}


@pytest.mark.quick("embedding-beyond-float32")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [10, -3], ids=["beyond", "negative"])
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_an_id_without_a_row_is_the_datas_fault(lookup, bad, policy):
    with tfamp.scope(policy):
        parts = [LOOKUPS[lookup](), layers.GlobalAveragePooling1D(), layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *parts])
        model.compile("adam", "mse")
    ids = RNG.integers(0, 10, (16, 3)).astype("int32")
    ids[4, 1] = bad
    found = tfamp.triage(model, (ids, np.ones((16, 1), "float32")))
    assert found.cause == "data"
    assert str(bad) in found.evidence[0]


# --- constraints, and what is added to the loss


class Shares(keras.constraints.Constraint):
    """Weights that add up to one, of which none may be negative."""

    def __call__(self, w):
        w = ops.relu(w)
        return w / ops.sum(w)


def constrained(where, policy="float32"):
    with tfamp.scope(policy):
        options = {f"{where}_constraint": Shares(), f"{where}_initializer": "zeros"}
        mix = layers.Dense(1, name="mix", **options)
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4), mix])
        # The first update leaves no weight above 0.
        model.compile(keras.optimizers.SGD(1e-3), lambda y, p: ops.mean(p, axis=-1))
        model.layers[0].set_weights([np.zeros((5, 4)), np.ones(4)])
    return model


@pytest.mark.quick("kernel-float32")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", ["kernel", "bias"])
def test_a_constraint_that_divides_by_zero_is_the_layers_fault(where, policy):
    x = features()[0]
    found = tfamp.triage(constrained(where, policy), (x, np.ones((32, 1), "float32")))
    assert (found.cause, found.layer) == ("model", "mix")
    assert "constraint" in found.evidence[0] and "constraint" in found.remedy
    assert "epsilon" not in found.remedy


class Entropy(keras.regularizers.Regularizer):
    def __call__(self, w):
        return ops.sum(w * ops.log(w))  # of weights of either sign


def test_a_regularizer_that_fails_is_told_with_its_layer():
    parts = [layers.Dense(4, kernel_regularizer=Entropy(), name="mix"), layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *parts])
    model.compile("adam", "mse")
    found = tfamp.triage(model, features())
    assert (found.cause, found.layer) == ("model", "mix")


# --- arithmetic of a train step's, or of a model's own


class Custom(keras.Model):
    """A train step as in Keras's guides, with a loss that is written in it."""

    def __init__(self, loss, **options):
        super().__init__(**options)
        self.hidden = layers.Dense(4, activation="relu", name="hidden")
        self.top = layers.Dense(4, activation="relu", name="top")
        self.own_loss = loss

    def call(self, x):
        return self.top(self.hidden(x))

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
    x = features()[0]
    model(x)
    found = tfamp.triage(model, (x, np.ones((32, 4), "float32")))
    assert (found.cause, found.layer) == ("model", None)
    assert "train_step" in found.evidence[0]
    _, line = inspect.getsourcelines(Custom.train_step)
    assert found.source == f"{inspect.getsourcefile(Custom)}:{line}"


def test_ids_are_asked_for_by_a_gpu_that_raises_nothing(monkeypatch):
    """There a row of zeros comes back, and the step is finite."""
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), layers.Embedding(4, 3), layers.Flatten()]
    )
    model.add(layers.Dense(1))
    model.compile("adam", "mse")
    ids = np.int32([[0, 1], [2, 9]])
    call = layers.Embedding.call
    within = lambda self, inputs: call(self, ops.minimum(inputs, 3))  # noqa: E731
    monkeypatch.setattr(layers.Embedding, "call", within)
    assert tfamp.triage(model, (ids, np.ones((2, 1), "float32"))).cause == "data"
