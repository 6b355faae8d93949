"""Programs that set Keras's mixed precision themselves, their old lines left in place.

Setting the policy that is enabled, by whatever name or object, changes nothing.
"""

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
    "global, Policy": lambda p: keras.mixed_precision.set_global_policy(
        keras.mixed_precision.Policy(p)
    ),
    "what is there": lambda p: keras.config.set_dtype_policy(
        keras.config.dtype_policy()
    ),
    "tf.keras": tf_keras,
}


@pytest.mark.quick("config, name")
@pytest.mark.parametrize("old_line", OLD_LINES.values(), ids=OLD_LINES)
def test_the_same_policy_set_after_enable_changes_nothing(old_line):
    policy = "bfloat16" if old_line is tf_keras else "mixed_bfloat16"
    expected = without_old_lines(reviews, policy)
    tfamp.enable(policy)
    old_line(policy)
    assert facts(reviews()) == expected
    assert keras.config.dtype_policy().name == policy
    kept = {row[0] for row in expected if row[1] == "float32"}
    assert {"LayerNormalization", "GlobalAveragePooling1D"} <= kept


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


TIMES = [twice, before_each_session, there_and_back, in_a_scope]


@pytest.mark.quick("reviews-twice")
@pytest.mark.parametrize("begin", TIMES)
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


def with_policy_in_hand(policy):
    mine = keras.DTypePolicy(policy)
    return lambda: mine


IN_HAND = {
    "the global one": lambda policy: keras.config.dtype_policy,
    "a Policy": with_policy_in_hand,
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


@pytest.mark.quick("clone_model-reviews")
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
@pytest.mark.parametrize(
    "way, build",
    [*((way, reviews) for way in WAYS), ("stock file", tower), ("file", tower)],
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
    read = WAYS[way](stock, path)
    read.compile("adam", "sparse_categorical_crossentropy")
    read.fit(x, np.zeros(2), verbose=0)
    assert facts(read) == expected
