"""A Sequential inside a layer in float32 takes its inputs unrounded."""

import keras
import numpy as np
import pytest

import tfamp

layers = keras.layers


@keras.saving.register_keras_serializable("inner_sequential")
class Block(layers.Layer):
    """A feed-forward block whose output is an output of the model too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.norm = layers.LayerNormalization()
        self.inner = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(4)])

    def call(self, x):
        hidden = self.norm(x)
        return hidden + self.inner(hidden)


def two_outputs():
    inputs = keras.Input((4,))
    hidden = Block()(layers.Dense(4)(inputs))
    return keras.Model(inputs, [layers.Dense(3)(hidden), hidden])


@pytest.mark.quick("mixed_float16")
@pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
@pytest.mark.filterwarnings("ignore:`build[(][)]` was called on layer")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_predictions_are_those_of_the_loaded_model(policy, tmp_path):
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    with tfamp.scope(policy):
        model = two_outputs()
    model.compile("sgd", ["mse", None])
    model.save(tmp_path / "model.keras")
    again = tfamp.load_model(tmp_path / "model.keras")
    for ours, loaded in zip(
        model.predict(x, verbose=0), again.predict(x, verbose=0), strict=True
    ):
        np.testing.assert_array_equal(ours, loaded)
    inner = model.layers[2].inner
    assert inner.inputs[0].dtype == "float32"


@pytest.mark.parametrize("way", ["apply", "keep"])
def test_a_block_that_becomes_float32_after_it_was_built_rounds_nothing(way):
    x = np.linspace(-1.0, 1.0, 16, dtype="float32").reshape(4, 4)
    keras.utils.set_random_seed(0)
    exact = Block(name="block")
    exact(x)
    keras.utils.set_random_seed(0)
    with tfamp.scope("mixed_bfloat16"):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, Block(name="block")(inputs))
    if way == "apply":
        tfamp.apply(model, "mixed_bfloat16", keep_float32=[Block])
    model.compile("sgd", "mse")  # the block is the head
    np.testing.assert_allclose(model.predict(x, verbose=0), exact(x), rtol=1e-6)
