"""Lint: healthy models, every kind of model, silencing, and that nothing changes."""

import random
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.lint_rules_test import batch, places, sequential, stock
from tests.refusals import refusals
from tests.replicas import two_replicas
from tfamp import lint
from tfamp.numerics.lint import RULE_IDS
from tfamp.records import checks
from tfamp.records.findings import Findings

L = keras.layers
DOCUMENTATION = Path(__file__).parents[1] / "docs" / "lint.md"
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


def mlp():
    hidden = [L.Dense(16, activation="relu"), L.BatchNormalization(), L.Dropout(0.1)]
    return sequential(*hidden, L.Dense(8, activation="softmax", name="head"))


def residual_cnn():
    x = keras.Input((8, 8, 8))
    h = x
    for _ in range(2):
        inner = L.Conv2D(8, 3, padding="same")(h)  # with the bias that BN removes
        inner = L.ReLU()(L.BatchNormalization()(inner))
        h = L.Add()([h, L.Conv2D(8, 3, padding="same")(inner)])
    h = L.GlobalAveragePooling2D()(L.MaxPooling2D()(h))
    return finished(x, h)


def transformer():
    x = keras.Input((8,), dtype="int32")
    h = L.Embedding(64, 16, mask_zero=True)(x)
    inner = L.MultiHeadAttention(2, 8, dropout=0.1)(h, h)
    h = L.LayerNormalization(epsilon=1e-12)(L.Add()([h, inner]))
    inner = L.Dense(16)(L.Dense(32, activation="gelu")(h))
    h = L.GlobalAveragePooling1D()(L.LayerNormalization()(L.Add()([h, inner])))
    return finished(x, h)


def lstm():
    x = keras.Input((6, 8))
    h = L.Bidirectional(L.LSTM(8, return_sequences=True))(x)
    return finished(x, L.GRU(8)(L.Masking()(h)))


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


def sequence(*shape, integer=False):
    x, y = batch(*shape)
    return (np.abs(x * 10).astype("int32") if integer else x), y[:, 0]


CONTROLS = {
    "mlp": (mlp, batch(16)),
    "residual cnn": (residual_cnn, sequence(8, 8, 8)),
    "transformer": (transformer, sequence(8, integer=True)),
    "lstm": (lstm, sequence(6, 8)),
    "nested": (nested, batch(16)),
}


@pytest.mark.quick("nested-mixed_bfloat16")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("build, data", CONTROLS.values(), ids=CONTROLS)
def test_nothing_is_found_in_managed_models(build, data, policy):
    with tfamp.scope(policy):
        model = build()
    found = lint(model, data=data)
    assert (found.errors, found.warnings) == ((), ())
    assert found.skipped == ()
    assert found.rules == RULE_IDS


@pytest.mark.quick("mlp-mixed_float16", "nested-mixed_bfloat16")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("build, data", CONTROLS.values(), ids=CONTROLS)
def test_only_the_head_is_found_in_stock_models(build, data, policy):
    with stock(policy):
        model = build()
    found = lint(model, data=data)
    bad = [(f.rule, f.severity, f.layer) for f in found if f.severity != "note"]
    assert bad == [("half-head", "error", "head")]


@pytest.mark.quick("mlp", "nested")
@pytest.mark.parametrize("build, data", CONTROLS.values(), ids=CONTROLS)
def test_nothing_at_all_is_found_in_float32(build, data):
    assert len(lint(build(), data=data)) == 0


def test_findings_tell_all_that_a_reader_needs():
    with stock("mixed_float16"):
        model = sequential(L.Dense(8, activation="sigmoid", name="out"))
    found = lint(model)
    assert isinstance(found, Findings)
    (each,) = found.of(rule="half-head")
    assert (each.severity, each.layer, each.figure) == ("error", "out", 8.3)
    page = checks.address("lint#half-head")
    assert each.details["documentation"] == page
    assert f"See {page}" in found.table().splitlines()
    assert found.title == f"Lint of model {model.name!r}, with float16"
    assert Findings.from_json(found.to_json()) == found


