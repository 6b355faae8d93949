"""Layers that cannot run in half precision, forward or backward, train as in float32.

What is tried in half precision ahead of a call has no effects, and is tried once.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import Own, Subclassed, assembled
from tests.wild.own_layers import CallsMap

layers = keras.layers
POLICIES = ["mixed_float16", "mixed_bfloat16"]
X = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
Y = X[:, :1] - 0.5 * X[:, 1:2]


# These mix float32 into half precision, which raises in stock Keras.
def constant(x):
    return x * tf.math.sqrt(8.0)


def cast_by_hand(x):
    return x + tf.cast(tf.reduce_mean(x), "float32")


def concatenated(x):
    return tf.concat([x, tf.zeros([tf.shape(x)[0], 2])], axis=-1)


# The gradients of these cannot be built in half precision.
@tf.custom_gradient
def reverse(x):
    """Turns gradients round, as in Ganin et al."""
    weight = tf.constant(0.3)
    return tf.identity(x), lambda upstream: -weight * tf.cast(upstream, tf.float32)


@tf.custom_gradient
def reverse_by_product(x):
    return tf.identity(x), lambda upstream: upstream * tf.constant(-0.3)


def each_row(x):
    return tf.map_fn(lambda row: row / 2.0, x, fn_output_signature=tf.float32)


def dirichlet(x):
    """Is what the gradient of a Dirichlet likelihood is made of."""
    return tf.math.digamma(tf.abs(x) + 1.0)


FUNCTIONS = [constant, cast_by_hand, concatenated]
FUNCTIONS += [reverse, reverse_by_product, each_row, dirichlet]


class WithShape(Own):
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

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.last = layers.Dense(6), layers.Dense(1)

    def call(self, x):
        return self.last(self.function(self.first(x)))


def around(make, style):
    return lambda function: assembled(
        [layers.Dense(6), make(function), layers.Dense(1)], style, (6,)
    )


STYLES = {
    "functional": around(lambda f: Own(f, name="guilty"), "functional"),
    "sequential": around(Own, "sequential"),
    "own-shape": around(WithShape, "sequential"),
    "Lambda": around(layers.Lambda, "functional"),
    "block": around(Block, "sequential"),
    "nested": around(lambda f: Block(f, name="block"), "nested"),
    "subclassed": around(Own, "subclassed"),
    "model": Whole,
}


def settings_of(policy):
    """Returns what `scope` takes so that no gradient overflows, and no step is lost."""
    scale = {"loss_scale_options": {"initial_scale": 64.0}}
    return {"policy": policy, **(scale if policy == "mixed_float16" else {})}


def fitted(model, **how):
    model.compile(keras.optimizers.SGD(0.02), "mse", **{"jit_compile": False, **how})
    return model.fit(X, Y, epochs=2, batch_size=8, shuffle=False, verbose=0).history


def check_trains(build, policy, train=fitted):
    """Trains what `build` makes, in float32 and under a policy; returns the latter."""
    losses = []
    for each in ("float32", policy):
        keras.utils.set_random_seed(3)
        with tfamp.scope(**settings_of(each)):
            made = build()
            losses.append(train(made)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert losses[0][1] < losses[0][0]
    return made


CASES = [
    *(("functional", f, policy) for f in FUNCTIONS for policy in POLICIES),
    *((style, reverse, "mixed_bfloat16") for style in STYLES if style != "functional"),
    *((style, constant, "mixed_float16") for style in STYLES if style != "functional"),
]


@pytest.mark.quick(
    *("functional-dirichlet-mixed_float16", "nested-reverse-mixed_bfloat16"),
    "model-constant-mixed_float16",
)
@pytest.mark.parametrize(("style", "function", "policy"), CASES)
def test_it_trains_as_in_float32(style, function, policy):
    model = check_trains(lambda: STYLES[style](function), policy)
    if style == "model":  # what it holds goes on in half precision
        assert model.first.compute_dtype == policy.removeprefix("mixed_")
        assert model(X).dtype == "float32"
        assert hasattr(model.optimizer, "scale") is (policy == "mixed_float16")


def by_tape(step_of, parts):
    """Trains layers of one's own in a loop of one's own."""
    optimizer = keras.optimizers.SGD(0.02)

    def step(x, y):
        with tf.GradientTape() as tape:
            hidden = tf.convert_to_tensor(x)
            for part in parts:
                hidden = part(hidden, training=True)
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
    check_trains(build, "mixed_bfloat16", lambda parts: by_tape(way, parts))


class OnlyInTraining(layers.Layer):
    """Drops out with a gradient of its own, as DeBERTa's does."""

    def call(self, x, training=None):
        return reverse_by_product(x) if training else x


