"""Images: classifiers, segmentation, super-resolution, training tricks."""

import keras
from keras import layers

from tests.wild.programs import data
from tests.wild.programs.registry import Trained, program


@program("vision", "Sequential")
def digits_convnet():
    x, y = data.images(n=256)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.1),
            layers.Dense(4, activation="softmax"),
        ]
    )
    yield model
    model.compile(
        keras.optimizers.Adam(0.02),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = model.fit(x, y, batch_size=16, epochs=6, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


@program("vision", "Functional, encoder and decoder with skips")
def unet_segmentation():
    x, _ = data.images(n=16)
    masks = (x > 0.6).astype("uint8")
    inputs = keras.Input((8, 8, 1))
    h = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    skip = h
    h = layers.Conv2D(4, 3, strides=2, padding="same")(h)
    h = layers.BatchNormalization()(h)
    h = layers.ReLU()(h)
    h = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(h)
    h = layers.concatenate([h, skip])
    outputs = layers.Conv2D(2, 3, activation="softmax", padding="same")(h)
    model = keras.Model(inputs, outputs)
    yield model
    model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy")
    history = model.fit(x, masks, batch_size=8, epochs=4, verbose=0)
    yield Trained(history.history["loss"], model, x[:2])


@program(
    "vision",
    "augmentation in the model, frozen base, fine-tuning",
    unsteady="augmentation and dropout draw other numbers in half precision",
)
def transfer_learning():
    x, y = data.images(n=128)
    base = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, strides=2, activation="relu"),
            layers.BatchNormalization(),
        ],
        name="base",
    )
    base.trainable = False
    inputs = keras.Input((8, 8, 1))
    h = layers.RandomFlip("vertical", seed=1)(inputs)
    h = layers.RandomTranslation(0.1, 0.0, seed=2)(h)
    h = layers.Rescaling(2.0, offset=-1.0)(h)
    h = base(h, training=False)
    h = layers.Flatten()(h)
    outputs = layers.Dense(4)(layers.Dropout(0.1)(h))
    model = keras.Model(inputs, outputs)
    yield model
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss)
    first = model.fit(x, y, batch_size=16, epochs=10, verbose=0)
    base.trainable = True
    model.compile(keras.optimizers.Adam(0.002), loss)
    second = model.fit(x, y, batch_size=16, epochs=15, verbose=0)
    yield Trained(first.history["loss"] + second.history["loss"], model, x[:4])