UNLABELLED = {
    "array": lambda x: x,
    "tuple of one": lambda x: (x,),
    "list of one": lambda x: [x],
    "tensor": lambda x: keras.ops.convert_to_tensor(x),
    "no targets": lambda x: (x, None),
    "dataset": lambda x: tf.data.Dataset.from_tensor_slices(x).batch(8),
}


@pytest.mark.quick("tuple of one", "dataset")
@pytest.mark.parametrize("given", UNLABELLED.values(), ids=UNLABELLED)
def test_data_need_no_targets(given):
    x, y = batch(16)
    found = lint(sequential(L.Dense(8)), data=given(x * 1e5))
    labelled = lint(sequential(L.Dense(8)), data=(x * 1e5, y))
    assert found.findings == labelled.findings
    assert found.skipped == ()


@pytest.mark.parametrize("labelled", [True, False])
def test_inputs_in_a_dict_or_a_list(labelled):
    x, y = batch(16)
    inputs = {name: keras.Input((16,), name=name) for name in "ab"}
    outputs = L.Dense(1)(inputs["a"] + inputs["b"])
    by_name, in_turn = (
        keras.Model(inputs, outputs),
        keras.Model([*inputs.values()], outputs),
    )
    for model, given in ((by_name, {"a": x, "b": x}), (in_turn, [x, x])):
        found = lint(model, data=(given, y) if labelled else (given,))
        assert "unnormalised-input" in found.rules


def test_what_cannot_be_checked_is_listed_with_the_reason():
    model = sequential(L.Dense(8))
    assert lint(model).skipped == (
        "unnormalised-input: no `data` were passed",
        "float-ids: no `data` were passed",
    )
    raw = keras.Sequential([keras.Input((4,)), L.Dense(8)])
    skipped = lint(raw).skipped
    assert "half-loss: no `loss` was passed, and the model has none" in skipped
    subclassed = Nested()
    reason = (
        "half-head: model 'nested' tells its inputs by its call only, and no `data` "
        "were passed"
    )
    assert reason in lint(subclassed).skipped
    assert "half-head" not in lint(subclassed).rules


def test_loss_and_optimizer_may_be_passed():
    raw = keras.Sequential([keras.Input((4,)), L.Dense(8)])
    found = lint(raw, loss="mse", optimizer="adam", data=batch(4))
    assert found.rules == RULE_IDS


def test_a_model_that_cannot_be_traced_says_why():
    class Broken(keras.Model):
        def call(self, x):
            raise RuntimeError("no such thing")

    found = lint(Broken(), data=batch(4))
    reasons = [text for text in found.skipped if text.startswith("half-head")]
    assert len(reasons) == 1
    assert "cannot be traced (" in reasons[0]
    assert "no such thing" in reasons[0]


DATA = {
    "dataset": lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(4),
    "arrays": lambda x, y: (x, y),
    "weights": lambda x, y: (x, y, np.ones(8, "float32")),
    "inputs only": lambda x, y: tf.data.Dataset.from_tensor_slices(x).batch(4),
    "pipeline": lambda x, y: tfamp.data.Pipeline.from_arrays(x, y).batch(4),
}


@pytest.mark.parametrize("make", DATA.values(), ids=DATA)
def test_data_come_in_every_form(make):
    with stock("mixed_bfloat16"):
        model = sequential(L.Dense(8, name="first"), shape=(4,))
    data = make(*batch(4, mean=1000.0))
    assert places(model, "unnormalised-input", data=data) == [("warning", "first")]


def test_several_inputs_are_told_apart():
    with stock("mixed_float16"):
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
        h = L.Concatenate()([L.Dense(8)(a), L.Dense(8, name="second")(b)])
        model = keras.Model({"a": a, "b": b}, L.Dense(8, dtype="float32")(h))
    (x, y), (large, _) = batch(4), batch(4, mean=70_000.0)
    found = lint(model, data=({"a": x, "b": large}, y)).of(rule="unnormalised-input")
    assert [(each.layer, each.message[:7]) for each in found] == [("second", "Input 1")]


