"""Graphs, audio, series, and models of several models."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.wild.programs import data
from tests.wild.programs.registry import Trained, program


@keras.saving.register_keras_serializable("wild")
def ctc_loss(y_true, y_pred):
    batch = ops.shape(y_true)[0]
    input_length = ops.shape(y_pred)[1] * ops.ones((batch,), dtype="int32")
    label_length = ops.shape(y_true)[1] * ops.ones((batch,), dtype="int32")
    return ops.ctc_loss(y_true, y_pred, label_length, input_length, mask_index=0)


@program("audio", "Functional, own loss function over ops.ctc_loss")
def speech_to_letters():
    random = np.random.RandomState(0)
    y = random.randint(1, 5, (32, 3)).astype("int32")
    x = np.repeat(np.eye(5)[y], 4, axis=1) + random.normal(0, 0.1, (32, 12, 5))
    inputs = keras.Input((None, 5), name="input")
    h = layers.Reshape((-1, 5, 1))(inputs)
    h = layers.Conv2D(2, (3, 3), padding="same", use_bias=False)(h)
    h = layers.BatchNormalization()(h)
    h = layers.ReLU()(h)
    h = layers.Reshape((-1, 10))(h)
    h = layers.Bidirectional(layers.GRU(8, return_sequences=True))(h)
    h = layers.Dropout(0.1)(h)
    model = keras.Model(inputs, layers.Dense(6)(h))
    yield model
    model.compile(keras.optimizers.Adam(0.01), loss=ctc_loss)
    history = model.fit(x.astype("float32"), y, batch_size=8, epochs=15, verbose=0)
    yield Trained(history.history["loss"], model, x[:2].astype("float32"))


@keras.saving.register_keras_serializable("wild")
class Sampling(layers.Layer):
    def call(self, inputs):
        z_mean, z_log_var = inputs
        batch = tf.shape(z_mean)[0]
        dim = tf.shape(z_mean)[1]
        epsilon = tf.random.normal(shape=(batch, dim))
        return z_mean + tf.exp(0.5 * z_log_var) * epsilon


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker]

    def train_step(self, images):
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder(images)
            reconstruction = self.decoder(z)
            reconstruction_loss = ops.mean(
                ops.sum(
                    keras.losses.binary_crossentropy(images, reconstruction),
                    axis=(1, 2),
                )
            )
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.total_loss_tracker.update_state(total_loss)
        return {"loss": self.total_loss_tracker.result()}


@program("generative", "subclassed, own train_step, a layer that draws noise")
def vae():
    x, _ = data.images(n=64)
    x = np.clip(x, 0, 1)
    inputs = keras.Input((8, 8, 1))
    h = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(inputs)
    h = layers.Dense(16, activation="relu")(layers.Flatten()(h))
    z_mean = layers.Dense(2, name="z_mean")(h)
    z_log_var = layers.Dense(2, name="z_log_var")(h)
    z = Sampling()([z_mean, z_log_var])
    encoder = keras.Model(inputs, [z_mean, z_log_var, z], name="encoder")
    latent_inputs = keras.Input((2,))
    h = layers.Dense(4 * 4 * 4, activation="relu")(latent_inputs)
    h = layers.Reshape((4, 4, 4))(h)
    outputs = layers.Conv2DTranspose(
        1, 3, activation="sigmoid", strides=2, padding="same"
    )(h)
    decoder = keras.Model(latent_inputs, outputs, name="decoder")
    model = VAE(encoder, decoder)
    yield encoder, decoder
    model.compile(optimizer=keras.optimizers.Adam(0.005))
    history = model.fit(x, epochs=10, batch_size=16, verbose=0)
    yield Trained(history.history["loss"], decoder, np.ones((2, 2), "float32"))


def embedder(width=8):
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(width),
        ],
        name="embedder",
    )


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(self, optimizer, student_loss_fn, distillation_loss_fn, **options):
        super().compile(optimizer=optimizer)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = options["alpha"]
        self.temperature = options["temperature"]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


@program("distillation", "own compute_loss over two models")
def distillation():
    x, y = data.clusters(n=128)
    teacher = embedder(4)
    student = keras.Sequential([keras.Input((8,)), layers.Dense(4)], name="student")
    yield teacher, student
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    teacher.compile(keras.optimizers.Adam(0.01), loss)
    teacher.fit(x, y, batch_size=32, epochs=4, verbose=0)
    distiller = Distiller(student, teacher)
    distiller.compile(
        keras.optimizers.Adam(0.01),
        student_loss_fn=loss,
        distillation_loss_fn=keras.losses.KLDivergence(),
        alpha=0.1,
        temperature=3,
    )
    history = distiller.fit(x, y, batch_size=32, epochs=8, verbose=0)
    yield Trained(history.history["loss"], student, x[:4])


@program("timeseries", "Functional with ConvLSTM2D over frames")
def next_frame():
    random = np.random.RandomState(0)
    x = np.cumsum(random.normal(0, 0.1, (8, 5, 6, 6, 1)), axis=1).astype("float32")
    inputs = keras.Input((None, 6, 6, 1))
    h = layers.ConvLSTM2D(4, 3, padding="same", return_sequences=True)(inputs)
    h = layers.BatchNormalization()(h)
    outputs = layers.Conv3D(1, 3, padding="same")(h)
    model = keras.Model(inputs, outputs)
    yield model
    model.compile(keras.optimizers.Adam(0.01), loss="mse")
    history = model.fit(x[:, :-1], x[:, 1:], batch_size=4, epochs=4, verbose=0)
    yield Trained(history.history["loss"], model, x[:2, :-1])
