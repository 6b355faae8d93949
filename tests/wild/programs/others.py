"""Graphs, reinforcement learning and audio."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.wild.programs import data
from tests.wild.programs.registry import Trained, program


@keras.saving.register_keras_serializable("wild")
class GraphConv(layers.Layer):
    def __init__(self, units, edges, **kwargs):
        super().__init__(**kwargs)
        self.units, self.edges = units, edges
        self.ffn_prepare = keras.Sequential(
            [layers.BatchNormalization(), layers.Dense(units, activation="gelu")]
        )
        self.update_fn = layers.Dense(units, activation="gelu")

    def call(self, nodes):
        sources, targets = self.edges
        messages = self.ffn_prepare(tf.gather(nodes, sources))
        gathered = tf.math.unsorted_segment_sum(
            messages, targets, num_segments=nodes.shape[0]
        )
        h = tf.concat([nodes, gathered], axis=1)
        return tf.nn.l2_normalize(self.update_fn(h), axis=-1)

    def get_config(self):
        return {**super().get_config(), "units": self.units, "edges": self.edges}


@keras.saving.register_keras_serializable("wild")
class NodeClassifier(keras.Model):
    def __init__(self, features, edges, units=8, **kwargs):
        super().__init__(**kwargs)
        self.features, self.edges = features, edges
        self.node_features = tf.constant(features, "float32")
        self.preprocess = layers.Dense(units, activation="gelu")
        self.conv1 = GraphConv(units, edges)
        self.conv2 = GraphConv(units, edges)
        self.compute_logits = layers.Dense(4)

    def call(self, indices):
        x = self.preprocess(self.node_features)
        x = self.conv1(x) + x
        x = self.conv2(x) + x
        return self.compute_logits(tf.gather(x, indices))

    def get_config(self):
        return {"features": self.features, "edges": self.edges}


@program(
    "graphs",
    "subclassed over raw TensorFlow, the graph in the model",
    unsaved="stock Keras loads no weights of it, in float32 neither",
)
def graph_convolution():
    x, y = data.clusters(n=64)
    random = np.random.RandomState(0)
    sources = np.repeat(np.arange(64), 3)
    targets = [random.choice(np.flatnonzero(y == y[s])) for s in sources]
    edges = [sources.tolist(), [int(t) for t in targets]]
    model = NodeClassifier(x.tolist(), edges)
    nodes = np.arange(64)
    model(nodes[:1])
    yield model
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    history = model.fit(nodes, y, batch_size=16, epochs=6, verbose=0)
    yield Trained(history.history["loss"], model, nodes[:4])


@keras.saving.register_keras_serializable("wild")
class GraphAttention(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[0][-1], self.units), name="kernel"
        )
        self.kernel_attention = self.add_weight(
            shape=(self.units * 2, 1), name="kernel_attention"
        )

    def call(self, inputs):
        states, edges = inputs
        transformed = ops.matmul(states, self.kernel)
        pairs = ops.take(transformed, edges, axis=1)
        pairs = ops.reshape(pairs, (-1, edges.shape[0], 2 * self.units))
        scores = ops.leaky_relu(ops.matmul(pairs, self.kernel_attention))[..., 0]
        scores = ops.exp(ops.clip(scores, -2, 2))
        sums = tf.math.unsorted_segment_sum(
            tf.transpose(scores), edges[:, 0], num_segments=states.shape[1]
        )
        shares = scores / tf.transpose(tf.gather(sums, edges[:, 0]))
        weighted = ops.take(transformed, edges[:, 1], axis=1) * shares[..., None]
        out = tf.math.unsorted_segment_sum(
            tf.transpose(weighted, (1, 0, 2)), edges[:, 0], states.shape[1]
        )
        return tf.transpose(out, (1, 0, 2))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@program("graphs", "Functional, own softmax over neighbors")
def graph_attention():
    random = np.random.RandomState(0)
    atoms = random.normal(size=(64, 5, 4)).astype("float32")
    y = (atoms[:, :, 0].mean(axis=1) > 0).astype("float32")[:, None]
    edges = np.array([[i, j] for i in range(5) for j in range(5)], "int32")
    inputs = keras.Input((5, 4))
    h = GraphAttention(8)([inputs, tf.constant(edges)])
    h = layers.GlobalAveragePooling1D()(ops.relu(h))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(h))
    yield model
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy")
    history = model.fit(atoms, y, batch_size=16, epochs=6, verbose=0)
    yield Trained(history.history["loss"], model, atoms[:4])


@program("reinforcement", "eager loop, actor and critic in one model")
def actor_critic():
    inputs = keras.Input((4,))
    common = layers.Dense(16, activation="relu")(inputs)
    action = layers.Dense(2, activation="softmax")(common)
    critic = layers.Dense(1)(common)
    model = keras.Model(inputs, [action, critic])
    optimizer = keras.optimizers.Adam(0.01)
    huber_loss = keras.losses.Huber()
    yield model
    random = np.random.RandomState(0)
    losses = []
    for _ in range(6):
        states = random.normal(size=(8, 4)).astype("float32")
        rewards = np.where(states[:, 0] > 0, 1.0, -1.0).astype("float32")
        with tf.GradientTape() as tape:
            actor_losses, critic_losses = [], []
            for state, reward in zip(states, rewards, strict=True):
                action_probs, critic_value = model(state[None])
                chosen = int(random.uniform() > 0.5)
                log_prob = ops.log(action_probs[0, chosen])
                diff = reward - critic_value[0, 0]
                actor_losses.append(-log_prob * tf.stop_gradient(diff))
                critic_losses.append(
                    huber_loss(critic_value[0], ops.expand_dims(reward, 0))
                )
            loss_value = sum(actor_losses) + sum(critic_losses)
        grads = tape.gradient(loss_value, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        losses.append(float(sum(critic_losses)))
    yield Trained(losses, model, states[:2])


@program("reinforcement", "loop with a target network and one-hot masks")
def deep_q_learning():
    def create_q_model():
        return keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(16, activation="relu"),
                layers.Dense(2, activation="linear"),
            ]
        )

    model, model_target = create_q_model(), create_q_model()
    yield model, model_target
    optimizer = keras.optimizers.Adam(learning_rate=0.005, clipnorm=1.0)
    loss_function = keras.losses.Huber()
    random = np.random.RandomState(0)

    @tf.function
    def learn(states, targets, masks):
        with tf.GradientTape() as tape:
            q_values = model(states)
            q_action = ops.sum(ops.multiply(q_values, masks), axis=1)
            loss = loss_function(targets, q_action)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    states = random.normal(size=(64, 4)).astype("float32")
    actions = random.randint(0, 2, 64)
    rewards = np.where((states[:, 0] > 0) == (actions == 1), 1.0, 0.0)
    losses = []
    future = model_target.predict(states, verbose=0)
    for step in range(40):
        targets = (rewards + 0.5 * future.max(axis=1)).astype("float32")
        masks = ops.one_hot(actions, 2)
        losses.append(float(learn(states, targets, masks)))
        if step % 10 == 9:
            model_target.set_weights(model.get_weights())
            future = model_target.predict(states, verbose=0)
    yield Trained(losses, model, states[:4])


@program("reinforcement", "two optimizers under tf.function, ratios of logarithms")
def proximal_policy():
    actor = keras.Sequential(
        [keras.Input((4,)), layers.Dense(16, "tanh"), layers.Dense(2)]
    )
    critic = keras.Sequential(
        [keras.Input((4,)), layers.Dense(16, "tanh"), layers.Dense(1)]
    )
    yield actor, critic
    policy_optimizer = keras.optimizers.Adam(learning_rate=3e-3)
    value_optimizer = keras.optimizers.Adam(learning_rate=1e-2)

    def logprobabilities(logits, a):
        return ops.sum(ops.one_hot(a, 2) * ops.log_softmax(logits), axis=1)

    @tf.function
    def train_policy(observations, actions, old, advantages):
        with tf.GradientTape() as tape:
            ratio = ops.exp(logprobabilities(actor(observations), actions) - old)
            bound = ops.where(advantages > 0, 1.2 * advantages, 0.8 * advantages)
            policy_loss = -ops.mean(ops.minimum(ratio * advantages, bound))
        grads = tape.gradient(policy_loss, actor.trainable_variables)
        policy_optimizer.apply_gradients(
            zip(grads, actor.trainable_variables, strict=True)
        )

    @tf.function
    def train_value_function(observations, returns):
        with tf.GradientTape() as tape:
            value_loss = ops.mean((returns - ops.squeeze(critic(observations))) ** 2)
        grads = tape.gradient(value_loss, critic.trainable_variables)
        value_optimizer.apply_gradients(
            zip(grads, critic.trainable_variables, strict=True)
        )
        return value_loss

    random = np.random.RandomState(0)
    observations = random.normal(size=(64, 4)).astype("float32")
    actions = random.randint(0, 2, 64)
    returns = np.tanh(observations[:, 0] * (2 * actions - 1)).astype("float32")
    old = ops.stop_gradient(logprobabilities(actor(observations), actions))
    losses = []
    for _ in range(30):
        train_policy(observations, actions, old, returns - returns.mean())
        losses.append(float(train_value_function(observations, returns)))
    yield Trained(losses, actor, observations[:4])


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
class CTCLayer(layers.Layer):
    def call(self, y_true, y_pred):
        logits = ops.log(y_pred + keras.config.epsilon())
        self.add_loss(ops.mean(ctc_loss(y_true + 1, logits)))
        return y_pred


@program("audio", "the loss as a layer: add_loss(keras.backend.ctc_batch_cost)")
def captcha():
    x, y = data.images(n=32)
    labels = np.stack([y, (y + 1) % 4], axis=1).astype("int32")
    images = keras.Input((8, 8, 1), name="image")
    target = keras.Input((2,), name="label", dtype="int32")
    h = layers.Conv2D(4, 3, padding="same", activation="relu")(images)
    h = layers.MaxPooling2D((2, 1))(h)
    h = layers.Permute((2, 1, 3))(h)
    h = layers.Reshape((8, 16))(h)
    h = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(h)
    h = layers.Dense(5, activation="softmax", name="dense2")(h)
    output = CTCLayer(name="ctc_loss")(target, h)
    model = keras.Model([images, target], output)
    yield model
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    history = model.fit([x, labels], batch_size=8, epochs=5, verbose=0)
    prediction = keras.Model(images, model.get_layer("dense2").output)
    yield Trained(history.history["loss"], prediction, x[:4])


@program("audio", "Functional residual Conv1D over spectra")
def speaker_recognition():
    x, y = data.waves(n=64, length=64, classes=3)
    spectra = np.abs(np.fft.rfft(x[..., 0]))[:, :32, None].astype("float32")
    inputs = keras.Input((32, 1), name="input")
    h = inputs
    for filters in (4, 8):
        s = layers.Conv1D(filters, 1, padding="same")(h)
        h = layers.Conv1D(filters, 3, padding="same", activation="relu")(h)
        h = layers.Add()([layers.Conv1D(filters, 3, padding="same")(h), s])
        h = layers.MaxPool1D(pool_size=2, strides=2)(layers.Activation("relu")(h))
    h = layers.Flatten()(layers.AveragePooling1D(pool_size=3, strides=3)(h))
    h = layers.Dense(16, activation="relu")(h)
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(h))
    yield model
    model.compile("Adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(spectra, y, batch_size=16, epochs=8, verbose=0)
    yield Trained(history.history["loss"], model, spectra[:4])
