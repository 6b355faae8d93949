"""One line is enough in `fit`, custom steps and loops, on replicas and in bulk."""

import keras
import numpy as np
import pytest

import tfamp
from tests.loops import OwnStep
from tests.recorded_operations import recorded_operations

layers = keras.layers
rng = np.random.default_rng(0)
X = rng.normal(size=(32, 4)).astype("float32")
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


def functional():
    x = keras.Input((4,))
    h = layers.Dense(8, activation="relu")(x)
    h = layers.Add()([h, layers.Dense(8, activation="relu")(h)])
    return keras.Model(x, layers.Dense(2, activation="softmax")(h))


def compiled(build, **options):
    model = build()
    optimizer, loss = keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, jit_compile=False, **options)
    return model


def check_dtypes(operations, half):
    """The trunk's products are half, the head and the loss are float32."""
    assert operations.of("Relu") == {half}
    assert operations.of("Softmax") <= {"float32"}
    assert operations.of("SparseSoftmaxCrossEntropyWithLogits") == {"float32"}


@pytest.mark.quick("mixed_float16-Subclassed")
@pytest.mark.parametrize("build", [functional, Subclassed, Own])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_fit_learns(policy, build):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy, check=None):  # whose run is in float32
        model = compiled(build)
    with recorded_operations() as operations:
        history = model.fit(X, Y, epochs=30, verbose=0).history
    check_dtypes(operations, policy.removeprefix("mixed_"))
    losses = history.get("own_loss", history.get("loss"))
    assert losses[-1] < losses[0] / 2


def test_moving_statistics_move_once_in_the_first_call():
    class Normalized(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization(momentum=0.5)
            self.head = layers.Dense(1)

        def call(self, x):
            return self.head(self.norm(x))

    with tfamp.scope("mixed_bfloat16"):
        model = Normalized()
    ones = np.ones((8, 2), "float32")
    model(ones, training=True)
    np.testing.assert_allclose(model.norm.moving_mean, [0.5, 0.5])


def test_dropout_draws_once_in_the_first_call():
    class Dropped(keras.Model):
        def __init__(self):
            super().__init__()
            self.drop = layers.Dropout(0.5, seed=3)
            self.head = layers.Dense(1)

        def call(self, x):
            return self.head(self.drop(x))

    with tfamp.scope("mixed_bfloat16"):
        model = Dropped()
    state = model.drop.seed_generator.state.numpy()
    model(np.ones((8, 2), "float32"), training=True)
    np.testing.assert_array_equal(
        model.drop.seed_generator.state.numpy(), state + np.array([0, 1])
    )
