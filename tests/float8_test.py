"""`model.quantize("float8")` under a loss scale trains as in float32.

Its scales and histories take what a tape gives them as their new values.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import TrueStep
from tests.replicas import two_replicas

pytestmark = [
    pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow"),
    pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`"),
]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(128, 16)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")


WAYS = {  # class of the model, options of its optimizer, replicas
    "fit": (keras.Model, {}, 1),
    "own step": (TrueStep, {}, 1),
    "accumulation": (keras.Model, {"gradient_accumulation_steps": 2}, 1),
    "clipped": (keras.Model, {"global_clipnorm": 0.05}, 1),
    "two replicas": (keras.Model, {}, 2),
}


def trained(cls, options, replicas):
    """Returns the losses of epochs, and what float8 keeps of them."""
    keras.utils.set_random_seed(0)
    strategy = two_replicas() if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        inputs = keras.Input((16,))
        hidden = keras.layers.Dense(32, activation="relu")(inputs)
        outputs = keras.layers.Dense(1, activation="sigmoid")(hidden)
        model = cls(inputs, outputs)
        model.quantize("float8")
        model.compile(keras.optimizers.SGD(0.1, **options), "binary_crossentropy")
    (losses,) = model.fit(X, Y, 16, 3, shuffle=False, verbose=0).history.values()
    kept = [v for v in model.trainable_variables if v.overwrite_with_gradient]
    # Those of gradients are at the loss scale.
    return losses, [np.asarray(v) for v in kept if "outputs_grad" not in v.path]


@pytest.mark.quick("fit", "accumulation")
@pytest.mark.parametrize(("cls", "options", "replicas"), WAYS.values(), ids=WAYS)
def test_it_trains_as_in_float32(cls, options, replicas):
    exact, values = trained(cls, options, replicas)
    with tfamp.scope("mixed_float16"):
        losses, kept = trained(cls, options, replicas)
    np.testing.assert_allclose(losses, exact, rtol=0.02)
    # Replicas keep the mean of theirs; in Keras the first one keeps its own.
    for value, other in zip(kept, values, strict=True) if replicas == 1 else ():
        np.testing.assert_allclose(value, other, atol=0.02 * np.abs(other).max())


@pytest.mark.parametrize("how", ["model", "layer"])
def test_a_model_in_float16_is_quantized_to_int8_which_stock_keras_refuses(how):
    x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    predictions = []
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(1)
        with tfamp.scope(policy):
            inputs = keras.Input((8,))
            hidden = keras.layers.Dense(16, "relu", name="first")(inputs)
            hidden = keras.layers.Dense(16, "relu", name="second")(hidden)
            model = keras.Model(inputs, keras.layers.Dense(2, name="last")(hidden))
            if how == "layer":
                model.get_layer("first").quantize("int8")
            else:
                model.quantize("int8")
            model.compile("sgd", "mse")
            model.fit(x, x[:, :2], verbose=0)
        predictions.append(model.predict(x, verbose=0))
    np.testing.assert_allclose(*predictions, atol=0.01)
    dtypes = {row.path: row.compute_dtype for row in tfamp.assignment(model)}
    assert dtypes["first"] == "float32"
    assert dtypes["second"] == ("float16" if how == "layer" else "float32")
