"""`model.build(...)` ahead of `compile` and `fit`, in the ways that people write it."""

import keras
import numpy as np
import pytest

import tfamp

X = np.random.default_rng(0).normal(size=(32, 12)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")
POLICIES = ["float32", "mixed_bfloat16", "mixed_float16"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:'mixed_.*float16' will be slow"),
    # What Keras says of a model without a `build` of its own.
    pytest.mark.filterwarnings("ignore:.build... was called on layer"),
]


class Classifier(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="relu")
        self.norm = keras.layers.BatchNormalization()
        self.head = keras.layers.Dense(2)

    def call(self, x, training=None):
        return self.head(self.norm(self.hidden(x), training=training))


class WithOwnBuild(Classifier):
    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones")
        self.built = True

    def call(self, x, training=None):
        return super().call(x * self.scale, training=training)


class Nested(keras.Model):
    """Holds blocks without a `build`, and one that is never called."""

    def __init__(self):
        super().__init__()
        self.blocks = [Classifier(), keras.Sequential([keras.layers.Dense(4)])]
        self.spare = keras.layers.Dense(3)
        self.head = keras.layers.Dense(2)

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(x)


def compiled(model):
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_first", [True, False], ids=["ahead", "behind compile"])
@pytest.mark.parametrize("cls", [Classifier, WithOwnBuild, Nested])
def test_a_model_that_is_built_by_its_shape_trains(cls, is_first, policy):
    with tfamp.scope(policy):
        model = cls()
        if is_first:
            model.build((None, 12))
            compiled(model)
        else:
            compiled(model)
            model.build((None, 12))
    before = model.hidden.get_weights() if cls is not Nested else []
    losses = model.fit(X, Y, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    after = model.hidden.get_weights() if cls is not Nested else []
    assert all(np.any(a != b) for a, b in zip(before, after, strict=False))
    assert model.predict(X, verbose=0).dtype == "float32"