def test_a_gradient_that_only_training_has():
    def build():
        parts = [layers.Dense(6), OnlyInTraining(), layers.Dense(1)]
        return assembled(parts, "sequential", (6,))

    for train in (fitted, lambda model: by_tape(WAYS["eager"], [model])):
        check_trains(build, "mixed_bfloat16", train)


@pytest.mark.quick("own-shape")
@pytest.mark.parametrize("style", ["own-shape", "nested"])
def test_a_built_model_is_converted_and_trains(style):
    keras.utils.set_random_seed(3)
    model = STYLES[style](dirichlet)
    fitted(model)
    weights = model.get_weights()
    expected = fitted(model)["loss"]
    model.set_weights(weights)
    tfamp.apply(model, "mixed_bfloat16")
    assert fitted(model)["loss"] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("style", ["functional", "own-shape", "model", "nested"])
@pytest.mark.quick("functional", "nested")
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
    assert "its gradient cannot be built in bfloat16" in line or "no kernel" in line
    assert "keep_float32" in line or "compute_dtype" in line
    assert "\n" not in line


class CastByHand(layers.Layer):
    def call(self, inputs):
        return inputs * tf.cast(tf.reduce_mean(inputs), "float32")


def test_one_line_names_the_layer_and_the_expression(caplog):
    with tfamp.scope("mixed_float16"):
        layer = CastByHand(name="by_hand")
        layer(X)
        layer(X)
    (record,) = caplog.records
    assert "'by_hand'" in record.getMessage()
    assert "inputs * tf.cast(tf.reduce_mean(inputs), " in record.getMessage()


class Spectrum(layers.Layer):
    def call(self, x):
        return keras.ops.rfft(x)[0]


ADVICE = {  # a layer, what its line quotes, and what it advises
    "own": (CastByHand, "inputs * tf.cast", "Cast to `self.compute_dtype` there"),
    "function": (lambda: layers.Lambda(constant), "x * tf.math.sqrt", "its inputs"),
    "activation": (lambda: layers.Activation(constant), "tf.math.sqrt", "its inputs"),
    "wide alone": (Spectrum, "keras.ops.rfft(x)", "Name it in `keep_float32`"),
}


@pytest.mark.parametrize(("make", "quoted", "advice"), ADVICE.values(), ids=ADVICE)
def test_the_line_and_the_remedy_are_those_of_the_users_code(
    make, quoted, advice, caplog
):
    with tfamp.scope("mixed_float16"):
        make()(X)
    (told,) = [r.getMessage() for r in caplog.records if "float32" in r.getMessage()]
    assert quoted in told and advice in told and "cannot_run_in_half_test" in told


def hue(x):
    return tf.image.adjust_hue(x, 0.1)  # has no kernel in float16


INSIDE = {
    "tf.function": tf.function(hue),
    "tf.cond": lambda x: tf.cond(tf.reduce_sum(x) < 1e3, lambda: hue(x), lambda: x),
    "both": tf.function(lambda x: tf.cond(tf.size(x) > 0, lambda: hue(x), lambda: x)),
}


@pytest.mark.parametrize("function", INSIDE.values(), ids=INSIDE)
def test_a_kernel_that_is_missing_in_a_function_inside_is_seen(function):
    images = np.random.default_rng(1).uniform(size=(4, 8, 8, 3)).astype("float32")
    with tfamp.scope("mixed_float16"):
        found = Own(function)(images)
    np.testing.assert_allclose(found, hue(images), atol=2e-3)


def whitened(x):
    gram = tf.matmul(x, x, transpose_a=True)
    return x @ tf.linalg.cholesky(gram + tf.eye(6, dtype=x.dtype))


def normalized(convolution, x):
    return tf.nn.local_response_normalization(convolution(x))


def whitening():
    parts = [layers.Flatten(), layers.Dense(6), Own(whitened, name="guilty")]
    return assembled([*parts, layers.Dense(1)], "sequential", (4, 4, 3))


