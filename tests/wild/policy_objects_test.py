"""Programs that handle dtype policies themselves: pass, share, copy and map them."""

import copy
import pickle

import keras
import numpy as np
import pytest

import tfamp

layers = keras.layers
HALF = "mixed_bfloat16"
X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")


@pytest.fixture(autouse=True)
def enabled():
    with tfamp.scope(HALF):
        yield


def network(*inside):
    return keras.Sequential([keras.Input((8,)), *inside, layers.Dense(2)])


def fit(model):
    model.compile("adam", "mse")
    model.fit(X, X[:, :2], verbose=0)
    return model


def test_a_policy_equals_copies_and_serializes_as_keras_own():
    policy, stock = layers.Dense(3).dtype_policy, keras.DTypePolicy(HALF)
    assert policy == stock and stock == policy
    assert policy != keras.DTypePolicy("float32")
    assert layers.Softmax().dtype_policy == keras.DTypePolicy("float32")
    for made in (copy.copy(policy), copy.deepcopy(policy)):
        assert (made.name, made.compute_dtype) == (HALF, "bfloat16")
    assert pickle.loads(pickle.dumps(policy)) == stock
    assert keras.dtype_policies.serialize(policy) == {
        **keras.dtype_policies.serialize(stock)
    }
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
    fit(model).save(tmp_path / "model.keras")
    for load in (keras.saving.load_model, tfamp.load_model):
        loaded = load(tmp_path / "model.keras")
        assert loaded.layers[0].compute_dtype == "float32"
        np.testing.assert_array_equal(loaded(X), model(X))


def test_configurations_are_made_again_in_and_out_of_tfamp():
    model = network(layers.Dense(8, "relu"), layers.LayerNormalization())
    text = model.to_json()
    for made in (
        keras.models.model_from_json(text),
        keras.Sequential.from_config(model.get_config()),
        keras.models.clone_model(model),
    ):
        made.set_weights(model.get_weights())
        np.testing.assert_array_equal(made(X), model(X))
    tfamp.disable()
    stock = keras.models.model_from_json(text)
    assert [layer.compute_dtype for layer in stock.layers[:2]] == [
        *("bfloat16", "float32")
    ]


@pytest.mark.quick("load_model0")
@pytest.mark.parametrize("load", [keras.saving.load_model, tfamp.load_model])
def test_quantized_layers_are_loaded_as_they_were(load, tmp_path):
    model = network(layers.Dense(16, name="quantized"), layers.LayerNormalization())
    model.layers[0].quantize("int8")
    model.save(tmp_path / "model.keras")
    loaded = load(tmp_path / "model.keras")
    names = [layer.dtype_policy.name for layer in model.layers]
    assert names[0] == f"int8_from_{HALF}"
    assert [layer.dtype_policy.name for layer in loaded.layers] == names
    np.testing.assert_array_equal(loaded(X), model(X))


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
    assert (model.wide.compute_dtype, model.rest.compute_dtype) == (
        *("float32", "bfloat16"),
    )
