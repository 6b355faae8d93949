"""`tfamp.freeze`: the mixed model's outputs bit by bit, from weights stored once."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import STYLES, Own, assembled

L = keras.layers
DTYPES = ("bfloat16", "float16")
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
IDS = np.random.default_rng(1).integers(0, 20, (4, 6))


@keras.saving.register_keras_serializable(package="tests")
class OfWords(keras.Model):
    """A subclassed model that takes nothing but integers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table = self.add_weight(shape=(20, 4))

    def build(self, input_shape=None):
        self.built = True

    def call(self, ids):
        return tf.gather(self.table, ids)


def parts():
    return [
        L.Dense(16, activation="relu"),
        L.BatchNormalization(),
        L.LayerNormalization(),
        L.Dense(16, activation="gelu"),
        L.Dense(3, activation="softmax"),
    ]


def mixed(model, dtype, sample=X):
    model(sample)
    tfamp.apply(model, f"mixed_{dtype}")
    return model


def check_same(frozen, model, x=X):
    """Checks that two models give the same outputs to the last bit."""
    np.testing.assert_array_equal(frozen(x), model(x))


def predicted(model, jit_compile=False):
    model.compile(jit_compile=jit_compile)
    return model.predict(X, verbose=0)


def casts_of_weights(model, x):
    """The casts in inference that read a variable."""
    function = tf.function(lambda x: model(x, training=False))
    operations = function.get_concrete_function(x).graph.get_operations()
    return [
        each
        for each in operations
        if each.type == "Cast" and each.inputs[0].op.type == "ReadVariableOp"
    ]


@pytest.mark.quick("functional-bfloat16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", STYLES)
def test_outputs_are_those_of_the_mixed_model_to_the_last_bit(style, dtype):
    model = mixed(assembled(parts(), style, (8,)), dtype)
    before = [weight.numpy() for weight in model.weights]
    expected = predicted(model)
    is_subclassed = style == "subclassed"
    frozen = tfamp.freeze(model, dtype, in_place=is_subclassed)
    stored = [weight.dtype for weight in frozen.weights]
    assert stored == [dtype] * 2 + ["float32"] * 6 + [dtype] * 2 + ["float32"] * 2
    np.testing.assert_array_equal(predicted(frozen), expected)
    assert casts_of_weights(frozen, X) == []
    if not is_subclassed:
        check_same(frozen, model)
        assert len(casts_of_weights(model, X)) == 4
        for weight, value in zip(model.weights, before, strict=True):
            assert weight.dtype == "float32"
            np.testing.assert_array_equal(weight.numpy(), value)


def test_embeddings_and_recurrent_layers_are_frozen_too():
    layers = [L.Embedding(20, 8), L.LSTM(6), L.Dense(2)]
    model = keras.Sequential([keras.Input((6,), dtype="int64"), *layers])
    frozen = tfamp.freeze(mixed(model, "bfloat16", IDS))
    check_same(frozen, model, IDS)
    assert casts_of_weights(frozen, IDS) == []


def test_a_saved_one_loads_as_it_was(tmp_path):
    frozen = tfamp.freeze(assembled(parts(), "nested", (8,)))
    frozen.save(tmp_path / "frozen.keras")
    loaded = tfamp.load_model(tmp_path / "frozen.keras")
    for weight, before in zip(loaded.weights, frozen.weights, strict=True):
        assert weight.dtype == before.dtype
    check_same(loaded, frozen)


def test_inputs_that_cannot_be_told_are_asked_for():
    model = mixed(OfWords(), "bfloat16", IDS)
    with pytest.raises(ValueError, match="Pass some .*`sample="):
        tfamp.freeze(model, in_place=True)
    assert model.table.dtype == "float32"
    frozen = tfamp.freeze(model, sample=IDS)
    assert frozen.table.dtype == "bfloat16"
    check_same(frozen, model, IDS)


def test_what_cannot_be_frozen_is_told():
    with pytest.raises(TypeError, match=r"expected a `keras\.Model`"):
        tfamp.freeze(L.Dense(2))
    with pytest.raises(ValueError, match="expected a built one"):
        tfamp.freeze(keras.Sequential([L.Dense(2)]))
    model = assembled([Own(lambda x: x), L.Dense(2)], "functional", (8,))
    model.layers[1].lock = threading.Lock()
    with pytest.raises(ValueError, match=r"Cannot copy .*\n?.*`in_place=True`"):
        tfamp.freeze(model)
    model.layers[-1].kernel.assign_add(np.full((8, 2), 1e5, np.float32))
    with pytest.raises(ValueError, match=r"reaches 1e\+05; .* Freeze in bfloat16"):
        tfamp.freeze(model, "float16", in_place=True)
    assert model.layers[-1].kernel.dtype == "float32"
