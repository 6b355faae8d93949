"""One line is enough in `fit`, in a step of one's own and however a model is built.

A first call acts once, and `fit` traces Keras's own step once, where stock Keras
traces it twice.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests import loops
from tests.arrays import assert_close
from tests.recorded_operations import recorded_operations
from tests.styles import Own

layers = keras.layers
X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = (X.sum(-1) > 0).astype("int32")
POLICIES = ["mixed_float16", "mixed_bfloat16"]


class Residual(keras.Model):
    """A residual classifier."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(8, activation="relu")
        self.norm = layers.LayerNormalization()
        self.second = layers.Dense(8, activation="relu")
        self.head = layers.Dense(2, activation="softmax")

    def call(self, x):
        h = self.first(x)
        h = h + self.second(self.norm(h))
        return self.head(h)


class ScalesByHand(Residual):
    """Writes its training step itself."""

    # No base: Keras puts Functional under a class that another test makes of layers.
    scaled, train_step = loops.OwnStep.scaled, loops.OwnStep.train_step


@pytest.mark.quick("mixed_float16-Residual")
@pytest.mark.parametrize("build", [Residual, ScalesByHand])
@pytest.mark.parametrize("policy", POLICIES)
def test_fit_learns_with_products_in_half_and_heads_and_losses_in_float32(
    policy, build
):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy, check=None):  # whose run is in float32
        model = build()
    optimizer, loss = keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, jit_compile=False)
    with recorded_operations() as operations:
        history = model.fit(X, Y, epochs=30, verbose=0).history
    assert operations.of("Relu") == {policy.removeprefix("mixed_")}
    assert operations.of("Softmax") <= {"float32"}
    assert operations.of("SparseSoftmaxCrossEntropyWithLogits") == {"float32"}
    losses = history.get("own_loss", history.get("loss"))
    assert losses[-1] < losses[0] / 2


class Stateful(keras.Model):
    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization(momentum=0.5)
        self.drop = layers.Dropout(0.5, seed=3)
        self.head = layers.Dense(1)

    def call(self, x):
        return self.head(self.drop(self.norm(x)))


def test_statistics_and_seeds_move_once_in_the_first_call():
    with tfamp.scope("mixed_bfloat16"):
        model = Stateful()
    state = model.drop.seed_generator.state
    before = state.numpy()
    ones = np.ones((8, 2), "float32")
    model(ones, training=True)
    np.testing.assert_allclose(model.norm.moving_mean, [0.5, 0.5])
    np.testing.assert_array_equal(state.numpy(), before + np.array([0, 1]))


METRICS = {
    "none": {},
    "names": {"metrics": ["accuracy", "sparse_top_k_categorical_accuracy"]},
    "weighted": {"weighted_metrics": ["accuracy"]},
}


class Adam(keras.optimizers.Adam):
    """Counts how often the step that it is part of is traced."""

    traces = 0

    def apply(self, *args, **kwargs):
        Adam.traces += not tf.executing_eagerly()
        return super().apply(*args, **kwargs)


def from_logits():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_of(kind=keras.Model, metrics="names"):
    inputs = keras.Input((4,))
    h = layers.BatchNormalization()(layers.Dense(8, activation="relu")(inputs))
    model = kind(inputs, layers.Dense(3)(layers.Dropout(0.3)(h)))
    model.compile(Adam(), from_logits(), jit_compile=False, **METRICS[metrics])
    return model


def traces_of_fit(model):
    """Returns how often a step is traced as a model trains."""
    before = Adam.traces
    model.fit(X, Y, batch_size=16, verbose=0)
    return Adam.traces - before


@pytest.mark.parametrize(
    "policy, metrics",
    [("float32", "none"), ("mixed_bfloat16", "weighted"), ("mixed_float16", "names")],
)
def test_a_step_is_traced_once_and_stock_traces_it_twice(policy, metrics):
    stock = model_of(metrics=metrics)
    assert traces_of_fit(stock) == 2
    with tfamp.scope(policy):
        ours = model_of(metrics=metrics)
        assert traces_of_fit(ours) == 1
    names = [metric.name for metric in ours.metrics]
    assert names == [metric.name for metric in stock.metrics]


def test_it_learns_what_stock_learns_to_the_bit():
    results = []
    for policy in (None, "float32"):
        if policy:
            tfamp.enable(policy)
        keras.utils.set_random_seed(3)
        model = model_of()
        history = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        tfamp.disable()
        state = [v.numpy() for v in (*model.weights, *model.optimizer.variables)]
        results.append((state, history.history))
    (stock, stock_logs), (ours, our_logs) = results
    assert stock_logs == our_logs
    assert_close(stock, ours)


