"""Training without `fit`: own loops, several optimizers, tapes that persist."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.wild.programs import data
from tests.wild.programs.registry import Trained, program


@program("loops", "loop over batches with a tf.function, metrics by hand")
def loop_from_scratch():
    x, y = data.clusters(n=128)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    inputs = keras.Input((8,), name="points")
    h = layers.Dense(16, activation="relu")(inputs)
    h = layers.Dense(16, activation="relu")(h)
    model = keras.Model(inputs, layers.Dense(4)(h))
    optimizer = keras.optimizers.Adam(0.01)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    yield model

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss_value = loss_fn(y, logits)
            loss_value += sum(model.losses)
        grads = tape.gradient(loss_value, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights, strict=True))
        accuracy.update_state(y, logits)
        return loss_value

    losses = []
    for _ in range(8):
        batches = [float(train_step(*batch)) for batch in dataset]
        losses.append(np.mean(batches))
        accuracy.reset_state()
    yield Trained(losses, model, x[:4])


@program("loops", "eager loop, gradients clipped and summed over batches by hand")
def accumulation_by_hand():
    x, y = data.rows(n=64)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh")])
    model.add(layers.Dense(1))
    optimizer = keras.optimizers.SGD(0.05)
    yield model
    losses = []
    for _ in range(12):
        total, epoch = None, 0.0
        for start in range(0, 64, 16):
            batch = slice(start, start + 16)
            with tf.GradientTape() as tape:
                predicted = model(x[batch], training=True)
                loss = tf.reduce_mean(tf.square(y[batch] - predicted))
            grads = tape.gradient(loss, model.trainable_variables)
            grads = [tf.clip_by_norm(grad, 1.0) for grad in grads]
            summed = zip(total, grads, strict=True) if total else ()
            total = [a + b for a, b in summed] if total else grads
            epoch += float(loss) / 4
        optimizer.apply_gradients(zip(total, model.trainable_variables, strict=True))
        losses.append(epoch)
    yield Trained(losses, model, x[:4])


@program("loops", "persistent tape, two optimizers for parts of one model")
def persistent_tape():
    x, y = data.rows(n=64)
    wide = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    deep = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(1)]
    )
    yield wide, deep
    wide_optimizer = keras.optimizers.Ftrl(0.1)
    deep_optimizer = keras.optimizers.Adam(0.01)

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            wide_loss = tf.reduce_mean((y - wide(x)) ** 2)
            both = tf.reduce_mean((y - tf.stop_gradient(wide(x)) - deep(x)) ** 2)
        wide_grads = tape.gradient(wide_loss, wide.trainable_variables)
        deep_grads = tape.gradient(both, deep.trainable_variables)
        del tape
        wide_optimizer.apply_gradients(
            zip(wide_grads, wide.trainable_variables, strict=True)
        )
        deep_optimizer.apply_gradients(
            zip(deep_grads, deep.trainable_variables, strict=True)
        )
        return both

    yield Trained([float(step()) for _ in range(40)], deep, x[:4])


class CustomModel(keras.Model):
    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


@keras.saving.register_keras_serializable("wild")
class CustomFunctional(CustomModel):
    pass


@program("loops", "Functional subclass with its own train_step")
def own_train_step():
    x, y = data.rows(n=64)
    inputs = keras.Input((6,))
    h = layers.Dense(16, activation="tanh")(inputs)
    model = CustomFunctional(inputs, layers.Dense(1)(h))
    yield model
    model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=16, epochs=25, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


@program("loops", "loop with a weighted loss far below 1")
def tiny_losses():
    x, y = data.rows(n=64)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu")])
    model.add(layers.Dense(1))
    yield model
    optimizer = keras.optimizers.SGD(4e4)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = 1e-6 * tf.reduce_mean(tf.square(y - model(x, training=True)))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    yield Trained([1e6 * float(step(x, y)) for _ in range(40)], model, x[:4])


@program("loops", "adversarial images by the gradient of the input")
def adversarial_training():
    x, y = data.clusters(n=64)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu")])
    model.add(layers.Dense(4, activation="softmax"))
    yield model
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    optimizer = keras.optimizers.Adam(0.01)

    @tf.function
    def step(x, y):
        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_fn(y, model(x))
        attacked = x + 0.1 * tf.sign(tape.gradient(loss, x))
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(attacked, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    yield Trained([float(step(x, y)) for _ in range(40)], model, x[:4])


@program("loops", "second derivatives by a tape inside a tape")
def physics_informed():
    points = np.linspace(0, 1, 32, dtype="float32")[:, None]
    model = keras.Sequential(
        [
            keras.Input((1,)),
            layers.Dense(16, "tanh"),
            layers.Dense(16, "tanh"),
            layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.Adam(0.01)
    yield model

    @tf.function
    def step(t):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(t)
                u = model(t, training=True)
            slope = inner.gradient(u, t)
            start = tf.square(model(tf.zeros((1, 1))) - 1.0)
            loss = tf.reduce_mean(tf.square(slope + 2.0 * u)) + tf.reduce_mean(start)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    losses = [float(step(tf.constant(points))) for _ in range(40)]
    yield Trained(losses, model, points[:4])
