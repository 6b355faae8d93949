"""Layers that run in half precision and whose gradient cannot be built there."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers = keras.layers
POLICIES = ["mixed_float16", "mixed_bfloat16"]
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 6)).astype("float32")
Y = X[:, :1] - 0.5 * X[:, 1:2]
TOLD = "its gradient cannot be built in {}"


@tf.custom_gradient
def reverse(x):
    """Turns gradients round, as in Ganin et al."""
    weight = tf.constant(0.3)

    def backward(upstream):
        return -weight * tf.cast(upstream, tf.float32)

    return tf.identity(x), backward


@tf.custom_gradient
def reverse_by_product(x):
    return tf.identity(x), lambda upstream: upstream * tf.constant(-0.3)


def each_row(x):
    return tf.map_fn(lambda row: row / 2.0, x, fn_output_signature=tf.float32)


def dirichlet(x):
    """Is what the gradient of a Dirichlet likelihood is made of."""
    return tf.math.digamma(tf.abs(x) + 1.0)


FUNCTIONS = {
    each.__name__: each for each in (reverse, reverse_by_product, each_row, dirichlet)
}


class Apply(layers.Layer):
    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, x):
        return self.function(x)


class WithShape(Apply):
    """Tells its shape, so that Keras needs not trace it to build a model."""

    def compute_output_shape(self, shape):
        return shape


class Block(layers.Layer):
    """Applies a function between two products, beside a skip connection."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function
        self.first = layers.Dense(6, name="first")
        self.last = layers.Dense(6, name="last")

    def call(self, x):
        hidden = tf.nn.relu(self.first(x))
        hidden = tf.cast(self.function(hidden), hidden.dtype)
        return x + self.last(hidden)