def alex_net():
    block = Own(normalized, layers.Conv2D(4, 3, activation="relu"), name="guilty")
    return Subclassed([block, layers.Flatten(), layers.Dense(1)])


WITHOUT_KERNEL = {
    "cholesky": (whitening, "mixed_float16", "Cholesky"),
    "subclassed": (alex_net, "mixed_bfloat16", "LRN"),
}


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize(
    ("build", "policy", "operation"), WITHOUT_KERNEL.values(), ids=WITHOUT_KERNEL
)
def test_what_tensorflow_traces_in_half_and_cannot_run(
    build, policy, operation, run_eagerly, caplog
):
    images = np.random.default_rng(0).normal(size=(8, 4, 4, 3)).astype("float32")
    with tfamp.scope(policy):
        model = build()
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        history = model.fit(images, np.ones((8, 1)), verbose=0).history
    assert np.isfinite(history["loss"]).all()
    rows = {row.path.split("/")[-1]: row for row in tfamp.assignment(model)}
    assert rows["guilty"].compute_dtype == "float32"
    half = policy.removeprefix("mixed_")
    if not run_eagerly:
        told = f"TensorFlow has no kernel that computes {operation} in {half}"
        assert told in caplog.text
    if build is alex_net:  # what it holds goes on in half precision
        assert rows["conv2d"].compute_dtype == half
    assert caplog.text.count("computes in float32") == 1


class NoGradient(layers.Layer):
    """Has none in any dtype."""

    def call(self, x):
        return tf.unique(tf.reshape(x, [-1]))[0]


class Raises(layers.Layer):
    """Its gradient raises in any dtype."""

    def call(self, x):
        @tf.custom_gradient
        def opaque(t):
            def backward(_):
                raise ValueError("no gradient here")

            return tf.identity(t), backward

        return opaque(x)


def test_a_layer_without_a_gradient_predicts_as_ever(caplog):
    for make in (Raises, NoGradient):
        with tfamp.scope("mixed_bfloat16"):
            inputs = keras.Input((6,))
            keras.Model(inputs, make()(inputs)).predict(X, verbose=0)
            bare = make()
            bare(X)
        assert bare.compute_dtype == "bfloat16"
    assert "computes in float32" not in caplog.text


def test_an_error_that_float32_has_too_comes_through_as_it_is():
    with tfamp.scope("mixed_bfloat16"):
        parts = [layers.Dense(6), Raises(name="raises"), layers.Dense(1)]
        model = assembled(parts, "functional", (6,))
        with pytest.raises(ValueError, match="no gradient here"):
            fitted(model)
    assert tfamp.assignment(model)["raises"].compute_dtype == "bfloat16"


class Picky(layers.Layer):
    """Refuses its input, with a word that is a dtype, or about one."""

    def __init__(self, error, *, always):
        super().__init__()
        self.error, self.always, self.num_runs = error, always, 0

    def call(self, x):
        self.num_runs += tf.executing_eagerly()
        if self.always or (tf.executing_eagerly() and self.num_runs == 1):
            raise self.error
        return x * 2


ERRORS = [
    ValueError("the crop must be at least half of the image"),
    TypeError("no float16, please"),
]


@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
@pytest.mark.parametrize("error", ERRORS, ids=["half", "float16"])
def test_an_error_of_the_code_leaves_the_layer_as_it_was(error, always, caplog):
    with tfamp.scope("mixed_bfloat16"):
        layer = Picky(error, always=always)
        with pytest.raises(type(error), match=str(error)):
            layer(X)
        assert layer.num_runs == 1
        if not always:
            assert layer(X).dtype == tf.bfloat16
    assert layer.compute_dtype == "bfloat16"
    assert "computes in float32" not in caplog.text


class Masking(layers.Layer):
    """Drops whole paths as papers write it: by float32 noise."""

    def call(self, x, training=False):
        if training:
            x = x * tf.floor(0.9 + tf.random.uniform([tf.shape(x)[0], 1]))
        return x


