"""Lint: each rule fires on stock Keras, healthy models pass, and nothing changes."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.refusals import refusals
from tests.styles import stock_policy
from tfamp import lint
from tfamp.numerics.lint import RULE_IDS

L, K = keras.layers, keras.optimizers
DOCUMENTATION = Path(__file__).parents[1] / "docs" / "lint.md"
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


def sequential(*layers, shape=(16,), **compiling):
    """Returns a model of these layers, compiled."""
    model = keras.Sequential([keras.Input(shape), *layers])
    model.compile(**{"optimizer": "adam", "loss": "mse", **compiling})
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


def soft():
    return L.Dense(8, activation="softmax", name="out")


def dense():
    return L.Dense(8, name="out")


def cast(activation):
    return L.Activation(activation, dtype="float32")


F16, BF16 = "mixed_float16", "mixed_bfloat16"
OUT = [("error", "out")]
ROWS = {
    "softmax": ("half-head", F16, lambda: [soft()], OUT),
    "sigmoid": ("half-head", BF16, lambda: [L.Dense(8, "sigmoid", name="out")], OUT),
    "layer": ("half-head", F16, lambda: [L.Dense(8), L.Softmax(name="out")], OUT),
    "linear": ("half-head", BF16, lambda: [dense()], [("warning", "out")]),
    "cast afterwards": ("half-head", F16, lambda: [soft(), cast("linear")], OUT),
    "float32 head": ("half-head", F16, lambda: [L.Dense(8), head()], []),
    "logits cast": ("half-head", F16, lambda: [L.Dense(8), cast("softmax")], []),
    "weights": ("half-weights", "bfloat16", lambda: [dense()], OUT),
    "frozen": ("half-weights", "float16", lambda: [L.Dense(8, trainable=False)], []),
    "mixed": ("half-weights", BF16, lambda: [L.Dense(8)], []),
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
    keras.config.set_floatx("float16")
    try:
        assert places(model, "half-loss") == [("error", None)]
    finally:
        keras.config.set_floatx("float32")


def test_late_policy_names_layers_made_before_it():
    early = [L.Dense(8, name="early"), L.Dense(8, name="earlier")]
    with tfamp.scope("mixed_bfloat16"):
        model = sequential(*early, L.Dense(8, name="on_time"), L.LayerNormalization())
        (found,) = lint(model).of(rule="late-policy")
    assert (found.severity, found.layer, found.figure) == ("warning", "early", 2)
    assert "'early' and 'earlier'" in found.message


def trained(optimizer, dtype, gradient):
    """Returns a weight of 1 after an update by stock Keras."""
    variable = keras.Variable([1.0], dtype=dtype)
    optimizer.build([variable])
    optimizer.apply([tf.fill([1], tf.cast(gradient, dtype))])
    return float(variable.value[0])


def test_stock_optimizers_lose_what_the_rule_says():
    # sqrt(1 - 1**t) is 0, and so is every update.
    assert trained(K.Adam(0.1), "bfloat16", 1.0) == 1.0
    assert np.isnan(trained(K.Adafactor(0.1), "float16", 0.0))


LOST = {
    "beta_2": ("bfloat16", K.Adam, {}, "`beta_2=0.999` of 'mine' is 1"),
    "momentum": ("bfloat16", K.SGD, {"momentum": 0.999}, "`momentum=0.999` of 'mine'"),
    "epsilon": ("float16", K.Adam, {"epsilon": 1e-8}, "`epsilon=1e-08` of 'mine' is 0"),
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


def mlp():
    hidden = [L.Dense(16, activation="relu"), L.BatchNormalization(), L.Dropout(0.1)]
    return sequential(*hidden, L.Dense(8, activation="softmax", name="head"))


def transformer():
    x = keras.Input((8,), dtype="int32")
    h = L.Embedding(64, 16, mask_zero=True)(x)
    inner = L.MultiHeadAttention(2, 8, dropout=0.1)(h, h)
    h = L.LayerNormalization(epsilon=1e-12)(L.Add()([h, inner]))
    inner = L.Dense(16)(L.Dense(32, activation="gelu")(h))
    h = L.GlobalAveragePooling1D()(L.LayerNormalization()(L.Add()([h, inner])))
    model = keras.Model(x, L.Dense(8, activation="softmax", name="head")(h))
    model.compile(K.Adam(epsilon=1e-12), "sparse_categorical_crossentropy")
    return model


class Nested(keras.Model):
    """A subclassed model around a Functional one and a layer with layers."""

    def __init__(self):
        super().__init__(name="nested")
        self.stem = keras.Sequential([L.Dense(16), L.ReLU()], name="stem")
        self.head = L.Dense(8, activation="softmax", name="head")

    def call(self, x, training=False):
        return self.head(self.stem(x, training=training))


def nested():
    model = Nested()
    model.compile("adam", "mse")
    return model


def tokens():
    x, y = batch(8)
    return np.abs(x * 10).astype("int32"), y[:, 0]


CONTROLS = {
    "mlp": (mlp, batch(16)),
    "transformer": (transformer, tokens()),
    "nested": (nested, batch(16)),
}


@pytest.mark.quick("mlp-mixed_float16", "nested-mixed_bfloat16")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("build, data", CONTROLS.values(), ids=CONTROLS)
def test_nothing_is_found_in_managed_models_and_the_head_in_stock_ones(
    build, data, policy
):
    with tfamp.scope(policy):
        found = lint(build(), data=data)
    assert (found.errors, found.warnings, found.skipped) == ((), (), ())
    assert found.rules == RULE_IDS
    with stock_policy(policy):
        found = lint(build(), data=data)
    bad = [(f.rule, f.severity, f.layer) for f in found if f.severity != "note"]
    assert bad == [("half-head", "error", "head")]
    assert len(lint(build(), data=data)) == 0


def test_what_cannot_be_checked_is_listed_with_the_reason():
    raw = keras.Sequential([keras.Input((4,)), L.Dense(8)])
    reason = "half-loss: no `loss` was passed, and the model has none"
    assert lint(raw).skipped == (reason,)
    assert lint(raw, loss="mse", optimizer="adam", data=batch(4)).rules == RULE_IDS
    reason = (
        "half-head: model 'nested' tells its inputs by its call only, and no `data` "
        "were passed"
    )
    assert reason in lint(Nested()).skipped

    class Broken(keras.Model):
        def call(self, x):
            raise RuntimeError("no such thing")

    (reason, *_) = lint(Broken(), data=batch(4)).skipped
    assert "cannot be traced (" in reason and "no such thing" in reason


WRONG = {
    "model": (
        lambda: lint("model"),
        "`model` is 'model', of type str; expected a `keras.Model`. Pass the model",
    ),
    "data": (
        lambda: lint(sequential(head()), data=7),
        "`data` is of type int; expected what `fit` takes: a `tf.data.Dataset` of",
    ),
}
test_wrong_arguments_are_named_with_a_remedy = refusals(WRONG, kind=TypeError)


def test_the_documentation_has_a_whole_section_for_each_rule():
    titles = r"^## `(.*)`$"
    _, *found = re.split(titles, DOCUMENTATION.read_text(), flags=re.MULTILINE)
    sections = dict(zip(found[::2], found[1::2], strict=True))
    assert tuple(sections) == RULE_IDS
    for name, section in sections.items():
        for part in ("**Why.**", "**Remedy.**"):
            assert part in section, name