def test_ragged_inputs_and_texts_are_taken():
    class Ragged(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = L.Embedding(16, 8)
            self.last = L.Dense(8, name="last")

        def call(self, x):
            return self.last(tf.reduce_mean(self.table(x.to_tensor()), 1))

    with stock("mixed_bfloat16"):
        model = Ragged()
        text = keras.Input((), dtype="string")
        tokens = L.TextVectorization(output_sequence_length=4, vocabulary=["a", "b"])
        h = L.Embedding(8, 8, mask_zero=True)(tokens(text))
        reader = keras.Model(text, L.Dense(8, name="last")(L.LSTM(8)(h)))
    rows = tf.ragged.constant([[1, 2], [3]])
    y = tf.zeros((2, 8))
    data = tf.data.Dataset.from_tensors((rows, y))
    assert places(model, "half-head", data=data) == [("warning", "last")]
    data = tf.data.Dataset.from_tensors((tf.constant(["a b", "b"]), y))
    assert places(reader, "half-head", data=data) == [("warning", "last")]


def test_models_on_replicas_are_linted():
    strategy = two_replicas()
    with stock("mixed_float16"), strategy.scope():
        layers = [L.Dense(8), L.BatchNormalization(), L.Dropout(0.1)]
        model = keras.Sequential([*layers, L.Dense(8, "softmax", name="out")])
        model.compile("adam", "mse")
    found = lint(model, data=batch(16))
    assert [(f.rule, f.layer) for f in found.errors] == [("half-head", "out")]
    assert found.skipped == ()


def test_a_model_that_is_only_a_train_step_is_told_what_can_be():
    class OnlyStep(keras.Model):
        def __init__(self):
            super().__init__(name="only_step")
            self.part = keras.Sequential([keras.Input((16,)), L.Dense(8)], name="part")

        def compile(self, optimizer):
            super().compile()
            self.own = optimizer

        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.cast(self.part(x), "float32"))
            weights = self.part.trainable_variables
            gradients = tape.gradient(loss, weights)
            self.own.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss}

    with stock("mixed_float16"):
        model = OnlyStep()
    model.compile(keras.optimizers.Adam())
    found = lint(model, data=batch(16))
    assert not list(found)
    assert [s for s in found.skipped if s.startswith("half-head: the model cannot be")]


def test_nothing_of_a_model_changes():
    keras.utils.set_random_seed(7)
    with tfamp.scope("mixed_float16"):
        model = mlp()
    model.optimizer.build(model.trainable_variables)
    values = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    policies = [layer.dtype_policy.name for layer in model.layers]
    before = random.getstate(), np.random.get_state()[1].tolist()
    before_policy = keras.config.dtype_policy()
    lint(model, data=batch(16))
    after = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    assert all(np.array_equal(a, b) for a, b in zip(values, after, strict=True))
    assert [layer.dtype_policy.name for layer in model.layers] == policies
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert keras.config.dtype_policy() is before_policy


def test_no_losses_of_the_traced_call_are_left():
    model = sequential(L.Dense(8, activity_regularizer="l2"), shape=(4,))
    lint(model, data=batch(4))
    assert model.losses == []


def test_building_and_tracing_take_no_random_numbers():
    class Draws(keras.Model):
        def call(self, x):
            return x * random.random() * np.random.rand()

    random.seed(7)
    np.random.seed(7)
    model = Draws()
    before = random.getstate(), np.random.get_state()[1].tolist()
    lint(model, data=batch(16))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert model.built


def test_training_goes_on_as_without_lint():
    def losses(linted):
        keras.utils.set_random_seed(3)
        model = sequential(L.Dropout(0.5), L.Dense(8), jit_compile=False)
        if linted:
            lint(model, data=batch(16))
        return [float(model.train_on_batch(*batch(16))) for _ in range(2)]

    assert losses(True) == losses(False)


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
    "no data": (
        lambda model: lint(model, data=DATA["dataset"](*batch(4)).take(0)),
        "`dataset` holds no batches; expected at least one.",
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
