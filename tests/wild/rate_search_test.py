"""`lr_find` on small trainings: what it suggests, and what it calls the highest."""

import keras
import numpy as np
import pytest
from keras import layers

import tfamp

RNG = np.random.default_rng(5)


def house_prices():
    x = RNG.normal(size=(1024, 12)).astype("float32")
    y = (x @ RNG.normal(size=(12, 1)) + 0.1 * RNG.normal(size=(1024, 1))).astype("f4")
    hidden = layers.Dense(24, activation="relu")
    return [keras.Input((12,)), hidden, layers.Dense(1)], "mse", x, y


def digits():
    y = RNG.integers(0, 5, 1024)
    x = (np.eye(5)[y] @ RNG.normal(size=(5, 64)) + RNG.normal(size=(1024, 64))) / 2
    image = x.reshape(-1, 8, 8, 1).astype("float32")
    parts = [layers.Conv2D(8, 3, activation="relu"), layers.GlobalMaxPooling2D()]
    head = layers.Dense(5, activation="softmax")
    loss = "sparse_categorical_crossentropy"
    return [keras.Input((8, 8, 1)), *parts, head], loss, image, y


@pytest.mark.quick("sgd-house_prices")
@pytest.mark.parametrize("task", [house_prices, digits])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.01),
        lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
        lambda: keras.optimizers.Adam(),
        lambda: keras.optimizers.Lion(),
        lambda: keras.optimizers.RMSprop(),
    ],
    ids=["sgd", "momentum", "adam", "lion", "rmsprop"],
)
def test_the_suggestion_is_no_higher_than_the_highest_and_trains(task, optimizer):
    keras.utils.set_random_seed(2)
    parts, loss, x, y = task()
    model = keras.Sequential(parts)
    model.compile(optimizer(), loss)
    found = tfamp.training.lr_find(model, (x, y), batch_size=64)
    assert found.suggestion <= found.highest
    assert f"{found.highest:.3g}, is about the highest" in found.why

    model.optimizer.learning_rate = found.suggestion
    before = model.evaluate(x, y, verbose=0)
    model.fit(x, y, batch_size=64, epochs=3, verbose=0)
    assert model.evaluate(x, y, verbose=0) < before