def test_layers_of_a_class_that_fail_alike_are_told_of_in_two_lines(caplog):
    with tfamp.scope("mixed_float16"):
        blocks = [[layers.Dense(6), Masking()] for _ in range(4)]
        model = keras.Sequential([*sum(blocks, []), layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
    told = [r.getMessage() for r in caplog.records if "masking" in r.getMessage()]
    first, second = told
    assert "'masking' computes in float32: its `call` raises" in first
    assert "'masking_1'" in second
    assert "tfamp.assignment" in second
    rows = [row for row in tfamp.assignment(model) if row.class_name == "Masking"]
    assert [row.compute_dtype for row in rows] == ["float32"] * 4


class Doubling(CallsMap):
    """Has its `call` from a class of another file."""

    def map(self, x):
        return x * tf.constant(2.0)


class Counting(layers.Layer):
    """Counts its calls in a variable, in TensorFlow's own, on itself, and in print."""

    def __init__(self, function=None, **options):
        super().__init__(**options)
        self.function = function
        self.norm = layers.BatchNormalization(momentum=0.5)
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="count"
        )
        self.total = tf.Variable(0)
        self.calls = 0

    def call(self, x, training=None):
        self.calls += 1
        print("called")
        self.count.assign_add(1)
        self.total.assign_add(1)
        x = self.norm(x, training=training)
        return x if self.function is None else self.function(x)

    def counted(self):
        assert self.count.numpy() == self.total.numpy()
        return self.count.numpy()


FAULTS = {"none": None, "backward": reverse_by_product, "forward": cast_by_hand}


@pytest.mark.quick("eager-none-mixed_float16")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_bare_layer_has_its_effects_once(way, fault, policy, capsys):
    with tfamp.scope(policy):
        layer = Counting(FAULTS[fault])
        run = way(lambda x: layer(x, training=True))
        run(np.full((4, 6), 10, "float32"))
        printed = capsys.readouterr().out.count("called")
        assert layer.counted() == 1
        np.testing.assert_array_equal(layer.norm.moving_mean, np.full(6, 5.0))
        # Python's own: once where it runs, as Keras traces it, and once by AutoGraph.
        assert layer.calls == printed
        run(np.full((4, 6), 10, "float32"))
        assert layer.counted() == 2


class Counted(keras.Model):
    def __init__(self, function):
        super().__init__()
        self.counting, self.last = Counting(function), layers.Dense(1)

    def call(self, x, training=None):
        return self.last(self.counting(x, training=training))


@pytest.mark.quick("none")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_in_fit_has_its_effects_once_a_step(fault):
    with tfamp.scope("mixed_bfloat16"):
        model = Counted(FAULTS[fault])
        fitted(model)
    assert model.counting.counted() == 4  # two epochs of two steps


@pytest.mark.quick("None")
@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_python_of_a_layer_in_an_eager_loop_runs_as_often_as_in_stock(policy, capsys):
    with tfamp.scope(policy) if policy else contextlib.nullcontext():
        layer = Counting()
        layer.norm.build((None, 6))
        layer.build((None, 6))
        for _ in range(3):
            layer(X, training=True)
    assert layer.calls == 3
    assert capsys.readouterr().out.count("called") == 3


@keras.saving.register_keras_serializable("cannot_run_in_half")
class Scaled(layers.Layer):
    """Multiplies by a float32 constant between two products."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.second = layers.Dense(8), layers.Dense(6)
        self.norm = layers.LayerNormalization()

    def call(self, inputs):
        hidden = self.first(inputs) * tf.math.sqrt(8.0)
        return self.norm(inputs + self.second(hidden))


# Keras's own, of a layer that has no `build`.
@pytest.mark.quick("mixed_bfloat16")
@pytest.mark.filterwarnings("ignore:`build[(][)]` was called on layer")
@pytest.mark.parametrize("policy", POLICIES)
def test_saved_and_loaded(policy, tmp_path):
    with tfamp.scope(policy):
        model = assembled([Scaled(), layers.Dense(1)], "functional", (6,))
    fitted(model)
    model.save(tmp_path / "model.keras")
    again = tfamp.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        model.predict(X, verbose=0), again.predict(X, verbose=0)
    )


class Corrected(keras.Model):
    """Mixes what a model inside gives with its own inputs, as zero-DCE does."""

    def __init__(self):
        super().__init__()
        inputs = keras.Input((6,))
        self.inner = keras.Model(inputs, layers.Dense(6)(inputs))

    def call(self, x):
        return x + self.inner(x) * (x**2 - x)


@pytest.mark.parametrize("inner_is_first", [False, True])
def test_a_model_inside_may_be_called_alone_at_any_time(inner_is_first):
    with tfamp.scope("mixed_float16"):
        model = Corrected()
    calls = [model, model.inner, model]
    for call in calls[inner_is_first:]:
        outputs = call(X)
    exact = X + (X @ model.inner.get_weights()[0]) * (X**2 - X)
    np.testing.assert_allclose(outputs, exact, atol=0.05)
    np.testing.assert_allclose(model.predict(X, verbose=0), exact, atol=0.05)


class Flow(layers.Layer):
    """Maps forth in half precision, and back by a step in float32, as solvers do."""

    def build(self, shape):
        self.dense = layers.Dense(shape[-1])
        self.dense.build(shape)

    def call(self, x, inverse=False, context=None):
        if context is not None:
            return self.dense(x) + tf.cast(context, "float32")
        if inverse:
            return x - tf.constant(0.5) * self.dense(x)
        return self.dense(x)


@pytest.mark.parametrize("way", [lambda f: f, tf.function], ids=["eager", "graph"])
@pytest.mark.parametrize("options", [{"inverse": True}, {"context": 1.0}], ids=str)
def test_a_branch_first_taken_after_training_is_taken_into_float32(options, way):
    with tfamp.scope("mixed_float16"):
        flow = Flow()
        model = keras.Sequential([flow, layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
    assert flow.compute_dtype == "float16"
    found = way(lambda x: flow(x, **options))(X)
    kernel, bias = (weight.numpy() for weight in flow.dense.weights)
    dense = X @ kernel + bias
    expected = dense + 1.0 if "context" in options else X - 0.5 * dense
    np.testing.assert_allclose(tf.cast(found, "float32"), expected, atol=2e-2)


def test_the_line_told_is_that_of_a_subclass_where_its_base_calls_it(caplog):
    with tfamp.scope("mixed_float16"):
        layer = Doubling()
        layer(X)
    assert layer.compute_dtype == "float32"
    (told,) = [r.getMessage() for r in caplog.records if "doubling" in r.getMessage()]
    assert "at `return x * tf.constant(2.0)` (cannot_run_in_half_test.py:" in told


class Named(layers.Layer):
    """Counts how often its code runs, whatever it is told."""

    num_runs = 0

    def call(self, x, word="", mask=None):
        type(self).num_runs += 1
        return x * 2


def test_each_branch_is_tried_once_and_many_words_are_not_tried_for_ever():
    Named.num_runs = 0
    with tfamp.scope("mixed_float16"):
        layer = Named()
        for _ in range(3):
            layer(X, word="one")
            layer(X, word="other", mask=None)
        after_two = Named.num_runs
        for number in range(60):
            layer(X, word=str(number))
    assert after_two in (6 + 2, 6 + 3)  # and once where it is built
    assert 60 < Named.num_runs - after_two < 60 + 16


class Drawing(layers.Layer):
    """Casts no inputs, and multiplies them by what it draws in float32."""

    def __init__(self, **options):
        super().__init__(autocast=False, **options)

    def call(self, x):
        return tf.random.uniform(tf.shape(x), 1.0, 1.0 + 1e-6) * x


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_that_casts_no_inputs_is_given_float32_where_it_needs_it(policy):
    with tfamp.scope(policy):
        wide = layers.Dense(3, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((6,)), wide, Drawing(), layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
        for given in [(tf.ones((4, 3)), wide(X)), (wide(X), tf.ones((4, 3)))]:
            layer = Drawing()
            assert [layer(x).shape[-1] for x in given] == [3, 3]
    assert wide.compute_dtype == policy.removeprefix("mixed_")


def sines(x):
    return tf.ensure_shape(tf.py_function(tf.sin, [x], tf.float32), x.shape)


def clipped(x):
    found = tf.numpy_function(lambda a: np.clip(a, -0.5, 0.5), [x], tf.float32)
    return tf.cast(tf.ensure_shape(found, x.shape), x.dtype) + x


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("function", [sines, clipped])
def test_a_python_function_is_handed_the_float32_that_it_returns(function, policy):
    model = check_trains(lambda: STYLES["functional"](function), policy)
    row = next(row for row in tfamp.assignment(model) if row.path == "guilty")
    assert (row.rule, row.compute_dtype) == ("default: Python functions", "float32")
