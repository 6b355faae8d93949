"""Programs that set Keras's mixed precision themselves, their old lines left in place.

Setting the policy that is enabled, by whatever name or object, changes nothing.
"""

import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp

pytestmark = pytest.mark.filterwarnings(
    "ignore:'mixed_float16' will be slow", "ignore:'bfloat16' stores the weights"
)
ROOT = Path(__file__).parents[2]
POLICIES = ("mixed_bfloat16", "mixed_float16", "bfloat16")


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    tfamp.disable()
    keras.config.set_dtype_policy("float32")


def reviews():
    """A classifier of texts, with one layer of each kind that half would spoil."""
    words = keras.Input((12,), dtype="int32")
    x = layers.Embedding(50, 8)(words)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = layers.Dense(8, activation="relu")(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(words, layers.Dense(3, activation="softmax")(x))


@keras.saving.register_keras_serializable("old_policy_lines")
class Tower(keras.Model):
    """One written as a class."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization()
        self.hidden = layers.Dense(8, activation="relu")
        self.scores = layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.scores(self.hidden(self.norm(x)))


def tower():
    model = Tower()
    model(np.ones((2, 4), "float32"))
    return model


def column():
    """A stack of layers."""
    parts = [layers.LayerNormalization(), layers.Dense(8), layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((4,)), *parts, layers.Dense(3, "softmax")])


def facts(model):
    return [
        (row.class_name, row.compute_dtype, row.variable_dtype, row.output_dtype)
        + (row.rule.split("'")[0],)  # without the names that Keras numbers
        for row in tfamp.assignment(model)
    ]


def without_old_lines(build, policy, **settings):
    with tfamp.scope(policy, **settings):
        return facts(build())


def tf_keras(policy):
    tf.keras.mixed_precision.set_global_policy(policy)


OLD_LINES = {
    "config, name": lambda p: keras.config.set_dtype_policy(p),
    "config, object": lambda p: keras.config.set_dtype_policy(keras.DTypePolicy(p)),
    "global, name": lambda p: keras.mixed_precision.set_global_policy(p),
    "global, Policy": lambda p: keras.mixed_precision.set_global_policy(
        keras.mixed_precision.Policy(p)
    ),
    "legacy, name": lambda p: keras.mixed_precision.set_dtype_policy(p),
    "FloatDTypePolicy": lambda p: keras.config.set_dtype_policy(
        keras.FloatDTypePolicy(p)
    ),
    "get": lambda p: keras.config.set_dtype_policy(keras.dtype_policies.get(p)),
    "deserialized": lambda p: keras.config.set_dtype_policy(
        keras.dtype_policies.deserialize(
            keras.dtype_policies.serialize(keras.DTypePolicy(p))
        )
    ),
    "what is there": lambda p: keras.config.set_dtype_policy(
        keras.config.dtype_policy()
    ),
    "tf.keras": tf_keras,
}


@pytest.mark.quick("config, name-mixed_bfloat16")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("old_line", OLD_LINES.values(), ids=OLD_LINES)
def test_the_same_policy_set_after_enable_changes_nothing(old_line, policy):
    expected = without_old_lines(reviews, policy)
    tfamp.enable(policy)
    old_line(policy)
    assert facts(reviews()) == expected
    assert keras.config.dtype_policy().name == policy
    kept = {row[0] for row in expected if row[1] == "float32"}
    assert {"LayerNormalization", "GlobalAveragePooling1D"} <= kept


@pytest.mark.quick("config, name-reviews")
@pytest.mark.parametrize("build", [reviews, tower])
@pytest.mark.parametrize("old_line", OLD_LINES.values(), ids=OLD_LINES)
def test_the_same_policy_set_before_enable_changes_nothing(old_line, build):
    expected = without_old_lines(build, "mixed_bfloat16")
    old_line("mixed_bfloat16")
    tfamp.enable("mixed_bfloat16")
    assert facts(build()) == expected


def twice(policy):
    keras.config.set_dtype_policy(policy)
    tfamp.enable(policy)
    keras.config.set_dtype_policy(policy)


def before_each_session(policy):
    tfamp.enable(policy)
    for _ in range(2):
        keras.backend.clear_session()
        keras.mixed_precision.set_global_policy(policy)
        reviews()


def there_and_back(policy):
    tfamp.enable(policy)
    keras.config.set_dtype_policy("float32")
    with pytest.warns(UserWarning, match="set to 'float32' by other code"):
        assert layers.Dense(2).compute_dtype == "float32"
    keras.config.set_dtype_policy(policy)


def in_a_scope(policy):
    tfamp.enable("float32")
    scope = tfamp.scope(policy)
    scope.__enter__()
    keras.config.set_dtype_policy(policy)
    return scope


def named_by_the_environment(policy):
    os.environ["TFAMP_POLICY"] = policy
    try:
        tfamp.enable()
    finally:
        del os.environ["TFAMP_POLICY"]
    keras.config.set_dtype_policy(policy)


TIMES = [twice, before_each_session, there_and_back, in_a_scope]


@pytest.mark.quick("reviews-twice")
@pytest.mark.parametrize("begin", [*TIMES, named_by_the_environment])
@pytest.mark.parametrize("build", [reviews, tower])
def test_the_line_may_stand_anywhere(begin, build):
    policy = "mixed_bfloat16"
    expected = without_old_lines(build, policy)
    scope = begin(policy)
    try:
        assert facts(build()) == expected
    finally:
        if scope is not None:
            scope.__exit__(None, None, None)
            assert keras.config.dtype_policy().name == "float32"


def test_rules_of_the_user_act_as_well():
    keep = ["hidden", lambda layer: isinstance(layer, layers.Embedding)]
    tfamp.enable("mixed_bfloat16", keep_float32=keep)
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert layers.Dense(2, name="hidden").compute_dtype == "float32"
    assert layers.Embedding(2, 2).compute_dtype == "float32"
    assert layers.Dense(2).compute_dtype == "bfloat16"


def test_a_thread_may_set_it_for_itself():
    tfamp.enable("mixed_bfloat16")
    found = []

    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        found.extend(facts(reviews()))

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    assert found == facts(reviews())


def test_disable_gives_back_what_was_set_before_enable():
    keras.config.set_dtype_policy("mixed_bfloat16")
    mine = keras.config.dtype_policy()
    tfamp.enable("mixed_bfloat16")
    keras.config.set_dtype_policy("mixed_bfloat16")
    tfamp.disable()
    assert keras.config.dtype_policy() is mine
    assert layers.LayerNormalization().compute_dtype == "bfloat16"


def with_policy_in_hand(policy):
    mine = keras.DTypePolicy(policy)
    return lambda: mine


IN_HAND = {
    "the global one": lambda policy: keras.config.dtype_policy,
    "a Policy": with_policy_in_hand,
    "one made by name": lambda policy: lambda: keras.dtype_policies.get(policy),
}


@pytest.mark.quick("the global one-before")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("in_hand", IN_HAND.values(), ids=IN_HAND)
def test_layers_that_are_handed_the_same_policy_object_inherit_it(in_hand, when):
    policy = "mixed_bfloat16"

    def build(dtype):
        x = keras.Input((6, 8))
        h = layers.LayerNormalization(dtype=dtype())(x)
        h = layers.Bidirectional(layers.GRU(4, dtype=dtype()), dtype=dtype())(h)
        h = layers.Dense(8, dtype=dtype())(h)
        y = layers.Dense(3, activation="softmax", dtype=dtype())(h)
        return keras.Model(x, y)

    expected = without_old_lines(lambda: build(lambda: None), policy)
    if when == "before":
        given = in_hand(policy) if in_hand is not IN_HAND["the global one"] else None
        keras.config.set_dtype_policy(policy)
        before = keras.config.dtype_policy()
        given = given or (lambda: before)
        tfamp.enable(policy)
    else:
        tfamp.enable(policy)
        keras.config.set_dtype_policy(policy)
        given = in_hand(policy)
    assert facts(build(given)) == expected


class Block(layers.Layer):
    """Hands its own policy down, as layers of libraries do."""

    def __init__(self, dtype=None, **kwargs):
        super().__init__(dtype=dtype, **kwargs)
        self.norm = layers.LayerNormalization(dtype=self.dtype_policy)
        self.mix = layers.Dense(8, dtype=self.dtype_policy)

    def call(self, x):
        return x + self.mix(self.norm(x))


def test_a_block_that_hands_its_policy_down_is_as_without_the_line():
    def build():
        x = keras.Input((8,))
        h = Block(dtype=keras.config.dtype_policy())(Block(name="first")(x))
        return keras.Model(x, layers.Dense(2)(h))

    settings = {"policy": "mixed_bfloat16", "keep_float32": ["first"]}
    expected = without_old_lines(build, **settings)
    tfamp.enable(**settings)
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert facts(build()) == expected
    assert [row[1] for row in expected if row[0] == "Dense"] == [
        "float32",  # of the block that is kept
        "bfloat16",
        "float32",  # the head
    ]


def test_what_a_layer_is_told_by_name_stays_its_own():
    tfamp.enable("mixed_bfloat16")
    keras.config.set_dtype_policy("mixed_bfloat16")
    told = layers.LayerNormalization(dtype="mixed_bfloat16")
    assert (told.compute_dtype, told.variable_dtype) == ("bfloat16", "float32")
    assert layers.Dense(2, dtype="bfloat16").variable_dtype == "bfloat16"
    head = layers.Activation("softmax", dtype="float32")  # as Keras's guide has it
    x = keras.Input((4,))
    model = keras.Model(x, head(layers.Dense(3)(layers.Dense(4, name="body")(x))))
    assert tfamp.assignment(model)[head.name].compute_dtype == "float32"
    assert tfamp.assignment(model)["body"].compute_dtype == "bfloat16"
    assert model(np.ones((2, 4), "float32")).dtype == "float32"


@pytest.mark.quick("float32")
@pytest.mark.parametrize("other", ["float32", "mixed_float16", "bfloat16"])
def test_another_policy_is_obeyed_and_the_warning_names_both_remedies(other):
    tfamp.enable("mixed_bfloat16")
    keras.config.set_dtype_policy(other)
    with pytest.warns(UserWarning, match=f"tfamp.enable\\('{other}'\\)") as caught:
        layer = layers.LayerNormalization()
    assert layer.dtype_policy.name == other
    assert [Path(each.filename).name for each in caught] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = layers.LayerNormalization(dtype=keras.DTypePolicy("mixed_bfloat16"))
    assert mine.compute_dtype == "float32"


WAYS = {
    "clone_model": lambda model, _: keras.models.clone_model(model),
    "json": lambda model, _: keras.models.model_from_json(model.to_json()),
    "file": lambda model, path: model.save(path) or tfamp.load_model(path),
    "stock file": lambda model, path: model.save(path) or keras.saving.load_model(path),
}


@pytest.mark.quick("clone_model")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_copies_and_files_are_as_without_the_line(way, tmp_path):
    expected = without_old_lines(reviews, "mixed_bfloat16")
    tfamp.enable("mixed_bfloat16")
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = reviews()
    keras.config.set_dtype_policy("mixed_bfloat16")
    copied = way(model, str(tmp_path / "model.keras"))
    assert facts(copied) == expected
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert facts(reviews()) == expected


def h5(model, path):
    path = path.replace(".keras", ".h5")
    model.save(path)
    return keras.saving.load_model(path)


@pytest.mark.quick("clone_model-reviews")
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
@pytest.mark.parametrize(
    "way, build",
    [
        *((way, reviews) for way in WAYS),
        ("stock file", tower),
        ("file", tower),
        ("h5", column),
    ],
)
def test_a_model_that_stock_keras_made_is_read_as_one_of_now(way, build, tmp_path):
    expected = without_old_lines(build, "mixed_bfloat16")
    keras.config.set_dtype_policy("mixed_bfloat16")
    stock = build()
    stock.compile("adam", "sparse_categorical_crossentropy")
    path = str(tmp_path / "model.keras")
    stock.save(path)
    tfamp.enable("mixed_bfloat16")
    x = np.ones((2, 12 if build is reviews else 4), "float32")
    read = {**WAYS, "h5": h5}[way](stock, path)
    read.compile("adam", "sparse_categorical_crossentropy")
    read.fit(x, np.zeros(2), verbose=0)
    assert facts(read) == expected


def test_a_copy_keeps_what_a_layer_was_told_by_name():
    tfamp.enable("mixed_bfloat16")
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = keras.Input((4,))
    h = layers.LayerNormalization(dtype="mixed_bfloat16", name="told")(x)
    h = layers.LayerNormalization(name="not_told")(h)
    model = keras.Model(x, layers.Dense(2)(h))
    for copy in (
        keras.models.clone_model(model),
        keras.Model.from_config(model.get_config()),
        keras.models.model_from_json(model.to_json()),
    ):
        assert tfamp.assignment(copy)["told"].compute_dtype == "bfloat16"
        assert tfamp.assignment(copy)["not_told"].compute_dtype == "float32"


@pytest.mark.quick("mixed_bfloat16")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_sure_and_wrong_answer_is_learned_from(policy):
    tfamp.enable(policy)
    keras.mixed_precision.set_global_policy(policy)
    body = layers.Dense(1, use_bias=False, trainable=False)
    head = layers.Dense(1, activation="sigmoid", use_bias=False)
    model = keras.Sequential([keras.Input((1,)), body, head])
    model.compile(keras.optimizers.SGD(1.0), "binary_crossentropy")
    body.set_weights([np.float32([[1.0]])])
    head.set_weights([np.float32([[10.0]])])
    model.fit(np.ones((1, 1)), np.zeros((1, 1)), verbose=0)
    # The gradient is sigmoid(10) = 0.99995; half precision makes 0 of it.
    assert head.get_weights()[0].item() == pytest.approx(10 - 0.99995, abs=1e-4)
    is_scaled = isinstance(model.optimizer, tfamp.LossScaleOptimizer)
    assert is_scaled == (policy == "mixed_float16")


def test_a_plan_is_followed_as_without_the_line():
    with tfamp.scope("mixed_bfloat16", keep_float32=["mix"]):
        x = keras.Input((4,), name="x")
        h = layers.Dense(4, name="mix")(x)
        model = keras.Model(x, layers.Dense(2, name="out")(h), name="planned")
    plan = tfamp.PrecisionPlan.from_model(model)
    tfamp.enable(plan)
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = keras.Input((4,), name="x")
    h = layers.Dense(4, name="mix")(x)
    again = keras.Model(x, layers.Dense(2, name="out")(h), name="planned")
    again.compile("sgd", "mse")
    assert tfamp.assignment(again)["mix"].compute_dtype == "float32"


OLD_PROGRAM = """
import keras, numpy as np
import tensorflow as tf
from tensorflow.keras import mixed_precision

policy = mixed_precision.Policy("mixed_float16")
mixed_precision.set_global_policy(policy)
print("Compute dtype: %s" % policy.compute_dtype)

rng = np.random.default_rng(1)
x = rng.normal(size=(64, 10)).astype("float32")
y = rng.integers(0, 3, 64)
for units in (8, 16):
    tf.keras.backend.clear_session()
    mixed_precision.set_global_policy(policy)
    inputs = keras.Input((10,))
    h = keras.layers.Dense(units, activation="relu")(inputs)
    h = keras.layers.LayerNormalization(dtype=policy)(h)
    outputs = keras.layers.Dense(3)(h)
    outputs = keras.layers.Activation("softmax", dtype="float32")(outputs)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "sparse_categorical_crossentropy")
    history = model.fit(x, y, epochs=2, verbose=0).history
"""
LAST_LINES = """
import json, tfamp
rows = {r.class_name: r.compute_dtype for r in tfamp.assignment(model)}
print(json.dumps([rows, type(model.optimizer).__module__, history["loss"]]))
"""


def test_an_old_program_needs_one_line_more():
    first = "import tfamp\ntfamp.enable('mixed_float16')\n"
    program = first + OLD_PROGRAM + LAST_LINES
    done = subprocess.run(
        [sys.executable, "-W", "error:Keras's global", "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    rows, optimizer, losses = json.loads(done.stdout.splitlines()[-1])
    assert rows["LayerNormalization"] == "float32"
    assert rows["Activation"] == "float32"
    assert optimizer.startswith("tfamp.")
    assert np.all(np.isfinite(losses))
    assert "global policy" not in done.stderr
