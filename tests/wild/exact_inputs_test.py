"""Inputs that are no numbers to compute with: ids, bins and marks of missing values.

In float16 every second id above 2048 is another one, in bfloat16 every second above
256. A table tells which of its rows was looked up, and after a step of `fit` which of
them have moved.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers, ops = keras.layers, keras.ops
IDS = {
    "mixed_float16": [2049, 3001, 2051, 3999, 7],
    "mixed_bfloat16": [257, 301, 499, 3999, 7],
}
NUM_ROWS, RADIX = 4096, 64
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


@pytest.fixture(params=IDS)
def policy(request):
    """A policy in force while the test runs."""
    tfamp.enable(policy=request.param)
    yield request.param
    tfamp.disable()


def rows(shape, dtype=None):
    """Row i holds the two digits of i in base 64, which any dtype holds exactly."""
    i = np.arange(shape[0])
    return np.stack([i % RADIX, i // RADIX], axis=1).astype("float32")


def table():
    """A table of rows of which each is known by its two digits."""
    return layers.Embedding(NUM_ROWS, 2, embeddings_initializer=rows, name="table")


def head():
    """A last layer that gives its inputs."""
    return layers.Dense(2, use_bias=False, kernel_initializer="identity")


def numbers_of(outputs):
    """Returns which rows were looked up."""
    digits = np.asarray(outputs, "float64").reshape(-1, 2)
    return (digits[:, 0] + RADIX * digits[:, 1]).tolist()


def matrix(ids):
    """A column of numbers, and one of ids, as they are read from a file."""
    return np.stack([np.full(len(ids), 0.5), ids], axis=1).astype("float32")


def check_rows(model, x, ids):
    """The rows of these ids are looked up eagerly and in `predict`."""
    assert numbers_of(model(x)) == ids
    assert numbers_of(model.predict(x, verbose=0)) == ids


def check_fit(model, x, ids):
    """A step of `fit` moves the rows of these ids, and no other."""
    model(x)  # which makes the table
    model.compile(keras.optimizers.SGD(0.5), "mse")
    weights = next(each for each in model.weights if tuple(each.shape) == (NUM_ROWS, 2))
    before = np.array(weights)
    targets = rows((NUM_ROWS, 2))[ids] - 0.5
    model.fit(x, targets, batch_size=len(ids), verbose=0)
    moved = np.flatnonzero((np.array(weights) != before).any(axis=1))
    assert moved.tolist() == sorted(ids)


class OwnModel(keras.Model):
    """A model whose own `call` makes ids of what it is given."""

    def __init__(self, to_ids):
        super().__init__()
        self.to_ids = to_ids
        self.table, self.out = table(), head()

    def call(self, x):
        return self.out(self.table(self.to_ids(x)))


class OwnLayer(keras.layers.Layer):
    """A layer that looks ids up in a table of its own."""

    def __init__(self, to_ids, **kwargs):
        super().__init__(**kwargs)
        self.to_ids = to_ids
        self.table = table()

    def call(self, x):
        return self.table(self.to_ids(x))


def after_layer(layer, to_ids, shape=(2,)):
    """A graph with a layer of Keras's between its input and what makes the ids."""
    i = keras.Input(shape)
    return keras.Model(i, head()(table()(to_ids(layer(i)))))


def by_product(x):
    """Mixed radix: the ids in two columns, made of one."""
    high = ops.floor_divide(x[:, 1], 10)
    low = ops.mod(x[:, 1], 10)
    return ops.cast(high * 10 + low, "int32")


def hashed_text(x):
    number = tf.strings.to_number(tf.strings.as_string(x[:, 1]))
    return tf.cast(number, tf.int32)


WAYS = {
    "tf.cast of a column": lambda x: tf.cast(x[:, 1], tf.int32),
    "a column as it is": lambda x: x[:, 1],
    "ops.split": lambda x: ops.cast(ops.split(x, 2, axis=-1)[1][:, 0], "int32"),
    "tf.round": lambda x: tf.cast(tf.round(x[:, 1] * 2.0) / 2.0, tf.int32),
    "radix": by_product,
    "as text": hashed_text,
}


@pytest.mark.quick("mixed_float16-tf.cast of a column")
@pytest.mark.parametrize("to_ids", WAYS.values(), ids=WAYS)
def test_call_of_own_model_makes_the_ids_that_were_given(policy, to_ids):
    ids = IDS[policy]
    check_rows(OwnModel(to_ids), matrix(ids), ids)


def lambda_to_ids():
    i = keras.Input((2,))
    ids = layers.Lambda(lambda x: tf.cast(x[:, 1], tf.int32))(i)
    return keras.Model(i, head()(table()(ids)))


def operations_on_the_input():
    i = keras.Input((2,))
    return keras.Model(i, head()(table()(ops.cast(i[:, 1], "int32"))))


def operations_after_reshape():
    def to_ids(x):
        return ops.cast(x[:, 1, 0], "int32")

    return after_layer(layers.Reshape((2, 1)), to_ids)


def own_layer_in_a_graph():
    i = keras.Input((2,))
    return keras.Model(i, head()(OwnLayer(WAYS["tf.cast of a column"])(i)))


def graph_in_own_model():
    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = operations_after_reshape()

        def call(self, x):
            return self.inner(x)

    return Outer()


def own_model_in_a_graph():
    i = keras.Input((2,))
    return keras.Model(i, OwnModel(WAYS["tf.cast of a column"])(i))


def stack_without_input():
    to_ids = layers.Lambda(lambda x: tf.cast(x[:, 1], tf.int32))
    return keras.Sequential([to_ids, table(), head()])


