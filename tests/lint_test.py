"""Lint: healthy models, every kind of model, and that nothing changes."""

import random
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.lint_rules_test import batch, places, sequential
from tests.refusals import refusals
from tests.styles import stock_policy
from tfamp import lint
from tfamp.numerics.lint import RULE_IDS

L = keras.layers
DOCUMENTATION = Path(__file__).parents[1] / "docs" / "lint.md"
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


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
    return finished(x, h)


def finished(x, h):
    model = keras.Model(x, L.Dense(8, activation="softmax", name="head")(h))
    model.compile(
        keras.optimizers.Adam(epsilon=1e-12), "sparse_categorical_crossentropy"
    )
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


@pytest.mark.quick("mlp")
@pytest.mark.parametrize("build, data", CONTROLS.values(), ids=CONTROLS)
def test_nothing_at_all_is_found_in_float32(build, data):
    assert len(lint(build(), data=data)) == 0


RULE_IDS_WITHOUT_LOSS = tuple(rule for rule in RULE_IDS if rule != "half-loss")
DATA = {
    "arrays": lambda x, y: (x, y),
    "weights": lambda x, y: (x, y, np.ones(8, "float32")),
    "dataset": lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(4),
    "inputs only": lambda x, y: x,
    "tuple of one": lambda x, y: (x,),
    "no targets": lambda x, y: (x, None),
    "dataset of inputs": lambda x, y: tf.data.Dataset.from_tensor_slices(x).batch(4),
    "pipeline": lambda x, y: tfamp.data.Pipeline.from_arrays(x, y).batch(4),
}


@pytest.mark.parametrize("make", DATA.values(), ids=DATA)
def test_data_come_in_every_form(make):
    with stock_policy("mixed_bfloat16"):
        model = Nested()
    assert lint(model, data=make(*batch(16))).rules == RULE_IDS_WITHOUT_LOSS


def test_what_cannot_be_checked_is_listed_with_the_reason():
    raw = keras.Sequential([keras.Input((4,)), L.Dense(8)])
    assert lint(raw).skipped == (
        "half-loss: no `loss` was passed, and the model has none",
    )
    assert lint(raw, loss="mse", optimizer="adam", data=batch(4)).rules == RULE_IDS
    reason = (
        "half-head: model 'nested' tells its inputs by its call only, and no `data` "
        "were passed"
    )
    assert reason in lint(Nested()).skipped
    assert "half-head" not in lint(Nested()).rules


def test_a_model_that_cannot_be_traced_says_why():
    class Broken(keras.Model):
        def call(self, x):
            raise RuntimeError("no such thing")

    found = lint(Broken(), data=batch(4))
    (reason,) = [text for text in found.skipped if text.startswith("half-head")]
    assert "cannot be traced (" in reason and "no such thing" in reason


def test_ragged_inputs_and_texts_are_taken():
    class Ragged(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = L.Embedding(16, 8)
            self.last = L.Dense(8, name="last")

        def call(self, x):
            return self.last(tf.reduce_mean(self.table(x.to_tensor()), 1))

    with stock_policy("mixed_bfloat16"):
        model = Ragged()
        text = keras.Input((), dtype="string")
        words = L.TextVectorization(output_sequence_length=4, vocabulary=["a", "b"])
        h = L.Embedding(8, 8, mask_zero=True)(words(text))
        reader = keras.Model(text, L.Dense(8, name="last")(L.LSTM(8)(h)))
    rows = tf.ragged.constant([[1, 2], [3]])
    y = tf.zeros((2, 8))
    data = tf.data.Dataset.from_tensors((rows, y))
    assert places(model, "half-head", data=data) == [("warning", "last")]
    data = tf.data.Dataset.from_tensors((tf.constant(["a b", "b"]), y))
    assert places(reader, "half-head", data=data) == [("warning", "last")]


def test_nothing_of_a_model_changes():
    keras.utils.set_random_seed(7)
    with tfamp.scope("mixed_float16"):
        model = mlp()
    model.optimizer.build(model.trainable_variables)
    values = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    policies = [layer.dtype_policy.name for layer in model.layers]
    before = random.getstate(), np.random.get_state()[1].tolist()
    lint(model, data=batch(16))
    after = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    assert all(np.array_equal(a, b) for a, b in zip(values, after, strict=True))
    assert [layer.dtype_policy.name for layer in model.layers] == policies
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


WRONG = {
    "model": (
        lambda model: lint("model"),
        "`model` is 'model', of type str; expected a `keras.Model`. Pass the model",
        TypeError,
    ),
    "data": (
        lambda model: lint(model, data=7),
        "`data` is of type int; expected what `fit` takes: a `tf.data.Dataset` of",
        TypeError,
    ),
}


test_wrong_arguments_are_named_with_a_remedy = refusals(
    WRONG, lambda call: call(sequential(L.Dense(8), shape=(4,)))
)


def test_the_documentation_has_a_whole_section_for_each_rule():
    titles = r"^## `(.*)`$"
    _, *found = re.split(titles, DOCUMENTATION.read_text(), flags=re.MULTILINE)
    sections = dict(zip(found[::2], found[1::2], strict=True))
    assert tuple(sections) == RULE_IDS
    for name, section in sections.items():
        for part in ("**Why.**", "**Remedy.**"):
            assert part in section, name
