"""Healthy models with data of their own: ids, images of bytes, several inputs."""

from typing import Any

import keras
import numpy as np
from keras import layers

from benchmarks.faults.building import compiled


def embedding(seed: int) -> Any:
    """Ids, an embedding and its mean."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng([seed, 5])
    model = keras.Sequential(
        [
            keras.Input((12,), dtype="int32"),
            layers.Embedding(5000, 16),
            layers.GlobalAveragePooling1D(),
            layers.Dense(16, activation="relu"),
            layers.Dense(4, activation="softmax"),
        ]
    )
    # Embeddings as training leaves them: as made, they give nearly equal outputs.
    table = model.layers[0]
    table.set_weights([rng.normal(size=(5000, 16)).astype("float32")])
    data = [
        (rng.integers(0, 5000, (16, 12)).astype("int32"), rng.integers(0, 4, 16))
        for _ in range(2)
    ]
    return compiled(model, "sparse_categorical_crossentropy"), data


def autoencoder(seed: int) -> Any:
    """An encoder and a decoder, each a Sequential model."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng([seed, 6])
    encoder = keras.Sequential(
        [
            keras.Input((32,)),
            layers.Dense(16, activation="relu"),
            layers.Dense(4, name="code"),
        ],
        name="encoder",
    )
    decoder = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(16, activation="relu"),
            layers.Dense(32, name="rebuilt"),
        ],
        name="decoder",
    )
    inputs = keras.Input((32,))
    model = keras.Model(inputs, decoder(encoder(inputs)))
    x = rng.normal(size=(2, 16, 32)).astype("float32")
    return compiled(model), [(batch, batch) for batch in x]


def many_ways(seed: int) -> Any:
    """Two inputs, two outputs."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng([seed, 8])
    image, table = keras.Input((6, 6, 2)), keras.Input((5,))
    a = layers.Flatten()(layers.Conv2D(4, 3, activation="relu")(image))
    b = layers.Dense(8, activation="relu")(table)
    x = layers.Dense(16, activation="relu")(layers.Concatenate()([a, b]))
    number = layers.Dense(1, name="number")(x)
    share = layers.Dense(1, activation="sigmoid", name="share")(x)
    model = keras.Model([image, table], [number, share])
    data = [
        (
            (
                rng.normal(size=(16, 6, 6, 2)).astype("float32"),
                rng.normal(size=(16, 5)).astype("float32"),
            ),
            (
                rng.normal(size=(16, 1)).astype("float32"),
                rng.integers(0, 2, (16, 1)).astype("float32"),
            ),
        )
        for _ in range(2)
    ]
    return compiled(model, ["mse", "binary_crossentropy"]), data


def _scaled(x: Any) -> Any:
    """Inputs of 0 to 255, which a Rescaling takes to size one."""
    x = layers.Rescaling(1 / 255.0)(x)
    x = layers.Conv2D(8, 3, activation="relu")(x)
    return layers.Flatten()(layers.MaxPooling2D()(x))


def images_of_bytes(seed: int) -> Any:
    """Images of 0 to 255, float32."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng([seed, 9])
    inputs = keras.Input((6, 6, 3))
    model = keras.Model(inputs, layers.Dense(3, name="head")(_scaled(inputs)))
    x = rng.integers(0, 256, (2, 8, 6, 6, 3)).astype("float32")
    y = rng.normal(size=(2, 8, 3)).astype("float32")
    return compiled(model), list(zip(x, y, strict=True))