GRAPHS = [
    lambda_to_ids,
    operations_on_the_input,
    operations_after_reshape,
    own_layer_in_a_graph,
    graph_in_own_model,
    own_model_in_a_graph,
    stack_without_input,
]


def name_of(function):
    return function.__name__.replace("_", " ")


FITTED = [lambda_to_ids, operations_after_reshape, own_model_in_a_graph]


@pytest.mark.quick("mixed_float16-lambda to ids")
@pytest.mark.parametrize("build", FITTED, ids=name_of)
def test_step_of_a_graph_moves_the_rows_of_the_ids(policy, build):
    ids = IDS[policy]
    check_fit(build(), matrix(ids), ids)


@pytest.mark.quick("mixed_float16-lambda to ids")
@pytest.mark.parametrize("build", GRAPHS, ids=name_of)
def test_graph_of_layers_looks_up_the_ids_that_were_given(policy, build):
    ids = IDS[policy]
    check_rows(build(), matrix(ids), ids)


@pytest.mark.parametrize(
    "build", [lambda_to_ids, operations_after_reshape], ids=name_of
)
def test_model_that_was_built_before_looks_up_the_ids(build):
    for name, ids in IDS.items():
        model = build()
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.fit(matrix(ids), np.ones((len(ids), 2)), verbose=0)
        tfamp.apply(model, name)
        check_rows(model, matrix(ids), ids)


@keras.saving.register_keras_serializable("exact_inputs_test")
class Saved(keras.Model):
    """A model whose ids are made in its call, and which can be saved."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.Embedding(NUM_ROWS, 2, name="table")
        self.out = head()

    def call(self, x):
        return self.out(self.table(tf.cast(x[:, 1], tf.int32)))


@pytest.mark.quick("mixed_float16-load_model0")
@pytest.mark.parametrize("load", [keras.saving.load_model, tfamp.load_model])
def test_loaded_model_looks_up_the_ids(policy, tmp_path, load):
    ids = IDS[policy]
    model = Saved()
    model(matrix(ids))
    model.table.set_weights([rows((NUM_ROWS, 2))])
    model.save(tmp_path / "own.keras")
    check_rows(load(tmp_path / "own.keras"), matrix(ids), ids)
    graph = operations_after_reshape()
    graph.get_layer("table").embeddings_initializer = None
    graph.save(tmp_path / "graph.keras")
    check_rows(load(tmp_path / "graph.keras"), matrix(ids), ids)


@pytest.mark.quick("mixed_float16")
def test_products_beside_the_ids_are_still_computed_in_half_precision(policy):

    class Tower(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.hidden, self.out = table(), layers.Dense(4), head()

        def call(self, x):
            row = self.table(tf.cast(x[:, 1], tf.int32))
            return self.out(self.hidden(tf.concat([row, x[:, :1]], axis=-1)))

    model = Tower()
    model.predict(matrix(IDS[policy]), verbose=0)
    rows = tfamp.assignment(model)
    assert rows[model.name].rule == "default: exact inputs"
    assert rows[model.hidden.name].compute_dtype == policy.removeprefix("mixed_")


class Slope(keras.Model):
    """The slope of the sum of a normalized part of its input."""

    def __init__(self, part):
        super().__init__()
        self.part, self.norm = part, layers.BatchNormalization(epsilon=0.0)

    def call(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = tf.reduce_sum(self.norm(self.part(x)))
        return tape.gradient(energy, x)


@pytest.mark.quick("mixed_float16")
def test_tape_inside_a_call_sees_what_is_made_of_a_slice(policy):
    slope = Slope(lambda x: x[:, :1]).predict(matrix(IDS[policy]), verbose=0)
    assert slope.tolist() == [[1.0, 0.0]] * 5


@pytest.mark.quick("mixed_float16")
def test_tape_inside_a_call_sees_what_it_watches(policy):
    x = np.ones((5, 2), "float32")
    found = Slope(lambda x: x)(x), Slope(lambda x: x).predict(x, verbose=0)
    for slope in found:
        assert np.asarray(slope).tolist() == [[1.0, 1.0]] * 5


def test_users_code_is_called_as_often_as_in_keras():
    counts = {}
    for name in (None, *IDS):
        if name:
            tfamp.enable(policy=name)
        calls = []

        class Counting(keras.layers.Layer):
            def call(self, x, calls=calls):
                calls.append(1)
                return tf.cast(x[:, 1], tf.int32)

        def column(x, calls=calls):
            calls.append(1)
            return tf.cast(x[:, 1], tf.int32)

        x = matrix([257, 2049])
        i = keras.Input((2,))
        ids = Counting()(i) + layers.Lambda(column, output_shape=())(i)
        model = keras.Model(i, head()(table()(ids // 2)))
        built = len(calls)
        model(x)  # the first may be tried once without effects
        first = len(calls)
        model(x)
        eager = len(calls)
        model.predict(x, verbose=0)
        counts[name] = (built, eager - first, len(calls) - eager)
        tfamp.disable()
    assert counts["mixed_float16"] == counts["mixed_bfloat16"] == counts[None]


@pytest.mark.quick("mixed_float16")
def test_branch_of_a_call_looks_up_the_ids(policy):
    def to_ids(x):
        return tf.cond(
            tf.shape(x)[0] > 0,
            lambda: tf.cast(x[:, 1], tf.int32),
            lambda: tf.zeros([tf.shape(x)[0]], tf.int32),
        )

    ids = IDS[policy]
    check_rows(OwnModel(to_ids), matrix(ids), ids)
