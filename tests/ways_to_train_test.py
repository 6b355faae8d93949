"""One line is enough in `fit` and in a step of one's own; a first call acts once."""

import keras
import numpy as np
import pytest

import tfamp
from tests.loops import OwnStep
from tests.recorded_operations import recorded_operations

layers = keras.layers
X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = (X.sum(-1) > 0).astype("int32")

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


class Subclassed(keras.Model):
    """A residual classifier."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(8, activation="relu")
        self.norm = layers.LayerNormalization()
        self.second = layers.Dense(8, activation="relu")
        self.head = layers.Dense(2, activation="softmax")

    def call(self, x):
        h = self.first(x)
        h = h + self.second(self.norm(h))
        return self.head(h)


class Own(OwnStep, Subclassed):
    """Writes its training step itself."""


@pytest.mark.quick("mixed_float16-Subclassed")
@pytest.mark.parametrize("build", [Subclassed, Own])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_fit_learns_with_products_in_half_and_heads_and_losses_in_float32(
    policy, build
):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy, check=None):  # whose run is in float32
        model = build()
    optimizer, loss = keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, jit_compile=False)
    with recorded_operations() as operations:
        history = model.fit(X, Y, epochs=30, verbose=0).history
    assert operations.of("Relu") == {policy.removeprefix("mixed_")}
    assert operations.of("Softmax") <= {"float32"}
    assert operations.of("SparseSoftmaxCrossEntropyWithLogits") == {"float32"}
    losses = history.get("own_loss", history.get("loss"))
    assert losses[-1] < losses[0] / 2


class Stateful(keras.Model):
    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization(momentum=0.5)
        self.drop = layers.Dropout(0.5, seed=3)
        self.head = layers.Dense(1)

    def call(self, x):
        return self.head(self.drop(self.norm(x)))


def test_statistics_and_seeds_move_once_in_the_first_call():
    with tfamp.scope("mixed_bfloat16"):
        model = Stateful()
    state = model.drop.seed_generator.state
    before = state.numpy()
    ones = np.ones((8, 2), "float32")
    model(ones, training=True)
    np.testing.assert_allclose(model.norm.moving_mean, [0.5, 0.5])
    np.testing.assert_array_equal(state.numpy(), before + np.array([0, 1]))
