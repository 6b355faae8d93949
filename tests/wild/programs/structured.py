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


@program("structured data", "Functional, wide and deep and cross")
def wide_deep_cross():
    x, y = data.rows(n=512)
    inputs = keras.Input((6,))
    wide = layers.BatchNormalization()(inputs)
    deep = inputs
    for units in (16, 8):
        deep = layers.Dense(units)(deep)
        deep = layers.BatchNormalization()(deep)
        deep = layers.ReLU()(deep)
        deep = layers.Dropout(0.1)(deep)
    cross = inputs
    for _ in range(2):
        cross = inputs * layers.Dense(6)(cross) + cross
    outputs = layers.Dense(1)(layers.concatenate([wide, deep, cross]))
    model = keras.Model(inputs, outputs)
    yield model
    model.compile(keras.optimizers.Adam(0.02), keras.losses.MeanSquaredError())
    history = model.fit(x, y, batch_size=32, epochs=12, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


@keras.saving.register_keras_serializable("wild")
class GatedResidual(layers.Layer):
    def __init__(self, units, dropout_rate=0.1, **kwargs):
        super().__init__(**kwargs)
        self.units, self.dropout_rate = units, dropout_rate
        self.elu_dense = layers.Dense(units, activation="elu")
        self.linear_dense = layers.Dense(units)
        self.dropout = layers.Dropout(dropout_rate)
        self.linear = layers.Dense(units)
        self.sigmoid = layers.Dense(units, activation="sigmoid")
        self.layer_norm = layers.LayerNormalization()
        self.project = layers.Dense(units)

    def call(self, inputs):
        x = self.linear_dense(self.elu_dense(inputs))
        x = self.dropout(x)
        if inputs.shape[-1] != self.units:
            inputs = self.project(inputs)
        x = inputs + self.linear(x) * self.sigmoid(x)
        return self.layer_norm(x)

    def get_config(self):
        options = {"units": self.units, "dropout_rate": self.dropout_rate}
        return {**super().get_config(), **options}


@keras.saving.register_keras_serializable("wild")
class VariableSelection(layers.Layer):
    def __init__(self, num_features, units, **kwargs):
        super().__init__(**kwargs)
        self.num_features, self.units = num_features, units
        self.grns = [GatedResidual(units) for _ in range(num_features)]
        self.grn_concat = GatedResidual(units)
        self.softmax = layers.Dense(num_features, activation="softmax")

    def call(self, inputs):
        features = ops.split(inputs, self.num_features, axis=-1)
        v = ops.expand_dims(self.softmax(self.grn_concat(inputs)), axis=-1)
        x = [grn(part) for part, grn in zip(features, self.grns, strict=True)]
        x = ops.stack(x, axis=1)
        return ops.squeeze(tf.matmul(v, x, transpose_a=True), axis=1)

    def get_config(self):
        options = {"num_features": self.num_features, "units": self.units}
        return {**super().get_config(), **options}


@program("structured data", "Functional over layers of lists of layers")
def variable_selection():
    x, y = data.rows(n=512)
    inputs = keras.Input((6,))
    h = VariableSelection(6, 4)(inputs)
    model = keras.Model(inputs, layers.Dense(1)(h))
    yield model
    model.compile(keras.optimizers.Adam(0.02), "mse")
    history = model.fit(x, y, batch_size=32, epochs=16, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


@keras.saving.register_keras_serializable("wild")
class RecommenderNet(keras.Model):
    def __init__(self, num_users, num_movies, embedding_size, **kwargs):
        super().__init__(**kwargs)
        self.options = {"num_users": num_users, "num_movies": num_movies}
        self.options["embedding_size"] = embedding_size
        options = {
            "embeddings_initializer": "he_normal",
            "embeddings_regularizer": keras.regularizers.l2(1e-6),
        }
        self.user_embedding = layers.Embedding(num_users, embedding_size, **options)
        self.user_bias = layers.Embedding(num_users, 1)
        self.movie_embedding = layers.Embedding(num_movies, embedding_size, **options)
        self.movie_bias = layers.Embedding(num_movies, 1)

    def call(self, inputs):
        users = self.user_embedding(inputs[:, 0])
        movies = self.movie_embedding(inputs[:, 1])
        dot = ops.sum(users * movies, axis=-1, keepdims=True)
        x = dot + self.user_bias(inputs[:, 0]) + self.movie_bias(inputs[:, 1])
        return ops.nn.sigmoid(x)

    def get_config(self):
        return self.options


@program("structured data", "subclassed, built by fit, a product of embeddings")
def collaborative_filtering():
    random = np.random.RandomState(0)
    x = random.randint(0, 12, (128, 2))
    y = ((x.sum(axis=1) % 12) / 12).astype("float32")
    model = RecommenderNet(12, 12, 4)
    model(x[:1])
    yield model
    model.compile(
        loss=keras.losses.BinaryCrossentropy(),
        optimizer=keras.optimizers.Adam(learning_rate=0.01),
    )
    history = model.fit(x, y[:, None], batch_size=32, epochs=8, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


@program("structured data", "Sequential, class weights and metrics of imbalance")
def imbalanced_classes():
    x, y = data.rows(n=256)
    y = (y > np.quantile(y, 0.9)).astype("uint8")
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, activation="relu"),
            layers.Dropout(0.1),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    yield model
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss="binary_crossentropy",
        metrics=[keras.metrics.Precision(name="precision"), keras.metrics.AUC()],
    )
    weights = {0: 0.5, 1: 5.0}
    history = model.fit(x, y, 64, 8, class_weight=weights, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


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
class BuiltInInit(keras.Model):
    def __init__(self, hidden, **kwargs):
        inputs = keras.Input((6,))
        h = layers.Dense(hidden, activation="relu", name="up")(inputs)
        h = h + layers.Dense(hidden, name="again")(layers.LayerNormalization()(h))
        outputs = layers.Dense(1, name="out")(h)
        super().__init__(inputs=inputs, outputs=outputs, **kwargs)
        self.hidden = hidden

    def get_config(self):
        return {"hidden": self.hidden, "name": self.name}


@program("structured data", "a Functional model built in its own __init__")
def built_in_init():
    x, y = data.rows(n=512)
    model = BuiltInInit(16)
    yield model
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 256)
    model.compile(keras.optimizers.Adam(schedule), "mse")
    history = model.fit(x, y, batch_size=32, epochs=16, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


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