class PartlyTrained(keras.Model):
    """Trains a part of its weights, by a step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables[-2:]
        pairs = zip(tape.gradient(loss, weights), weights, strict=True)
        self.optimizer.apply_gradients(pairs)
        return {"loss": loss}


def test_a_step_of_ones_own_builds_the_optimizer_for_what_it_trains():
    with tfamp.scope("mixed_bfloat16"):
        model = model_of(PartlyTrained, metrics="none")
        model.fit(X, Y, batch_size=16, verbose=0)
    assert len(model.optimizer._trainable_variables) == 2


class Classifier(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activation="relu")
        self.norm = layers.BatchNormalization()
        self.head = layers.Dense(2)

    def call(self, x, training=None):
        return self.head(self.norm(self.hidden(x), training=training))


class WithOwnBuild(Classifier):
    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones")
        self.built = True

    def call(self, x, training=None):
        return super().call(x * self.scale, training=training)


class Nested(keras.Model):
    """Holds blocks without a `build`, and one that is never called."""

    def __init__(self):
        super().__init__()
        self.blocks = [Classifier(), keras.Sequential([layers.Dense(4)])]
        self.spare = layers.Dense(3)
        self.head = layers.Dense(2)

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(x)


# What Keras says of a model without a `build` of its own.
@pytest.mark.filterwarnings("ignore:.build... was called on layer")
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", *POLICIES])
@pytest.mark.parametrize("is_first", [True, False], ids=["ahead", "behind compile"])
@pytest.mark.parametrize("cls", [Classifier, WithOwnBuild, Nested])
def test_a_model_that_is_built_by_its_shape_trains(cls, is_first, policy):
    with tfamp.scope(policy):
        model = cls()
        steps = [lambda: model.build((None, 4)), lambda: model.compile("adam", loss)]
        loss = from_logits()
        for step in steps if is_first else reversed(steps):
            step()
    hidden = model.blocks[0].hidden if cls is Nested else model.hidden
    before = hidden.get_weights()
    losses = model.fit(X, Y, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    after = hidden.get_weights()
    assert all(np.any(a != b) for a, b in zip(before, after, strict=False))
    assert model.predict(X, verbose=0).dtype == "float32"


class Diffusion(keras.Model):
    """Normalizes and embeds in its train step, as guides of diffusion do."""

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization(mean=0.5, variance=2.0)
        self.embed = layers.Dense(4)
        self.network = keras.Sequential([keras.Input((4,)), layers.Dense(4)])

    def call(self, inputs):
        return self.network(self.embed(self.normalizer(inputs)))

    def train_step(self, data):
        inputs, _ = data
        noise = tf.ones_like(inputs)
        rates = keras.random.uniform((tf.shape(inputs)[0], 1), seed=1)
        with tf.GradientTape() as tape:
            clean = self.embed(self.normalizer(inputs, training=True))
            noisy = rates * clean + (1.0 - rates) * noise
            loss = tf.reduce_mean(tf.square(self.network(noisy) - noise))
        weights = self.trainable_weights
        pairs = zip(tape.gradient(loss, weights), weights, strict=True)
        self.optimizer.apply_gradients(pairs)
        return {"mse": loss}


@pytest.mark.quick("True-mixed_bfloat16")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("eager", [True, False])
def test_layers_that_a_train_step_calls_give_it_float32(policy, eager):
    losses = []
    for each in ("float32", policy):
        keras.utils.set_random_seed(1)
        with tfamp.scope(each):
            model = Diffusion()
            model.compile(keras.optimizers.SGD(0.1), run_eagerly=eager)
        model(X)
        history = model.fit(X, X, batch_size=16, epochs=2, shuffle=False, verbose=0)
        losses.append(history.history["mse"])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert model.embed.compute_dtype != "float32"
    assert model.embed(X).dtype == model.embed.compute_dtype  # elsewhere as ever


@pytest.mark.quick("*-graph", "mixed_float16-*-xla")
@loops.in_each_way
@pytest.mark.parametrize(  # a scale at which no step is skipped
    ("policy", "scale"), [("mixed_float16", 128.0), ("mixed_bfloat16", "dynamic")]
)
def test_in_a_loop_a_bare_layer_adds_to_a_model_and_to_targets(decorate, policy, scale):
    def answer_after_training():
        keras.utils.set_random_seed(1)
        wide = layers.Dense(1)
        deep = keras.Sequential([layers.Dense(4, "relu"), layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)

        @decorate
        def step(x, y):
            with tf.GradientTape() as tape:
                answer = wide(x) + deep(x)
                loss = tf.reduce_mean((answer - y) ** 2 + (y - wide(x)) ** 2)
            variables = wide.trainable_variables + deep.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
            return answer

        answers = [step(tf.constant(X), tf.constant(X[:, :1])) for _ in range(3)]
        assert wide(X).dtype == wide.compute_dtype
        return answers[-1]

    expected = answer_after_training()
    with tfamp.scope(policy, loss_scale=scale):
        np.testing.assert_allclose(answer_after_training(), expected, atol=0.02)


class Halved(keras.optimizers.SGD):
    """Takes half of each step, by a method that programs override."""

    calls = 0

    def halves(self, gradients):
        self.calls += 1
        return [None if g is None else g / 2 for g in gradients]


class Apply(Halved):
    def apply(self, grads, trainable_variables=None):
        return super().apply(self.halves(grads), trainable_variables)


class ApplyGradients(Halved):
    def apply_gradients(self, grads_and_vars):
        grads, variables = zip(*grads_and_vars, strict=True)
        pairs = zip(self.halves(grads), variables, strict=True)
        return super().apply_gradients(list(pairs))


class UpdateStep(Halved):
    def update_step(self, gradient, variable, learning_rate):
        (half,) = self.halves([gradient])
        super().update_step(half, variable, learning_rate)


class OwnStep(keras.Model):
    """Hands pairs to its optimizer, as examples do."""

    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape() as tape:
            error = targets - self(inputs, training=True)
            loss = tf.reduce_mean(tf.square(error))
        weights = self.trainable_variables
        pairs = zip(tape.gradient(loss, weights), weights, strict=True)
        self.optimizer.apply_gradients(pairs)
        return {"loss": loss}


def trained(policy, make, cls):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        i = keras.Input((4,))
        model = cls(i, layers.Dense(1)(layers.Dense(8, "tanh")(i)))
        optimizer = make(0.1)
        model.compile(optimizer, "mse", run_eagerly=True)
    targets = X @ np.array([[1.0], [2.0], [-1.0], [0.5]], "float32")
    model.fit(X, targets, batch_size=8, shuffle=False, verbose=0)
    return model.get_weights(), optimizer.calls


@pytest.mark.quick("Apply-fit")
@pytest.mark.parametrize(
    ("make", "cls"),
    [
        *(
            (make, cls)
            for make in (Apply, UpdateStep)
            for cls in (keras.Model, OwnStep)
        ),
        (ApplyGradients, OwnStep),  # `fit` calls `apply`
    ],
    ids=["Apply-fit", "Apply", "UpdateStep-fit", "UpdateStep", "ApplyGradients"],
)
def test_an_overridden_method_of_an_optimizer_acts_as_in_float32(make, cls):
    exact, in_float32 = trained("float32", make, cls)
    half, in_float16 = trained("mixed_float16", make, cls)
    assert in_float16 == in_float32 > 0
    for one, other in zip(half, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=2e-3)
    whole, _ = trained("float32", Halved, cls)
    assert not np.allclose(whole[0], exact[0], rtol=0.02, atol=2e-3)


class Joining(keras.Model):
    """Joins what a Functional model and a layer of the user's give, in both steps."""

    def __init__(self):
        super().__init__()
        inputs = keras.Input((4,))
        self.patch = Own(lambda d, x: d(x), keras.layers.Dense(4))
        self.encoder = keras.Model(inputs, keras.layers.Dense(4)(inputs))
        self.decoder = keras.layers.Dense(1)

    def loss_of(self, data):
        x, y = data
        patches = self.patch(x)
        both = tf.concat([self.encoder(patches), patches], axis=1)
        return self.compute_loss(y=y, y_pred=self.decoder(both))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}

    def test_step(self, data):
        return {"loss": self.loss_of(data)}

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.decoder(tf.concat([self.encoder(x), x], axis=1))


