"""Learning from pairs, other models and no labels: distances and distillation."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.wild.programs import data
from tests.wild.programs.registry import Trained, program


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


class DistanceLayer(layers.Layer):
    def call(self, anchor, positive, negative):
        near = ops.sum(tf.square(anchor - positive), -1)
        far = ops.sum(tf.square(anchor - negative), -1)
        return near, far


class SiameseModel(keras.Model):
    def __init__(self, siamese_network, margin=0.5):
        super().__init__()
        self.siamese_network = siamese_network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.siamese_network(inputs)

    def train_step(self, triplets):
        with tf.GradientTape() as tape:
            near, far = self.siamese_network(triplets)
            loss = tf.maximum(near - far + self.margin, 0.0)
        gradients = tape.gradient(loss, self.siamese_network.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.siamese_network.trainable_weights, strict=True)
        )
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


@program("metric learning", "own train_step over a vector of losses, shared layers")
def siamese_triplets():
    x, y = data.clusters(n=128)
    random = np.random.RandomState(1)
    same = np.array([random.choice(np.flatnonzero(y == label)) for label in y])
    other = np.array([random.choice(np.flatnonzero(y != label)) for label in y])
    triplets = tf.data.Dataset.from_tensor_slices((x, x[same], x[other])).batch(32)
    embedding = embedder()
    inputs = [keras.Input((8,), name=name) for name in ("a", "p", "n")]
    distances = DistanceLayer()(*(embedding(part) for part in inputs))
    network = keras.Model(inputs, distances)
    model = SiameseModel(network)
    yield network
    model.compile(optimizer=keras.optimizers.Adam(0.001))
    history = model.fit(triplets.map(lambda *parts: (parts,)), epochs=40, verbose=0)
    yield Trained(history.history["loss"], embedding, x[:4])


class ContrastiveModel(keras.Model):
    def __init__(self, encoder, projection_head, linear_probe):
        super().__init__()
        self.temperature = 0.1
        self.encoder = encoder
        self.projection_head = projection_head
        self.linear_probe = linear_probe

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @property
    def metrics(self):
        return [self.contrastive_loss_tracker, self.probe_loss_tracker]

    def contrastive_loss(self, projections_1, projections_2):
        projections_1 = ops.normalize(projections_1, axis=1)
        projections_2 = ops.normalize(projections_2, axis=1)
        similarities = ops.matmul(projections_1, ops.transpose(projections_2))
        similarities = similarities / self.temperature
        labels = ops.arange(ops.shape(projections_1)[0])
        one_way = keras.losses.sparse_categorical_crossentropy(
            labels, similarities, from_logits=True
        )
        other_way = keras.losses.sparse_categorical_crossentropy(
            labels, ops.transpose(similarities), from_logits=True
        )
        return (one_way + other_way) / 2

    def train_step(self, batch):
        points, labels = batch
        first = points + 0.3 * tf.random.normal(tf.shape(points))
        second = points + 0.3 * tf.random.normal(tf.shape(points))
        with tf.GradientTape() as tape:
            projections_1 = self.projection_head(self.encoder(first, training=True))
            projections_2 = self.projection_head(self.encoder(second, training=True))
            loss = self.contrastive_loss(projections_1, projections_2)
        weights = self.encoder.trainable_weights
        weights = weights + self.projection_head.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.contrastive_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.contrastive_loss_tracker.update_state(loss)
        with tf.GradientTape() as tape:
            class_logits = self.linear_probe(self.encoder(points, training=False))
            probe_loss = self.probe_loss(labels, class_logits)
        gradients = tape.gradient(probe_loss, self.linear_probe.trainable_weights)
        self.probe_optimizer.apply_gradients(
            zip(gradients, self.linear_probe.trainable_weights, strict=True)
        )
        self.probe_loss_tracker.update_state(probe_loss)
        return {m.name: m.result() for m in self.metrics}


@program("metric learning", "own compile with two optimizers, own train_step")
def simclr():
    x, y = data.clusters(n=128)
    encoder = embedder()
    head = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, activation="relu"), layers.Dense(8)]
    )
    probe = keras.Sequential([keras.Input((8,)), layers.Dense(4)])
    model = ContrastiveModel(encoder, head, probe)
    yield encoder, head, probe
    model.compile(
        contrastive_optimizer=keras.optimizers.Adam(0.005),
        probe_optimizer=keras.optimizers.Adam(0.01),
    )
    history = model.fit(x, y, batch_size=32, epochs=8, verbose=0)
    yield Trained(history.history["c_loss"], encoder, x[:4])


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


class OldDistiller(keras.Model):
    def __init__(self, student, teacher, optimizer):
        super().__init__()
        self.teacher, self.student = teacher, student
        self.student_optimizer = optimizer

    def train_step(self, batch):
        x, y = batch
        teacher_pred = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            student_pred = self.student(x, training=True)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
                y, student_pred
            )
            loss += tf.reduce_mean(tf.square(teacher_pred - student_pred))
        weights = self.student.trainable_variables
        self.student_optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        return {"distillation_loss": loss}


@program("distillation", "own train_step, optimizer given to the constructor")
def distillation_by_train_step():
    x, y = data.clusters(n=128)
    teacher, student = embedder(4), embedder(4)
    yield teacher, student
    model = OldDistiller(student, teacher, keras.optimizers.SGD(0.05, momentum=0.9))
    model.compile()
    history = model.fit(x, y, batch_size=32, epochs=8, shuffle=False, verbose=0)
    yield Trained(history.history["distillation_loss"], student, x[:4])
