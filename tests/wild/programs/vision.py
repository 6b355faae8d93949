"""Images: classifiers, segmentation, super-resolution, training tricks."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

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


@program("vision", "Functional, residual blocks in a loop")
def small_xception():
    x, y = data.images(n=512)
    inputs = keras.Input((8, 8, 1))
    h = layers.Rescaling(2.0, offset=-1.0)(inputs)
    h = layers.Conv2D(4, 3, strides=2, padding="same")(h)
    h = layers.BatchNormalization()(h)
    h = layers.Activation("relu")(h)
    previous = h
    for size in (4, 8):
        h = layers.Activation("relu")(h)
        h = layers.SeparableConv2D(size, 3, padding="same")(h)
        h = layers.BatchNormalization()(h)
        h = layers.MaxPooling2D(3, strides=2, padding="same")(h)
        residual = layers.Conv2D(size, 1, strides=2, padding="same")(previous)
        h = layers.add([h, residual])
        previous = h
    h = layers.GlobalAveragePooling2D()(h)
    outputs = layers.Dense(4)(layers.Dropout(0.1)(h))
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    yield model
    history = model.fit(x, y, batch_size=16, epochs=6, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


@keras.saving.register_keras_serializable("wild")
class Patches(layers.Layer):
    def __init__(self, patch_size, **kwargs):
        super().__init__(**kwargs)
        self.patch_size = patch_size

    def call(self, images):
        batch, height, width, channels = ops.shape(images)
        rows, columns = height // self.patch_size, width // self.patch_size
        patches = ops.image.extract_patches(images, size=self.patch_size)
        return ops.reshape(
            patches, (batch, rows * columns, self.patch_size**2 * channels)
        )

    def get_config(self):
        return {**super().get_config(), "patch_size": self.patch_size}


@keras.saving.register_keras_serializable("wild")
class PatchEncoder(layers.Layer):
    def __init__(self, num_patches, projection_dim, **kwargs):
        super().__init__(**kwargs)
        self.num_patches = num_patches
        self.projection_dim = projection_dim
        self.projection = layers.Dense(projection_dim)
        self.position_embedding = layers.Embedding(num_patches, projection_dim)

    def build(self, input_shape):
        self.projection.build(input_shape)
        self.position_embedding.build((1, self.num_patches))
        self.built = True

    def call(self, patch):
        positions = ops.expand_dims(ops.arange(0, self.num_patches), axis=0)
        return self.projection(patch) + self.position_embedding(positions)

    def get_config(self):
        return {
            **super().get_config(),
            "num_patches": self.num_patches,
            "projection_dim": self.projection_dim,
        }


def mlp(x, hidden_units):
    for units in hidden_units:
        x = layers.Dense(units, activation=keras.activations.gelu)(x)
    return x


@program("vision", "Functional with own layers")
def vision_transformer():
    x, y = data.images(n=48)
    inputs = keras.Input((8, 8, 1))
    encoded = PatchEncoder(16, 8)(Patches(2)(inputs))
    for _ in range(2):
        x1 = layers.LayerNormalization(epsilon=1e-6)(encoded)
        attended = layers.MultiHeadAttention(2, 4, dropout=0.1)(x1, x1)
        x2 = layers.Add()([attended, encoded])
        x3 = layers.LayerNormalization(epsilon=1e-6)(x2)
        encoded = layers.Add()([mlp(x3, (16, 8)), x2])
    representation = layers.LayerNormalization(epsilon=1e-6)(encoded)
    features = mlp(layers.Flatten()(representation), (16,))
    model = keras.Model(inputs, layers.Dense(4)(features))
    yield model
    model.compile(
        keras.optimizers.AdamW(0.005, weight_decay=1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    history = model.fit(x, y, batch_size=16, epochs=4, verbose=0)
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


@program("vision", "Functional over tf.nn")
def super_resolution():
    fine, _ = data.images(n=16)
    coarse = tf.image.resize(fine, (4, 4)).numpy()
    inputs = keras.Input((None, None, 1))
    h = layers.Conv2D(4, 3, activation="relu", padding="same")(inputs)
    h = layers.Conv2D(4, 3, activation="relu", padding="same")(h)
    outputs = layers.Lambda(depth_to_space)(h)
    model = keras.Model(inputs, outputs)
    yield model
    model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError())
    history = model.fit(coarse, fine, batch_size=8, epochs=6, verbose=0)
    yield Trained(history.history["loss"], model, coarse[:2])


@keras.saving.register_keras_serializable("wild")
def depth_to_space(x):
    return tf.nn.depth_to_space(x, 2)


@program("vision", "tf.data with mixup, soft labels")
def mixup():
    x, y = data.images(n=48)
    y = keras.utils.to_categorical(y, 4).astype("float32")
    one = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(48, seed=1).batch(16)
    two = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(48, seed=2).batch(16)

    def mix(first, second):
        share = tf.random.stateless_uniform((16, 1), seed=(1, 2))
        images = first[0] * share[:, :, None, None] + second[0] * (
            1 - share[:, :, None, None]
        )
        return images, first[1] * share + second[1] * (1 - share)

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dense(4),
            layers.Softmax(),
        ]
    )
    yield model
    model.compile(keras.optimizers.Adam(0.01), "categorical_crossentropy")
    history = model.fit(tf.data.Dataset.zip((one, two)).map(mix), epochs=6, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


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


@program("vision", "Functional, image and box heads")
def object_detection():
    x, y = data.images(n=256)
    boxes = np.stack([y / 4, np.zeros(256), (y + 1) / 4, np.ones(256)], axis=1)
    inputs = keras.Input((8, 8, 1))
    h = layers.Conv2D(4, 3, strides=2, activation="relu")(inputs)
    h = layers.Flatten()(h)
    h = layers.Dense(16, activation="relu")(h)
    box = layers.Dense(4, name="box")(h)
    label = layers.Dense(4, activation="softmax", name="label")(h)
    model = keras.Model(inputs, {"box": box, "label": label})
    yield model
    model.compile(
        keras.optimizers.Adam(0.01),
        {"box": keras.losses.Huber(), "label": "sparse_categorical_crossentropy"},
        metrics={"label": ["accuracy"]},
        loss_weights={"box": 10.0, "label": 1.0},
    )
    history = model.fit(x, {"box": boxes, "label": y}, 16, 12, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])