@pytest.mark.parametrize("eager", [False, True])
def test_own_steps_of_a_model_are_given_what_the_train_step_is(eager):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 4)).astype("float32"), np.ones((16, 1), "float32")
    losses, predictions = [], []
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(0)
        with tfamp.scope(policy):
            model = Joining()
        model.compile("sgd", "mse", run_eagerly=eager)
        predictions.append(model.predict(x, verbose=0))
        model.fit(x, y, verbose=0)
        losses.append(model.evaluate(x, y, verbose=0))
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    np.testing.assert_allclose(*predictions, atol=0.01)


class OneHot(keras.Model):
    """Gives its metrics labels that its step has made, as mixing of labels does."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(8), keras.layers.Dense(5)

    def call(self, x):
        hidden = self.hidden(x)
        return self.out(hidden), hidden

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs, _ = self(x, training=True)
            y = tf.one_hot(y, 5)
            losses = keras.losses.categorical_crossentropy(y, outputs, from_logits=True)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(losses, weights), weights)
        return self.compute_metrics(x, y, outputs)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_metrics_are_of_what_an_own_step_gives_them(is_resumed, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4)).astype("float32"), rng.integers(0, 5, 40)
    seen = []
    for policy in ("float32", "mixed_float16"):
        for epochs in (1, 2) if is_resumed else (2,):
            keras.utils.set_random_seed(0)
            resume = tfamp.callbacks.Resume(tmp_path / policy, every_steps=1)
            with tfamp.scope(policy):
                model = OneHot()
            model.compile(
                "sgd", metrics=["accuracy", keras.metrics.TopKCategoricalAccuracy(2)]
            )
            logs = model.fit(
                *(x, y),
                epochs=epochs,
                batch_size=10,
                shuffle=False,
                verbose=0,
                callbacks=[resume] * is_resumed,
            ).history
        assert (resume.resumed_at is not None) == is_resumed
        seen.append({name: values[-1] for name, values in logs.items()})
    assert {*seen[0]} >= {"accuracy", "top_k_categorical_accuracy"}
    assert seen[1] == pytest.approx(seen[0], abs=0.051)  # two of forty
