"""Images and numbers made from noise: each model with its own way to train."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.wild.programs import data
from tests.wild.programs.registry import Trained, program


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


class GAN(keras.Model):
    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real_images):
        batch_size = ops.shape(real_images)[0]
        noise = keras.random.normal(
            (batch_size, self.latent_dim), seed=self.seed_generator
        )
        generated = self.generator(noise)
        combined = ops.concatenate([generated, real_images], axis=0)
        labels = ops.concatenate(
            [ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0
        )
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(
            zip(grads, self.discriminator.trainable_weights, strict=True)
        )
        noise = keras.random.normal(
            (batch_size, self.latent_dim), seed=self.seed_generator
        )
        misleading = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(misleading, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(
            zip(grads, self.generator.trainable_weights, strict=True)
        )
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {
            "d_loss": self.d_loss_metric.result(),
            "g_loss": self.g_loss_metric.result(),
        }


def image_critic(**head):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dense(1, **head),
        ],
        name="critic",
    )


def image_generator(latent_dim):
    return keras.Sequential(
        [
            keras.Input((latent_dim,)),
            layers.Dense(4 * 4 * 4),
            layers.Reshape((4, 4, 4)),
            layers.Conv2DTranspose(4, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


@program("generative", "own compile(d_optimizer=, g_optimizer=) and train_step")
def dcgan():
    x, _ = data.images(n=64)
    discriminator = image_critic(activation="sigmoid")
    generator = image_generator(4)
    yield discriminator, generator
    gan = GAN(discriminator, generator, 4)
    gan.compile(
        d_optimizer=keras.optimizers.Adam(0.002),
        g_optimizer=keras.optimizers.Adam(0.002),
        loss_fn=keras.losses.BinaryCrossentropy(),
    )
    history = gan.fit(x, epochs=8, batch_size=16, verbose=0)
    noise = np.random.RandomState(0).normal(size=(2, 4)).astype("float32")
    yield Trained(history.history["d_loss"], generator, noise)


class WGAN(keras.Model):
    def __init__(self, discriminator, generator, latent_dim, gp_weight=10.0):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.gp_weight = gp_weight

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.d_loss_fn = d_loss_fn
        self.g_loss_fn = g_loss_fn

    def gradient_penalty(self, batch_size, real_images, fake_images):
        alpha = tf.random.uniform([batch_size, 1, 1, 1], 0.0, 1.0)
        interpolated = real_images + alpha * (fake_images - real_images)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1, 2, 3]) + 1e-8)
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real_images):
        batch_size = tf.shape(real_images)[0]
        for _ in range(2):
            noise = tf.random.normal(shape=(batch_size, self.latent_dim))
            with tf.GradientTape() as tape:
                fake_images = self.generator(noise, training=True)
                fake_logits = self.discriminator(fake_images, training=True)
                real_logits = self.discriminator(real_images, training=True)
                d_cost = self.d_loss_fn(real_logits, fake_logits)
                gp = self.gradient_penalty(batch_size, real_images, fake_images)
                d_loss = d_cost + gp * self.gp_weight
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(
                zip(d_gradient, self.discriminator.trainable_variables, strict=True)
            )
        noise = tf.random.normal(shape=(batch_size, self.latent_dim))
        with tf.GradientTape() as tape:
            generated = self.generator(noise, training=True)
            g_loss = self.g_loss_fn(self.discriminator(generated, training=True))
        gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(
            zip(gen_gradient, self.generator.trainable_variables, strict=True)
        )
        return {"d_loss": d_loss, "g_loss": g_loss}


@program("generative", "own train_step, a tape inside a tape")
def wgan_gp():
    x, _ = data.images(n=32)
    discriminator = image_critic()
    generator = image_generator(4)
    yield discriminator, generator
    wgan = WGAN(discriminator, generator, 4)
    wgan.compile(
        d_optimizer=keras.optimizers.Adam(0.001, beta_1=0.5, beta_2=0.9),
        g_optimizer=keras.optimizers.Adam(0.001, beta_1=0.5, beta_2=0.9),
        g_loss_fn=lambda fake: -tf.reduce_mean(fake),
        d_loss_fn=lambda real, fake: tf.reduce_mean(fake) - tf.reduce_mean(real),
    )
    history = wgan.fit(x, batch_size=16, epochs=6, verbose=0)
    noise = np.random.RandomState(0).normal(size=(2, 4)).astype("float32")
    yield Trained(history.history["d_loss"], generator, noise)


@keras.saving.register_keras_serializable("wild")
def sinusoidal_embedding(x):
    frequencies = ops.exp(ops.linspace(ops.log(1.0), ops.log(100.0), 4))
    angles = ops.cast(2.0 * np.pi * frequencies, x.dtype) * x
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)


def denoiser():
    noisy = keras.Input((8, 8, 1))
    variances = keras.Input((1, 1, 1))
    e = layers.Lambda(sinusoidal_embedding, output_shape=(1, 1, 8))(variances)
    e = layers.UpSampling2D(size=8, interpolation="nearest")(e)
    h = layers.Conv2D(4, 1)(noisy)
    h = layers.Concatenate()([h, e])
    h = layers.BatchNormalization(center=False, scale=False)(h)
    h = layers.Conv2D(8, 3, padding="same", activation="swish")(h)
    h = layers.Conv2D(1, 1, kernel_initializer="zeros")(h)
    return keras.Model([noisy, variances], h, name="residual_unet")


class DiffusionModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = denoiser()
        self.ema_network = keras.models.clone_model(self.network)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker]

    def diffusion_schedule(self, times):
        start, end = ops.arccos(0.95), ops.arccos(0.02)
        angles = start + times * (end - start)
        return ops.sin(angles), ops.cos(angles)

    def train_step(self, images):
        images = self.normalizer(images, training=True)
        noises = keras.random.normal(shape=ops.shape(images))
        times = keras.random.uniform(shape=(ops.shape(images)[0], 1, 1, 1))
        noise_rates, signal_rates = self.diffusion_schedule(times)
        noisy_images = signal_rates * images + noise_rates * noises
        with tf.GradientTape() as tape:
            predicted = self.network([noisy_images, noise_rates**2], training=True)
            noise_loss = self.loss(noises, predicted)
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.network.trainable_weights, strict=True)
        )
        self.noise_loss_tracker.update_state(noise_loss)
        for weight, ema in zip(
            self.network.weights, self.ema_network.weights, strict=True
        ):
            ema.assign(0.9 * ema + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}


@program("generative", "subclassed, clone_model and an average of weights")
def diffusion():
    x, _ = data.images(n=64)
    model = DiffusionModel()
    model.normalizer.adapt(x)
    yield model.network, model.ema_network, model.normalizer
    model.compile(
        optimizer=keras.optimizers.AdamW(0.01, weight_decay=1e-4),
        loss=keras.losses.mean_absolute_error,
    )
    history = model.fit(x, epochs=30, batch_size=16, verbose=0)
    ones = np.ones((2, 1, 1, 1), "float32")
    yield Trained(history.history["n_loss"], model.ema_network, [x[:2], 0.5 * ones])
