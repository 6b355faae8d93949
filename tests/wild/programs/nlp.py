"""Text: transformers, recurrent networks, translation, language models."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.wild.programs import data
from tests.wild.programs.registry import Trained, program


@keras.saving.register_keras_serializable("wild")
class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim, causal=False, **kwargs):
        super().__init__(**kwargs)
        self.options = {"embed_dim": embed_dim, "num_heads": num_heads}
        self.options |= {"ff_dim": ff_dim, "causal": causal}
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential(
            [layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout = layers.Dropout(0.1)

    def call(self, inputs, training=None):
        mask = None
        if self.options["causal"]:
            i = ops.arange(ops.shape(inputs)[1])
            mask = ops.cast(i[:, None] >= i, "bool")[None]
        attended = self.att(inputs, inputs, attention_mask=mask)
        attended = self.dropout(attended, training=training)
        out1 = self.layernorm1(inputs + attended)
        return self.layernorm2(out1 + self.ffn(out1))

    def get_config(self):
        return {**super().get_config(), **self.options}


@keras.saving.register_keras_serializable("wild")
class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim, **kwargs):
        super().__init__(**kwargs)
        self.options = {"maxlen": maxlen, "vocab_size": vocab_size}
        self.options["embed_dim"] = embed_dim
        self.token_emb = layers.Embedding(vocab_size, embed_dim)
        self.pos_emb = layers.Embedding(maxlen, embed_dim)

    def call(self, x):
        positions = ops.arange(0, ops.shape(x)[-1], 1)
        return self.token_emb(x) + self.pos_emb(positions)

    def get_config(self):
        return {**super().get_config(), **self.options}


@program("nlp", "Functional with a block of own layers")
def text_transformer():
    x, y = data.sentences(n=512)
    inputs = keras.Input((8,))
    h = TokenAndPositionEmbedding(8, 20, 8)(inputs)
    h = TransformerBlock(8, 2, 16)(h)
    h = layers.GlobalAveragePooling1D()(h)
    h = layers.Dense(8, activation="relu")(layers.Dropout(0.1)(h))
    outputs = layers.Dense(2, activation="softmax")(h)
    model = keras.Model(inputs, outputs)
    yield model
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=32, epochs=8, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


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


@program("nlp", "Functional, two inputs, states handed on")
def seq2seq_lstm():
    x, _ = data.sentences(n=48, words=10)
    target = x[:, ::-1]
    encoder_in = ops.one_hot(x, 10).numpy()
    decoder_in = np.roll(ops.one_hot(target, 10).numpy(), 1, axis=1)
    encoder_inputs = keras.Input((None, 10))
    _, state_h, state_c = layers.LSTM(8, return_state=True)(encoder_inputs)
    decoder_inputs = keras.Input((None, 10))
    decoder = layers.LSTM(8, return_sequences=True, return_state=True)
    outputs, _, _ = decoder(decoder_inputs, initial_state=[state_h, state_c])
    outputs = layers.Dense(10, activation="softmax")(outputs)
    model = keras.Model([encoder_inputs, decoder_inputs], outputs)
    yield model
    model.compile("rmsprop", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit([encoder_in, decoder_in], target, 16, 4, verbose=0)
    yield Trained(history.history["loss"], model, [encoder_in[:2], decoder_in[:2]])


@program("nlp", "Functional, two outputs and one loss")
def miniature_gpt():
    x, _ = data.sentences(n=48)
    inputs = keras.Input((8,), dtype="int32")
    h = TokenAndPositionEmbedding(8, 20, 8)(inputs)
    h = TransformerBlock(8, 2, 16, causal=True)(h)
    outputs = layers.Dense(20)(h)
    model = keras.Model(inputs, [outputs, h])
    yield model
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss=[loss, None])
    dataset = tf.data.Dataset.from_tensor_slices((x, np.roll(x, -1, axis=1)))
    history = model.fit(dataset.batch(16), epochs=4, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


@keras.saving.register_keras_serializable("wild")
class TiedLanguageModel(keras.Model):
    def __init__(self, vocabulary, width, **kwargs):
        super().__init__(**kwargs)
        self.vocabulary, self.width = vocabulary, width
        self.embedding = layers.Embedding(vocabulary, width)
        self.gru = layers.GRU(width, return_sequences=True)

    def call(self, ids):
        h = self.gru(self.embedding(ids))
        return ops.matmul(h, ops.transpose(self.embedding.embeddings))

    def get_config(self):
        return {"vocabulary": self.vocabulary, "width": self.width}


@program("nlp", "subclassed, logits from the embedding's own matrix")
def tied_embeddings():
    x, _ = data.sentences(n=48)
    model = TiedLanguageModel(20, 8)
    model(x[:1])
    yield model
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    history = model.fit(x, np.roll(x, -1, axis=1), 16, 4, verbose=0)
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


@keras.saving.register_keras_serializable("wild")
class Switch(layers.Layer):
    def __init__(self, num_experts, width, **kwargs):
        super().__init__(**kwargs)
        self.num_experts, self.width = num_experts, width
        self.route = layers.Dense(num_experts)
        self.experts = [
            keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(width)])
            for _ in range(num_experts)
        ]

    def call(self, x):
        probabilities = keras.activations.softmax(self.route(x), axis=-1)
        chosen = ops.argmax(probabilities, axis=-1)
        gate = ops.max(probabilities, axis=-1, keepdims=True)
        mask = ops.one_hot(chosen, self.num_experts, dtype=probabilities.dtype)
        load = ops.mean(mask, axis=[0, 1]) * ops.mean(probabilities, axis=[0, 1])
        self.add_loss(0.01 * self.num_experts * ops.sum(load))
        parts = [expert(x) for expert in self.experts]
        mixed = ops.sum(ops.stack(parts, axis=-2) * mask[..., None], axis=-2)
        return gate * mixed

    def get_config(self):
        options = {"num_experts": self.num_experts, "width": self.width}
        return {**super().get_config(), **options}


@program("nlp", "Functional, mixture of experts with its own loss")
def switch_transformer():
    x, y = data.sentences(n=512)
    inputs = keras.Input((8,), dtype="int32")
    h = TokenAndPositionEmbedding(8, 20, 8)(inputs)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4)(h, h))
    h = layers.LayerNormalization()(h + Switch(3, 8)(h))
    h = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(h))
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(h))
    yield model
    model.compile(keras.optimizers.Adam(0.005), "sparse_categorical_crossentropy")
    history = model.fit(x, y, batch_size=32, epochs=8, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


@program("nlp", "Sequential with a TextVectorization in front")
def text_from_strings():
    words = np.array("the a cat dog sat ran home away fast slow".split())
    random = np.random.RandomState(0)
    texts = [" ".join(random.choice(words, 6)) for _ in range(48)]
    y = np.array(["cat" in text for text in texts], "float32")[:, None]
    vectorize = layers.TextVectorization(output_mode="multi_hot")
    vectorize.adapt(texts)
    inputs = keras.Input((1,), dtype="string")
    h = layers.Dense(8, activation="relu")(vectorize(inputs))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(h))
    yield model
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy")
    texts = tf.constant(texts)[:, None]
    history = model.fit(texts, y, batch_size=16, epochs=6, verbose=0)
    yield Trained(history.history["loss"], model, texts[:4])


@program(
    "nlp",
    "Functional, LoRA enabled after pretraining",
    unsaved="stock Keras adds LoRA's product to the kernel as it saves",
)
def lora_fine_tuning():
    x, y = data.sentences()
    inputs = keras.Input((8,), dtype="int32")
    h = layers.Embedding(20, 8, name="embedding")(inputs)
    h = layers.Flatten()(h)
    h = layers.Dense(16, activation="gelu", name="up")(h)
    model = keras.Model(inputs, layers.Dense(2, name="logits")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    yield model
    model.compile("adam", loss)
    first = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history["loss"]
    model.get_layer("embedding").enable_lora(2)
    model.get_layer("up").enable_lora(2)
    model.compile(keras.optimizers.Adam(0.01), loss)
    second = model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
    yield Trained(first + second, model, x[:4])
