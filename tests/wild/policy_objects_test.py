"""Programs that handle dtype policies themselves: pass, share, copy and map them."""

import copy
import pickle

import keras
import numpy as np
import pytest

import tfamp
from tests.wild.checking import by_file, by_stock_file

layers = keras.layers
HALF = "mixed_bfloat16"
X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")


@pytest.fixture(autouse=True)
def enabled():
    with tfamp.scope(HALF):
        yield


def network(*inside):
    return keras.Sequential([keras.Input((8,)), *inside, layers.Dense(2)])


def test_a_policy_equals_copies_and_serializes_as_keras_own():
    policy, stock = layers.Dense(3).dtype_policy, keras.DTypePolicy(HALF)
    assert policy == stock and stock == policy
    assert policy != keras.DTypePolicy("float32")
    assert layers.Softmax().dtype_policy == keras.DTypePolicy("float32")
    for made in (copy.copy(policy), copy.deepcopy(policy)):
        assert (made.name, made.compute_dtype) == (HALF, "bfloat16")
    assert pickle.loads(pickle.dumps(policy)) == stock
    serialize = keras.dtype_policies.serialize
    assert serialize(policy) == serialize(stock)
    assert keras.dtype_policies.get(policy) is policy
    assert repr(policy) == repr(stock) == repr(keras.config.dtype_policy())


class Block(layers.Layer):
    """Hands its own policy to its parts, as Keras's layers do."""

    def __init__(self, **options):
        super().__init__(**options)
        self.widen = layers.Dense(4, dtype=self.dtype_policy)
        self.norm = layers.LayerNormalization(dtype=self.dtype_policy)
        self.narrow = layers.Dense(8, dtype=self.dtype_policy.name)

    def call(self, x):
        return x + self.narrow(self.norm(self.widen(x)))


@pytest.mark.quick("inherited")
@pytest.mark.parametrize(
    "options, computes_in",
    [
        ({}, ["bfloat16", "float32", "bfloat16"]),
        ({"dtype": "float32"}, ["float32"] * 3),
        ({"dtype": HALF}, ["bfloat16", "bfloat16", "bfloat16"]),
    ],
    ids=["inherited", "float32", "explicit"],
)
def test_a_layer_hands_its_policy_on(options, computes_in):
    block = Block(**options)
    block(X)
    parts = (block.widen, block.norm, block.narrow)
    assert [part.compute_dtype for part in parts] == computes_in


def test_a_policy_set_on_a_finished_layer_is_saved(tmp_path):
    model = network(layers.Dense(8))
    model.layers[0].dtype_policy = "float32"
    model.compile("adam", "mse")
    model.fit(X, X[:, :2], verbose=0)
    for load in (by_file, by_stock_file):
        loaded = load(model, tmp_path)
        assert loaded.layers[0].compute_dtype == "float32"
        np.testing.assert_array_equal(loaded(X), model(X))


def test_a_configuration_is_made_again_out_of_tfamp():
    model = network(layers.Dense(8, "relu"), layers.LayerNormalization())
    text = model.to_json()
    tfamp.disable()
    stock = keras.models.model_from_json(text)
    dtypes = [layer.compute_dtype for layer in stock.layers[:2]]
    assert dtypes == ["bfloat16", "float32"]


def test_a_kept_layer_hands_float32_on():
    with tfamp.scope(HALF, keep_float32=["Block"]):
        block = Block()
        assert block(X).dtype == "bfloat16"
    assert {part.compute_dtype for part in (block.widen, block.norm)} == {"float32"}


def test_a_map_of_policies_is_left_to_keras():
    policies = keras.dtype_policies.DTypePolicyMap()
    policies["mapped/wide"] = keras.DTypePolicy("float32")

    class Mapped(keras.Model):
        def __init__(self):
            super().__init__(name="mapped", dtype=policies)
            self.wide = layers.Dense(4, name="wide", dtype=policies)
            self.rest = layers.Dense(2, name="rest", dtype=policies)

        def call(self, x):
            return self.rest(self.wide(x))

    model = Mapped()
    model(X)
    assert model.wide.compute_dtype == "float32"
    assert model.rest.compute_dtype == "bfloat16"
