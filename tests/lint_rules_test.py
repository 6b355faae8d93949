"""Each rule of the linter fires on stock Keras and is silent where nothing is wrong."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import Own, stock_policy
from tfamp import lint

L, K = keras.layers, keras.optimizers
pytestmark = [
    pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow"),
    # NumPy's, where a test writes a constant that float16 cannot hold.
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]


def sequential(*layers, shape=(16,), dtype="float32", **compiling):
    """Returns a model of these layers, compiled."""
    model = keras.Sequential([keras.Input(shape, dtype=dtype), *layers])
    options = {"optimizer": "adam", "loss": "mse", **compiling}
    model.compile(**options)
    return model


def head(units=8):
    return L.Dense(units, dtype="float32", name="head")


def batch(*shape, size=8):
    """Returns (x, y) of seeded normal numbers."""
    x = np.random.default_rng(0).normal(size=(size, *shape)).astype("float32")
    return x, np.zeros((size, 8), "float32")


def places(model, rule, **kwargs):
    """Returns [(severity, layer)] of what one rule finds."""
    found = lint(model, **kwargs)
    assert rule in found.rules, found.skipped
    return [(each.severity, each.layer) for each in found.of(rule=rule)]


class Masked(L.Layer):
    """Adds (1 - mask) * constant to scores."""

    def __init__(self, constant, **kwargs):
        super().__init__(**kwargs)
        self.constant = constant

    def call(self, x):
        mask = keras.ops.cast(x > 0, x.dtype)
        return keras.ops.softmax(x + (1 - mask) * self.constant)


class Chosen(Masked):
    """Puts a constant where a mask is false."""

    def call(self, x):
        return keras.ops.softmax(keras.ops.where(x > 0, x, self.constant))


def soft(**options):
    return L.Dense(8, activation="softmax", name="out", **options)


def own(function):
    return lambda: [L.Dense(8), Own(function, name="own"), head()]


F16, BF16 = "mixed_float16", "mixed_bfloat16"
OUT, OWN = [("error", "out")], [("warning", "own")]
ROWS = {
    "softmax": ("half-head", F16, lambda: [soft()], OUT),
    "sigmoid": ("half-head", BF16, lambda: [L.Dense(8, "sigmoid", name="out")], OUT),
    "layer": ("half-head", F16, lambda: [L.Dense(8), L.Softmax(name="out")], OUT),
    "linear": ("half-head", BF16, lambda: [L.Dense(8, name="own")], OWN),
    "cast afterwards": (
        "half-head",
        F16,
        lambda: [soft(), L.Activation("linear", dtype="float32")],
        OUT,
    ),
    "float32 head": ("half-head", F16, lambda: [L.Dense(8), head()], []),
    "logits cast": (
        "half-head",
        F16,
        lambda: [L.Dense(8), L.Activation("softmax", dtype="float32")],
        [],
    ),
    "weights": ("half-weights", "bfloat16", lambda: [L.Dense(8, name="out")], OUT),
    "frozen": ("half-weights", "float16", lambda: [L.Dense(8, trainable=False)], []),
    "mixed": ("half-weights", BF16, lambda: [L.Dense(8)], []),
    "factor": ("constant-range", F16, lambda: [Masked(-1e9, name="out")], OUT),
    "chosen": ("constant-range", F16, lambda: [Chosen(-1e9, name="own")], OWN),
    "small factor": ("constant-range", F16, lambda: [Masked(-3e4)], []),
    "in bfloat16": ("constant-range", BF16, lambda: [Masked(-1e9)], []),
    "cast": (
        "constant-range",
        F16,
        own(lambda x: x + tf.cast(tf.constant(-1e9, "float32"), x.dtype)),
        OWN,
    ),
    "product cast": (
        "constant-range",
        F16,
        own(lambda x: x + tf.cast(tf.cast(x > 0, "float32") * -1e9, x.dtype)),
        OWN,
    ),
    # The limit of 1 / 1e-12 that a norm has.
    "normalize": ("constant-range", F16, own(keras.ops.normalize), []),
    "norm": (
        "constant-range",
        F16,
        own(lambda x: x / keras.ops.norm(x, axis=-1, keepdims=True)),
        [],
    ),
    "table": (
        "constant-range",
        F16,
        own(lambda x: x * tf.constant([1e9] * 8, x.dtype)),
        [("error", "own")],
    ),
}


@pytest.mark.parametrize("rule, policy, layers, expected", ROWS.values(), ids=ROWS)
def test_a_rule_finds_what_it_should_in_a_stack(rule, policy, layers, expected):
    with stock_policy(policy):
        model = sequential(*layers())
    assert places(model, rule) == expected


def test_half_head_finds_each_output_of_a_subclassed_model():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = L.Dense(4, activation="sigmoid", name="first")
            self.second = L.Dense(4, name="second")

        def call(self, x):
            second = keras.ops.reshape(self.second(x), (-1, 2, 2))
            return {"a": self.first(x), "b": second, "c": x[:, 0] > 0}

    with stock_policy("mixed_bfloat16"):
        model = Two()
    assert places(model, "half-head", data=batch(16)) == [
        ("error", "first"),
        ("warning", "second"),
    ]


def test_half_loss_reads_the_dtype_of_losses():
    loss = {"a": keras.losses.MeanSquaredError(dtype="bfloat16", name="low")}
    model = sequential(head())
    found = lint(model, loss=loss).of(rule="half-loss")
    assert [(each.severity, each.layer) for each in found] == [("error", None)]
    assert "'low' is computed in bfloat16" in found[0].message
    assert places(model, "half-loss", loss=keras.losses.MeanSquaredError()) == []
    keras.config.set_floatx("float16")
    try:
        assert places(model, "half-loss") == [("error", None)]
    finally:
        keras.config.set_floatx("float32")


def test_constant_range_lets_keras_masks_be():
    with stock_policy("mixed_float16"):
        tokens = keras.Input((4,), dtype="int32")
        h = L.Embedding(16, 8, mask_zero=True)(tokens)
        h = L.MultiHeadAttention(2, 4, dropout=0.1)(h, h)
        h = L.GlobalAveragePooling1D()(L.LSTM(8, return_sequences=True)(h))
        attention = keras.Model(tokens, head()(h))
    assert places(attention, "constant-range") == []


def test_a_mask_beyond_the_range_gives_nan_as_the_rule_says():
    x = np.array([[1.0, -1.0]], "float32")
    assert np.isnan(Masked(-1e9, dtype="float16")(x)).any()
    assert not np.isnan(Masked(-1e9, dtype="float32")(x)).any()


def test_late_policy_names_layers_made_before_it():
    early = [L.Dense(8, name="early"), L.Dense(8, name="earlier")]
    with tfamp.scope("mixed_bfloat16"):
        model = sequential(*early, L.Dense(8, name="on_time"), L.LayerNormalization())
        (found,) = lint(model).of(rule="late-policy")
    assert (found.severity, found.layer, found.figure) == ("warning", "early", 2)
    assert "'early' and 'earlier'" in found.message
    assert places(sequential(L.Dense(8), head()), "late-policy") == []


def trained(optimizer, dtype, gradient):
    """Returns a weight of 1 after an update by stock Keras."""
    variable = keras.Variable([1.0], dtype=dtype)
    optimizer.build([variable])
    optimizer.apply([tf.fill([1], tf.cast(gradient, dtype))])
    return float(variable.value[0])


def test_stock_optimizers_lose_what_the_rule_says():
    # sqrt(1 - 1**t) is 0, and so is every update.
    assert trained(K.Adam(0.1), "bfloat16", 1.0) == 1.0
    # Lion's update is the rate itself; below 1 bfloat16 lies 2**-8 apart.
    assert trained(K.Lion(2.0**-9), "bfloat16", 1.0) == 1.0
    assert np.isnan(trained(K.Adafactor(0.1), "float16", 0.0))


LOST = {
    "beta_2": ("bfloat16", K.Adam, {}, "`beta_2=0.999` of 'mine' is 1"),
    "momentum": ("bfloat16", K.SGD, {"momentum": 0.999}, "`momentum=0.999` of 'mine'"),
    "epsilon": ("float16", K.Adam, {"epsilon": 1e-8}, "`epsilon=1e-08` of 'mine' is 0"),
    "epsilon_1": ("float16", K.Adafactor, {}, "`epsilon_1=1e-30` of 'mine' is 0"),
}


@pytest.mark.parametrize("dtype, kind, options, message", LOST.values(), ids=LOST)
def test_what_an_optimizer_loses_is_an_error(dtype, kind, options, message):
    optimizer = kind(0.1, name="mine", **options)
    for policy, places_of in ((dtype, [("error", "low")]), (f"mixed_{dtype}", [])):
        with stock_policy(policy):
            model = sequential(L.Dense(8, name="low"), head(), optimizer=optimizer)
        found = lint(model).of(rule="half-weights")
        assert [(each.severity, each.layer) for each in found] == places_of
        assert not found or message in found[0].message


@pytest.fixture
def distribution():
    """A distribution of Keras's own; making one fails with Keras 3.10."""
    try:
        made = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    except AttributeError:
        pytest.skip("this Keras cannot make one on TensorFlow")
    keras.distribution.set_distribution(made)
    yield made
    keras.distribution.set_distribution(None)


@pytest.mark.parametrize("where", ["enable", "fit"])
def test_enable_and_fit_warn_of_a_distribution_once(distribution, where):
    message = "`keras.distribution` is set to DataParallel, which Keras does not follow"
    if where == "enable":
        with pytest.warns(UserWarning, match=message), tfamp.scope("float32"):
            pass
        with tfamp.scope("float32"):
            return
    keras.distribution.set_distribution(None)
    with tfamp.scope("mixed_bfloat16"):
        model = sequential(head(), shape=(4,))
    keras.distribution.set_distribution(distribution)
    x, y = np.ones((2, 4), "float32"), np.ones((2, 8), "float32")
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.warns(UserWarning, match=message):
        model.fit(x, y, verbose=0)
    model.fit(x, y, verbose=0)