class Whole(keras.Model):
    """A model that does it all in its own `call`."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function
        self.first, self.last = layers.Dense(6), layers.Dense(1)

    def call(self, x):
        return self.last(self.function(self.first(x)))


class Around(keras.Model):
    """A subclassed model with such a layer two levels down."""

    def __init__(self, function):
        super().__init__()
        self.body = keras.Sequential([layers.Dense(6), Block(function, name="block")])
        self.last = layers.Dense(1)

    def call(self, x):
        return self.last(self.body(x))


def sequential(make):
    def build(function):
        return keras.Sequential(
            [keras.Input((6,)), layers.Dense(6), make(function), layers.Dense(1)]
        )

    return build


def functional(function):
    inputs = keras.Input((6,))
    hidden = layers.Dense(6, name="before")(inputs)
    hidden = Apply(function, name="guilty")(hidden)
    return keras.Model(inputs, layers.Dense(1)(hidden))


STYLES = {
    "functional": functional,
    "sequential": sequential(Apply),
    "own-shape": sequential(WithShape),
    "block": sequential(Block),
    "model": Whole,
    "around": Around,
}


def low(policy):
    """Returns settings under which no gradient overflows, and no step is skipped."""
    is_scaled = policy == "mixed_float16"
    return {"loss_scale_options": {"initial_scale": 64.0}} if is_scaled else {}


def fitted(model, **how):
    model.compile(keras.optimizers.SGD(0.02), "mse", **{"jit_compile": False, **how})
    return model.fit(X, Y, epochs=2, batch_size=8, shuffle=False, verbose=0).history


def losses_of(build, policy, train=fitted):
    keras.utils.set_random_seed(3)
    with tfamp.scope(policy, **low(policy)) if policy else contextlib.nullcontext():
        history = train(build())
    return history["loss"]


def check_trains(build, policy, train=fitted):
    expected = losses_of(build, None, train)
    assert losses_of(build, policy, train) == pytest.approx(expected, rel=0.03)
    assert expected[1] < expected[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.quick("dirichlet-mixed_float16")
def test_it_trains_as_in_float32(function, policy):
    check_trains(lambda: functional(function), policy)


@pytest.mark.parametrize("style", [each for each in STYLES if each != "functional"])
@pytest.mark.quick("around")
def test_it_trains_however_it_is_written(style):
    check_trains(lambda: STYLES[style](reverse), "mixed_bfloat16")


def by_tape(step_of, *parts):
    """Trains layers of one's own in a loop of one's own."""
    optimizer = keras.optimizers.SGD(0.02)

    def step(x, y):
        with tf.GradientTape() as tape:
            hidden = tf.convert_to_tensor(x)
            for part in parts:
                hidden = part(hidden)
            loss = tf.reduce_mean(tf.square(tf.cast(hidden, tf.float32) - y))
        weights = [weight for part in parts for weight in part.trainable_weights]
        pairs = zip(tape.gradient(loss, weights), weights, strict=True)
        optimizer.apply_gradients(pairs)
        return loss

    run = step_of(step)
    return {"loss": [float(run(X, Y)) for _ in range(3)]}


WAYS = {
    "eager": lambda step: step,
    "graph": lambda step: tf.function(step, autograph=False),
    "autograph": tf.function,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.quick("eager", "graph")
def test_a_loop_with_a_tape_trains_bare_layers(way):
    def build():
        return layers.Dense(6), Block(each_row), layers.Dense(1, dtype="float32")

    # In bfloat16, as no loss scale is needed there.
    check_trains(build, "mixed_bfloat16", lambda parts: by_tape(way, *parts))


@pytest.mark.quick("own-shape")
@pytest.mark.parametrize("style", ["own-shape", "around"])
def test_a_built_model_is_converted_and_trains(style):
    keras.utils.set_random_seed(3)
    model = STYLES[style](dirichlet)
    fitted(model)
    weights = model.get_weights()
    expected = fitted(model)["loss"]
    model.set_weights(weights)
    tfamp.apply(model, "mixed_bfloat16")
    assert fitted(model)["loss"] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("style", ["functional", "own-shape", "model", "around"])
@pytest.mark.quick("functional", "around")
def test_one_line_names_the_layer_and_the_remedy(style, caplog):
    with tfamp.scope("mixed_bfloat16"):
        model = STYLES[style](dirichlet)
        fitted(model)
        fitted(model)
        model.predict(X, verbose=0)
        model.evaluate(X, Y, verbose=0)
    lines = [each.getMessage() for each in caplog.records]
    (line,) = [each for each in lines if "computes in float32" in each]
    rows = {row.rule: row for row in tfamp.assignment(model)}
    kept = rows["default: cannot run in half precision"]
    assert f"Layer {kept.path.split('/')[-1]!r}" in line
    assert TOLD.format("bfloat16") in line or "no kernel" in line
    assert "keep_float32" in line or "compute_dtype" in line
    assert "\n" not in line


class NoGradient(layers.Layer):
    """Has none in any dtype."""

    def call(self, x):
        return tf.unique(tf.reshape(x, [-1]))[0]


class Raises(layers.Layer):
    """Its gradient raises in any dtype, and is never asked for."""

    def call(self, x):
        @tf.custom_gradient
        def opaque(t):
            def backward(_):
                raise ValueError("no gradient here")

            return tf.identity(t), backward

        return opaque(x)


def test_a_layer_without_a_gradient_predicts_as_ever(caplog):
    for make in (lambda: Raises(name="raises"), lambda: NoGradient(name="raises")):
        with tfamp.scope("mixed_bfloat16"):
            inputs = keras.Input((6,))
            model = keras.Model(inputs, make()(inputs))
            model.predict(X, verbose=0)
            bare = make()
            bare(X)
        assert bare.compute_dtype == "bfloat16"
    assert "computes in float32" not in caplog.text


class OnlyInTraining(layers.Layer):
    """Drops out with a gradient of its own, as DeBERTa's does."""

    def call(self, x, training=None):
        if not training:
            return x
        return reverse_by_product(x)


def test_a_gradient_that_only_training_has():
    def build():
        parts = [layers.Dense(6), OnlyInTraining(), layers.Dense(1)]
        return keras.Sequential([keras.Input((6,)), *parts])

    def by_own_loop(model):
        optimizer, losses = keras.optimizers.SGD(0.02), []
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(X, training=True) - Y))
            weights = model.trainable_weights
            gradients = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            losses.append(float(loss))
        return {"loss": losses}

    for train in (fitted, by_own_loop):
        check_trains(build, "mixed_bfloat16", train)


def test_an_error_that_float32_has_too_comes_through_as_it_is():
    with tfamp.scope("mixed_bfloat16"):
        inputs = keras.Input((6,))
        hidden = Raises(name="raises")(layers.Dense(6)(inputs))
        model = keras.Model(inputs, layers.Dense(1)(hidden))
        with pytest.raises(ValueError, match="no gradient here"):
            fitted(model)
    assert tfamp.assignment(model)["raises"].compute_dtype == "bfloat16"
