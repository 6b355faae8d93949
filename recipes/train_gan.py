"""Trains a generative adversarial network with a `train_step` of its own.

Nothing in it speaks of loss scales: under float16 tfamp scales both losses and gives
each optimizer a scale of its own.
Data: scikit-learn's 1,797 digits (8x8); no network needed.
Command: python recipes/train_gan.py
         python recipes/train_gan.py --policy=mixed_float16 --epochs=2
Time: 1 minute on 2 CPU cores in float32. There is no `build` for `tfamp compare`, as
the losses of such a game say nothing of quality.
Expect: blots that look like digits, printed in the end; neither loss goes to 0.
"""

import json

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tfamp

FLAGS = flags.FLAGS
if "get_ipython" in globals():  # in a notebook's cell, which may run again
    old = [f for f in FLAGS if "absl" not in FLAGS.find_module_defining_flag(f)]
    FLAGS.remove_flag_values(old)
flags.DEFINE_string("policy", "auto", "Dtype policy, or the file of a plan.")
flags.DEFINE_integer("epochs", 60, "Passes over the data.")
flags.DEFINE_integer("batch_size", 64, "Images in a batch.")
flags.DEFINE_float("learning_rate", 5e-4, "Of both.")
flags.DEFINE_integer("noise", 32, "Numbers that an image is made from.")
flags.DEFINE_integer("seed", 0, "Of weights and order.")
flags.DEFINE_boolean("smoke", False, "Two steps, to see that it runs.")


class GAN(keras.Model):
    """A generator, and a discriminator that tells what it makes from real images."""

    def __init__(self, noise: int) -> None:
        super().__init__()
        self.noise = noise
        self.seeds = keras.random.SeedGenerator(0)
        layers = keras.layers
        self.generator = keras.Sequential(
            [
                keras.Input((noise,)),
                layers.Dense(2 * 2 * 64),
                layers.LeakyReLU(0.2),
                layers.Reshape((2, 2, 64)),
                layers.Conv2DTranspose(64, 4, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Conv2DTranspose(32, 4, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Conv2D(1, 3, padding="same", activation="tanh"),
            ]
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(32, 4, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Conv2D(64, 4, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Flatten(),
                layers.Dropout(0.3),
                layers.Dense(1),
            ]
        )
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer):
        """Takes an optimizer for each of the two."""
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def make(self, number, training=False):
        """Returns so many images, values -1 to 1."""
        noise = keras.random.normal((number, self.noise), seed=self.seeds)
        return self.generator(noise, training=training)

    def train_step(self, real):
        """Teaches the discriminator, then the generator."""
        number = tf.shape(real)[0]
        truth = tf.concat([tf.ones((number, 1)), tf.zeros((number, 1))], axis=0)
        made = tf.cast(self.make(number, training=True), real.dtype)
        with tf.GradientTape() as tape:
            images = tf.concat([real, made], axis=0)
            d_loss = self.loss_of(truth, self.discriminator(images, training=True))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            found = self.discriminator(self.make(number, training=True))
            g_loss = self.loss_of(tf.ones((number, 1)), found)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    @property
    def metrics(self):
        """What Keras sets back at the start of an epoch."""
        return [self.d_loss, self.g_loss]


def main(argv: list[str]) -> None:
    """Trains, shows four images, and prints the losses as a line of JSON."""
    status = tfamp.enable(policy=FLAGS.policy)
    print(f"{status.policy}: {status.reason}")
    keras.utils.set_random_seed(FLAGS.seed)
    images = load_digits().images[..., np.newaxis].astype("float32") / 8 - 1
    pipeline = tfamp.data.Pipeline.from_arrays(images).shuffle(seed=FLAGS.seed)
    data = pipeline.batch(FLAGS.batch_size, drop_remainder=True).prefetch().build()
    gan = GAN(FLAGS.noise)
    gan.compile(
        keras.optimizers.Adam(FLAGS.learning_rate, beta_1=0.5),
        keras.optimizers.Adam(FLAGS.learning_rate, beta_1=0.5),
    )
    if FLAGS.smoke:
        data = data.take(2)
    epochs = 1 if FLAGS.smoke else FLAGS.epochs
    history = gan.fit(data, epochs=epochs, shuffle=False, verbose=2).history
    gray = keras.ops.convert_to_numpy(keras.ops.cast(gan.make(4), "float32"))[..., 0]
    for rows in zip(*((gray + 1) * 2.49).astype(int), strict=True):
        print("   ".join("".join(" .:*#"[v] * 2 for v in row) for row in rows))
    losses = {name: float(values[-1]) for name, values in history.items()}
    print(json.dumps({"policy": status.policy, **losses}))


if __name__ == "__main__":
    # The arguments of a notebook's kernel are not ours.
    main(FLAGS(["recipe"])) if "get_ipython" in globals() else app.run(main)
