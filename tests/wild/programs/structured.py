"""Tables: columns of numbers and categories, several inputs, recommendations."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.wild.programs import data
from tests.wild.programs.registry import Trained, program


@program("structured data", "Functional, a dictionary of columns, lookups in front")
def feature_columns():
    x, _ = data.rows(n=128)
    random = np.random.RandomState(0)
    kinds = random.choice(["red", "green", "blue"], 128)
    y = ((x[:, 0] > 0) ^ (random.uniform(size=128) < 0.2)).astype("float32")[:, None]
    inputs = {
        "age": keras.Input((1,), name="age"),
        "size": keras.Input((1,), name="size"),
        "kind": keras.Input((1,), name="kind", dtype="string"),
    }
    normalized = []
    for index, name in enumerate(("age", "size")):
        normalizer = layers.Normalization()
        normalizer.adapt(x[:, index : index + 1])
        normalized.append(normalizer(inputs[name]))
    lookup = layers.StringLookup(output_mode="one_hot")
    lookup.adapt(kinds)
    h = layers.concatenate([*normalized, lookup(inputs["kind"])])
    h = layers.Dense(16, activation="relu")(h)
    outputs = layers.Dense(1, activation="sigmoid")(layers.Dropout(0.1)(h))
    model = keras.Model(inputs, outputs)
    yield model
    columns = {
        "age": tf.constant(x[:, :1]),
        "size": tf.constant(x[:, 1:2]),
        "kind": tf.constant(kinds)[:, None],
    }
    dataset = tf.data.Dataset.from_tensor_slices((columns, y)).batch(32)
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy")
    history = model.fit(dataset, epochs=15, verbose=0)
    yield Trained(
        history.history["loss"], model, {k: v[:4] for k, v in columns.items()}
    )


@program("structured data", "Functional, several inputs and outputs, loss weights")
def tickets():
    random = np.random.RandomState(0)
    title = random.randint(0, 12, (64, 6))
    body = random.randint(0, 12, (64, 10))
    tags = random.randint(0, 2, (64, 3)).astype("float32")
    title_input = keras.Input((None,), name="title")
    body_input = keras.Input((None,), name="body")
    tags_input = keras.Input((3,), name="tags")
    title_features = layers.LSTM(8)(layers.Embedding(12, 4)(title_input))
    body_features = layers.GRU(4)(layers.Embedding(12, 4)(body_input))
    x = layers.concatenate([title_features, body_features, tags_input])
    priority = layers.Dense(1, name="priority")(x)
    department = layers.Dense(3, name="department")(x)
    model = keras.Model(
        [title_input, body_input, tags_input],
        {"priority": priority, "department": department},
    )
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-2),
        loss={
            "priority": keras.losses.BinaryCrossentropy(from_logits=True),
            "department": keras.losses.CategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
    )
    yield model
    inputs = {"title": title, "body": body, "tags": tags}
    targets = {
        "priority": tags[:, :1],
        "department": keras.utils.to_categorical(title[:, 0] % 3, 3),
    }
    history = model.fit(inputs, targets, epochs=5, batch_size=16, verbose=0)
    yield Trained(history.history["loss"], model, {k: v[:4] for k, v in inputs.items()})


@keras.saving.register_keras_serializable("wild")
class LazyBlock(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape):
        self.w = self.add_weight(
            shape=(input_shape[-1], self.units),
            initializer="glorot_uniform",
            regularizer=keras.regularizers.L2(1e-4),
        )
        self.b = self.add_weight(shape=(self.units,), initializer="zeros")

    def call(self, inputs):
        return ops.relu(ops.matmul(inputs, self.w) + self.b)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("wild")
class LazyModel(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [LazyBlock(16), LazyBlock(8)]
        self.dropout = layers.Dropout(0.1)
        self.classifier = layers.Dense(4, activation="softmax")

    def call(self, inputs, training=False):
        x = inputs
        for block in self.blocks:
            x = block(x)
        if training:
            x = self.dropout(x, training=training)
        return self.classifier(x)


@program("structured data", "subclassed, weights made by fit", is_built=False)
def built_by_fit():
    x, y = data.clusters(n=128)
    model = LazyModel()
    yield
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    history = model.fit(x, y, batch_size=32, epochs=8, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])
