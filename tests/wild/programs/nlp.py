"""Text: transformers, recurrent networks, translation, language models."""

import keras
import tensorflow as tf
from keras import layers

from tests.wild.programs import data
from tests.wild.programs.registry import Trained, program


@program("nlp", "Functional, masked recurrent layers")
def bidirectional_lstm():
    x, y = data.sentences(n=48)
    inputs = keras.Input((None,), dtype="int32")
    h = layers.Embedding(20, 8, mask_zero=True)(inputs)
    h = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(h)
    h = layers.Bidirectional(layers.LSTM(4))(h)
    outputs = layers.Dense(1, activation="sigmoid")(h)
    model = keras.Model(inputs, outputs)
    yield model
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy")
    history = model.fit(x, y[:, None], batch_size=16, epochs=4, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


@keras.saving.register_keras_serializable("wild")
class OwnAttention(layers.Layer):
    def __init__(self, width, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.width, self.num_heads = width, num_heads
        self.wq = layers.Dense(width)
        self.wk = layers.Dense(width)
        self.wv = layers.Dense(width)
        self.out = layers.Dense(width)

    def split(self, x, batch):
        depth = self.width // self.num_heads
        x = tf.reshape(x, (batch, -1, self.num_heads, depth))
        return tf.transpose(x, perm=[0, 2, 1, 3])

    def call(self, v, k, q, mask):
        batch = tf.shape(q)[0]
        q = self.split(self.wq(q), batch)
        k = self.split(self.wk(k), batch)
        v = self.split(self.wv(v), batch)
        scores = tf.matmul(q, k, transpose_b=True)
        scores = scores / tf.math.sqrt(tf.cast(tf.shape(k)[-1], scores.dtype))
        scores += tf.cast(mask, scores.dtype) * -1e4
        weights = tf.nn.softmax(scores, axis=-1)
        attended = tf.transpose(tf.matmul(weights, v), perm=[0, 2, 1, 3])
        return self.out(tf.reshape(attended, (batch, -1, self.width)))

    def get_config(self):
        return {
            **super().get_config(),
            "width": self.width,
            "num_heads": self.num_heads,
        }


@keras.saving.register_keras_serializable("wild")
class OwnTransformer(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(20, 8)
        self.attention = OwnAttention(8, 2)
        self.norm = layers.LayerNormalization(epsilon=1e-6)
        self.final_layer = layers.Dense(20)

    def call(self, ids):
        mask = tf.cast(tf.equal(ids, 0), tf.float32)[:, None, None, :]
        h = self.embedding(ids)
        h *= tf.math.sqrt(8.0)
        h = self.norm(h + self.attention(h, h, h, mask))
        return self.final_layer(h)


@keras.saving.register_keras_serializable("wild")
def masked_loss(label, pred):
    mask = label != 0
    loss_object = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )
    mask = tf.cast(mask, "float32")
    return tf.reduce_sum(loss_object(label, pred) * mask) / tf.reduce_sum(mask)


@program("nlp", "subclassed over raw TensorFlow, masked loss function")
def tutorial_transformer():
    x, _ = data.sentences(n=48)
    model = OwnTransformer()
    model(x[:1])
    yield model
    model.compile(keras.optimizers.Adam(0.01), masked_loss)
    history = model.fit(x, x, batch_size=16, epochs=4, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])
