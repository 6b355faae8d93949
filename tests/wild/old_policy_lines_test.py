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
from tests.wild.checking import facts

POLICY = "mixed_bfloat16"
pytestmark = pytest.mark.filterwarnings("ignore:'bfloat16' stores the weights")


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    tfamp.disable()
    keras.config.set_dtype_policy("float32")


def reviews(dtype=lambda: None):
    """A classifier of texts, with one layer of each kind that half would spoil."""
    words = keras.Input((12,), dtype="int32")
    x = layers.Embedding(50, 8, dtype=dtype())(words)
    x = layers.Bidirectional(
        layers.LSTM(4, return_sequences=True, dtype=dtype()), dtype=dtype()
    )(x)
    attended = layers.MultiHeadAttention(2, 4, dtype=dtype())(x, x)
    x = layers.LayerNormalization(dtype=dtype())(x + attended)
    x = layers.Dense(8, activation="relu", dtype=dtype())(x)
    x = layers.GlobalAveragePooling1D(dtype=dtype())(x)
    return keras.Model(words, layers.Dense(3, activation="softmax", dtype=dtype())(x))


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


def without_old_lines(build, policy=POLICY):
    with tfamp.scope(policy):
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
    policy = "bfloat16" if old_line is tf_keras else POLICY
    expected = without_old_lines(reviews, policy)
    tfamp.enable(policy)
    old_line(policy)
    assert facts(reviews()) == expected
    assert keras.config.dtype_policy().name == policy
    kept = {row[1] for row in expected if row[2] == "float32"}
    assert {"LayerNormalization", "GlobalAveragePooling1D"} <= kept


def twice():
    keras.config.set_dtype_policy(POLICY)
    tfamp.enable(POLICY)
    keras.config.set_dtype_policy(POLICY)


def before_each_session():
    tfamp.enable(POLICY)
    for _ in range(2):
        keras.backend.clear_session()
        keras.mixed_precision.set_global_policy(POLICY)
        reviews()


def there_and_back():
    tfamp.enable(POLICY)
    keras.config.set_dtype_policy("float32")
    with pytest.warns(UserWarning, match="set to 'float32' by other code"):
        assert layers.Dense(2).compute_dtype == "float32"
    keras.config.set_dtype_policy(POLICY)


@pytest.mark.quick("reviews-twice")
@pytest.mark.parametrize("begin", [twice, before_each_session, there_and_back])
@pytest.mark.parametrize("build", [reviews, tower])
def test_the_line_may_stand_anywhere(begin, build):
    expected = without_old_lines(build)
    begin()
    assert facts(build()) == expected


@pytest.mark.slow("test_the_line_may_stand_anywhere, out of a scope")
@pytest.mark.parametrize("build", [reviews, tower])
def test_the_line_in_a_scope_ends_with_it(build):
    expected = without_old_lines(build)
    tfamp.enable("float32")
    with tfamp.scope(POLICY):
        keras.config.set_dtype_policy(POLICY)
        assert facts(build()) == expected
    assert keras.config.dtype_policy().name == "float32"


MINE = keras.DTypePolicy(POLICY)


@pytest.mark.quick("before")
@pytest.mark.parametrize("in_hand", ["before", "after", "its own"])
def test_layers_that_are_handed_the_same_policy_object_inherit_it(in_hand):
    expected = without_old_lines(reviews)
    if in_hand == "before":
        keras.config.set_dtype_policy(POLICY)
        given = keras.config.dtype_policy()
        tfamp.enable(POLICY)
    else:
        tfamp.enable(POLICY)
        keras.config.set_dtype_policy(POLICY)
        given = keras.config.dtype_policy() if in_hand == "after" else MINE
    assert facts(reviews(lambda: given)) == expected


def test_what_a_layer_is_told_by_name_stays_its_own():
    tfamp.enable(POLICY)
    keras.config.set_dtype_policy(POLICY)
    told = layers.LayerNormalization(dtype=POLICY)
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
    tfamp.enable(POLICY)
    keras.config.set_dtype_policy(other)
    with pytest.warns(UserWarning, match=f"tfamp.enable\\('{other}'\\)") as caught:
        layer = layers.LayerNormalization()
    assert layer.dtype_policy.name == other
    assert [Path(each.filename).name for each in caught] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = layers.LayerNormalization(dtype=MINE)
    assert mine.compute_dtype == "float32"


READ = {
    "clone_model": lambda model, _: keras.models.clone_model(model),
    "json": lambda model, _: keras.models.model_from_json(model.to_json()),
    "file": lambda _, path: tfamp.load_model(path),
    "stock file": lambda _, path: keras.saving.load_model(path),
}


@pytest.mark.quick("clone_model-reviews")
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
@pytest.mark.parametrize(
    "way, build",
    [*((way, reviews) for way in READ), ("file", tower), ("stock file", tower)],
)
def test_a_model_that_stock_keras_made_is_read_as_one_of_now(way, build, tmp_path):
    expected = without_old_lines(build)
    keras.config.set_dtype_policy(POLICY)
    stock = build()
    stock.compile("adam", "sparse_categorical_crossentropy")
    stock.save(tmp_path / "model.keras")
    tfamp.enable(POLICY)
    x = np.ones((2, 12 if build is reviews else 4), "float32")
    read = READ[way](stock, tmp_path / "model.keras")
    read.compile("adam", "sparse_categorical_crossentropy")
    read.fit(x, np.zeros(2), verbose=0)
    assert facts(read) == expected
