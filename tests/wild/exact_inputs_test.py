"""Inputs that are no numbers to compute with: ids, bins, years, marks of no value.

In float16 every second id above 2048 is another one, in bfloat16 every second above
256. A table tells which of its rows was looked up, and after a step of `fit` which of
them have moved; features are held to those of stock Keras in float32.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import Own, Subclassed, assembled

layers, ops = keras.layers, keras.ops
IDS = {
    "mixed_float16": [2049, 3001, 2051, 3999, 7],
    "mixed_bfloat16": [257, 301, 499, 3999, 7],
}
NUM_ROWS, RADIX = 4096, 64
# Of NumPy, in stock Keras too: 86400 is a constant beside float16.
pytestmark = pytest.mark.filterwarnings("ignore:(.|\n)*overflow encountered in cast")


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


def matrix(ids):
    """A column of numbers, and one of ids, as they are read from a file."""
    return np.stack([np.full(len(ids), 0.5), ids], axis=1).astype("float32")


def check_rows(model, ids):
    """The rows of these ids are looked up eagerly and in `predict`."""
    x = matrix(ids)
    for outputs in (model(x), model.predict(x, verbose=0)):
        digits = np.asarray(outputs, "float64").reshape(-1, 2)
        assert (digits[:, 0] + RADIX * digits[:, 1]).tolist() == ids


def check_fit(model, ids):
    """A step of `fit` moves the rows of these ids, and no other."""
    x = matrix(ids)
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


def cast_column(x):
    return tf.cast(x[:, 1], tf.int32)


def by_product(x):
    """Mixed radix: the ids in two columns, made of one."""
    high = ops.floor_divide(x[:, 1], 10)
    low = ops.mod(x[:, 1], 10)
    return ops.cast(high * 10 + low, "int32")


def hashed_text(x):
    number = tf.strings.to_number(tf.strings.as_string(x[:, 1]))
    return tf.cast(number, tf.int32)


def in_a_branch(x):
    none = tf.zeros([tf.shape(x)[0]], tf.int32)
    return tf.cond(tf.shape(x)[0] > 0, lambda: cast_column(x), lambda: none)


WAYS = {
    "tf.cast of a column": cast_column,
    "a column as it is": lambda x: x[:, 1],
    "ops.split": lambda x: ops.cast(ops.split(x, 2, axis=-1)[1][:, 0], "int32"),
    "tf.round": lambda x: tf.cast(tf.round(x[:, 1] * 2.0) / 2.0, tf.int32),
    "radix": by_product,
    "as text": hashed_text,
    "in a branch": in_a_branch,
}


@pytest.mark.quick("mixed_float16-tf.cast of a column", "mixed_float16-in a branch")
@pytest.mark.parametrize("to_ids", WAYS.values(), ids=WAYS)
def test_call_of_own_model_makes_the_ids_that_were_given(policy, to_ids):
    check_rows(OwnModel(to_ids), IDS[policy])


def functional(*parts):
    return assembled(parts, "functional", (2,))


def lambda_to_ids():
    return functional(layers.Lambda(cast_column), table(), head())


def operations_after_reshape():
    def to_ids(x):
        return ops.cast(x[:, 1, 0], "int32")

    return functional(layers.Reshape((2, 1)), to_ids, table(), head())


GRAPHS = {
    "Lambda": lambda_to_ids,
    "operations on the input": lambda: functional(
        lambda x: ops.cast(x[:, 1], "int32"), table(), head()
    ),
    "operations after Reshape": operations_after_reshape,
    "own layer": lambda: functional(
        Own(lambda table, x: table(cast_column(x)), table()), head()
    ),
    "in own model": lambda: assembled([operations_after_reshape()], "subclassed", None),
    "own model": lambda: functional(OwnModel(cast_column)),
    "stack without Input": lambda: keras.Sequential(
        [layers.Lambda(cast_column), table(), head()]
    ),
}


@pytest.mark.quick("mixed_float16-Lambda")
@pytest.mark.parametrize("build", GRAPHS.values(), ids=GRAPHS)
def test_graph_of_layers_looks_up_the_ids_that_were_given(policy, build):
    check_rows(build(), IDS[policy])


STACKS = {
    "stack": lambda: keras.Sequential([table(), layers.Reshape((2,)), head()]),
    "stack in own model": lambda: assembled(
        [keras.Sequential([table(), layers.Reshape((2,))]), head()], "subclassed", None
    ),
}


@pytest.mark.quick("mixed_float16-stack-int64")
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16", "float32"])
@pytest.mark.parametrize("name", STACKS)
def test_stack_without_input_looks_up_the_ids_that_were_given(
    policy, name, dtype, tmp_path
):
    model, ids = STACKS[name](), IDS[policy]
    x = np.array(ids, dtype)[:, None]
    for outputs in (model.predict(x, verbose=0), model(x)):
        digits = np.asarray(outputs, "float64")
        assert (digits[:, 0] + RADIX * digits[:, 1]).tolist() == ids
    model.export(str(tmp_path), verbose=False)
    serve = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
    (served,) = serve(tf.constant(ids, tf.float32)[:, None]).values()
    np.testing.assert_array_equal(served, outputs)


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_stack_of_stock_keras_looks_up_the_ids_that_were_given(dtype, tmp_path):
    """Its file says that it takes float16."""
    keras.config.set_dtype_policy("mixed_float16")
    stock, ids = STACKS["stack"](), IDS["mixed_float16"]
    x = np.array(ids, dtype)[:, None]
    stock(x)
    keras.config.set_dtype_policy("float32")
    stock.layers[0].embeddings_initializer = None
    stock.save(tmp_path / "stock.keras")
    with tfamp.scope("mixed_float16"):
        model = keras.saving.load_model(tmp_path / "stock.keras")
    digits = np.asarray(model.predict(x, verbose=0), "float64")
    assert (digits[:, 0] + RADIX * digits[:, 1]).tolist() == ids


@pytest.mark.quick("mixed_float16-Lambda")
@pytest.mark.parametrize("name", ["Lambda", "operations after Reshape", "own model"])
def test_step_of_a_graph_moves_the_rows_of_the_ids(policy, name):
    check_fit(GRAPHS[name](), IDS[policy])


@pytest.mark.parametrize("build", [lambda_to_ids, operations_after_reshape])
def test_model_that_was_built_before_looks_up_the_ids(build):
    for name, ids in IDS.items():
        model = build()
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.fit(matrix(ids), np.ones((len(ids), 2)), verbose=0)
        tfamp.apply(model, name)
        check_rows(model, ids)


@keras.saving.register_keras_serializable("exact_inputs_test")
class Saved(keras.Model):
    """A model whose ids are made in its call, and which can be saved."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.Embedding(NUM_ROWS, 2, name="table")
        self.out = head()

    def call(self, x):
        return self.out(self.table(cast_column(x)))


@pytest.mark.quick("mixed_float16-load_model0")
@pytest.mark.parametrize("load", [keras.saving.load_model, tfamp.load_model])
def test_loaded_model_looks_up_the_ids(policy, tmp_path, load):
    model = Saved()
    model(matrix(IDS[policy]))
    model.table.set_weights([rows((NUM_ROWS, 2))])
    graph = operations_after_reshape()
    graph.get_layer("table").embeddings_initializer = None
    for each in (model, graph):
        each.save(tmp_path / "model.keras")
        check_rows(load(tmp_path / "model.keras"), IDS[policy])


@pytest.mark.quick("mixed_float16")
def test_products_beside_the_ids_are_still_computed_in_half_precision(policy):
    class Tower(OwnModel):
        def __init__(self):
            super().__init__(cast_column)
            self.hidden = layers.Dense(4)

        def call(self, x):
            row = self.table(self.to_ids(x))
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
def test_tape_inside_a_call_sees_what_it_watches_and_slices(policy):
    slope = Slope(lambda x: x[:, :1]).predict(matrix(IDS[policy]), verbose=0)
    assert slope.tolist() == [[1.0, 0.0]] * 5
    x = np.ones((5, 2), "float32")
    for slope in (Slope(lambda x: x)(x), Slope(lambda x: x).predict(x, verbose=0)):
        assert np.asarray(slope).tolist() == [[1.0, 1.0]] * 5


def test_users_code_is_called_as_often_as_in_keras():
    counts = {}
    for name in (None, *IDS):
        if name:
            tfamp.enable(policy=name)
        calls = []

        def column(x, calls=calls):
            calls.append(1)
            return cast_column(x)

        x = matrix([257, 2049])
        i = keras.Input((2,))
        ids = Own(column)(i) + layers.Lambda(column, output_shape=())(i)
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


# Features come in units of their own: a year, an id, seconds since 1970, -999.1 for a
# value that is missing. What a model makes of them is a small whole number, or a
# difference that half precision holds.
TOKENS = np.array([[2049], [3001], [257], [301], [3999], [7]])
AMOUNTS = np.float32([[2000.6], [2001.4], [4000.9], [4001.0], [257.2], [300.7]])
BINS = [256.5, 300.5, 2001.0, 4000.95]
EDGES = np.float32(BINS)


def graph(layer, shape=(1,), dtype="float32"):
    i = keras.Input(shape, dtype=dtype)
    return keras.Model(i, layer(i))


def own(call, held=None):
    """A model of the user's own, around a layer or none."""

    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.held = held

        def call(self, x):
            return call(x) if held is None else call(self.held, x)

    return Outer()


def hot(mode, **kwargs):
    """Returns the numbers of a matrix of hot tokens."""
    kernel = np.arange(4096.0)[:, None]
    number = layers.Dense(
        1, use_bias=False, kernel_initializer=lambda *_, **__: kernel, dtype="float32"
    )
    encoding = layers.CategoryEncoding(4096, output_mode=mode)
    return graph(lambda x: number(encoding(x)), **kwargs)


def normalized(mean, variance):
    given = layers.Dense(1, use_bias=False, kernel_initializer="identity")
    normalization = layers.Normalization(mean=mean, variance=variance)
    return graph(lambda x: given(normalization(x)))


def features():
    """Two raw columns, as `FeatureSpace` makes features of them."""
    of = keras.utils.FeatureSpace
    space = of(
        {
            "amount": of.float_discretized(num_bins=4, output_mode="int"),
            "id": of.integer_hashed(num_bins=997, output_mode="int"),
        },
        output_mode="dict",
    )
    rng = np.random.default_rng(0)
    table = {"amount": 1990 + 20 * rng.random(64), "id": np.arange(64)}
    space.adapt(tf.data.Dataset.from_tensor_slices(table))
    return keras.Model(space.get_inputs(), space.get_encoded_features())


def above_thresholds(x):
    above = ops.greater(x, ops.convert_to_tensor(EDGES))
    return ops.sum(ops.cast(above, "int32"), -1)


def crossed(crossing, x):
    return crossing((ops.cast(x[:, :1], "int64"), ops.cast(x[:, 1:], "int64")))


PROGRAMS = {
    "one-hot float ids": (lambda: hot("one_hot"), TOKENS.astype("float32")),
    "counted ids": (
        lambda: hot("count", shape=(2,), dtype="int64"),
        np.hstack([TOKENS, TOKENS - 1]),
    ),
    "bins": (lambda: graph(layers.Discretization(bin_boundaries=BINS)), AMOUNTS),
    "hashed float ids": (lambda: graph(layers.Hashing(997)), TOKENS.astype("float32")),
    "normalized": (lambda: normalized([2001.0], [4.0]), AMOUNTS[:2]),
    "masked by a number": (
        lambda: graph(layers.Masking(mask_value=-999.1), (3, 1)),
        np.float32([[[-999.1], [-999.2], [1.0]], [[5.0], [-999.1], [-999.1]]]),
    ),
    "equal to a number of NumPy's": (
        lambda: own(lambda x: ops.cast(ops.equal(x, EDGES[2] + 0.4), "float32")),
        AMOUNTS,
    ),
    "above thresholds": (lambda: own(above_thresholds), AMOUNTS),
    "ops.digitize": (lambda: own(lambda x: ops.digitize(x, EDGES)), AMOUNTS),
    "largest column": (
        lambda: own(lambda x: ops.argmax(x, axis=-1)),
        np.hstack([AMOUNTS, AMOUNTS + np.float32(0.1)]),
    ),
    "normalized column": (
        lambda: own(lambda layer, x: layer(x[:, :1]), normalized(2000.0, 1.0)),
        np.hstack([AMOUNTS, AMOUNTS])[:2],
    ),
    "hour of the day": (
        lambda: own(lambda x: tf.cast(x[:, 0] / 3600.0 % 24.0, tf.int32)),
        np.float32([[3600 * 5], [3600 * 29], [3600 * 100 + 10]]),
    ),
    "crossed columns": (
        lambda: own(crossed, layers.HashedCrossing(997)),
        np.hstack([TOKENS, TOKENS + 1]).astype("float32"),
    ),
    "features of FeatureSpace": (features, {"amount": AMOUNTS, "id": TOKENS}),
}


@pytest.mark.quick("one-hot float ids-mixed_float16")
@pytest.mark.parametrize("policy", IDS)
@pytest.mark.parametrize(("make", "x"), PROGRAMS.values(), ids=PROGRAMS)
def test_feature_comes_out_as_in_float32(make, x, policy):
    if make is features and keras.__version__.startswith("3.10."):
        pytest.skip("its encoded features are no graph of its inputs there")

    def outputs():
        model = make()
        both = model(x), model.predict(x, verbose=0)
        return keras.tree.map_structure(np.asarray, both)

    stock = outputs()
    with tfamp.scope(policy):
        mixed = outputs()
    # Two roundings of what comes out: no id and no bin is another one.
    rtol = 2.0**-7 if policy == "mixed_bfloat16" else 2.0**-10

    def compare(want, got):
        want, got = want.astype("float64"), np.asarray(got).astype("float64")
        np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-6)

    keras.tree.map_structure(compare, stock, mixed)


@pytest.mark.quick("mixed_float16")
@pytest.mark.parametrize("policy", IDS)
def test_layer_in_a_pipeline_encodes_the_ids_that_were_given(policy):
    dataset = tf.data.Dataset.from_tensor_slices((TOKENS.astype("int32"), AMOUNTS))

    def encoded():
        layer = layers.CategoryEncoding(4096, output_mode="one_hot")
        bins = layers.Discretization(BINS)
        made = list(dataset.map(lambda i, a: (layer(i), bins(a))))
        return [(int(np.argmax(hot)), np.ravel(each).tolist()) for hot, each in made]

    stock = encoded()
    with tfamp.scope(policy):
        assert encoded() == stock
    assert [each for each, _ in stock] == TOKENS.ravel().tolist()


class Slots(keras.layers.Layer):
    """Gives each row its place among those of the same expert, as a Switch layer."""

    def __init__(self):
        super().__init__()
        self.gate = keras.layers.Dense(2)

    def call(self, x):
        share = tf.nn.softmax(self.gate(x))
        mask = tf.one_hot(tf.argmax(share, -1), 2, dtype=share.dtype)
        places = tf.reduce_sum(tf.cumsum(mask, axis=0, exclusive=True) * mask, -1)
        return tf.cast(places, tf.int32)


def test_places_behind_a_product_are_whole_numbers_of_float32():
    x = np.random.default_rng(0).normal(size=(2000, 4)).astype("float32")
    with tfamp.scope("mixed_bfloat16"):
        layer = Slots()
        places = layer(x).numpy()
    assert layer.gate.compute_dtype == "bfloat16"
    assert len(np.unique(places)) > 990  # about half of the rows each, and no gap
    assert places.max() + 1 == len(np.unique(places))


def sinusoidal(x):
    """Encodes positions, as a NeRF does."""
    return tf.concat([tf.sin(x * np.pi * 2.0**n) for n in range(8)], -1)


def widened_by_hand(x):
    """Encodes steps of time in float32, as a diffusion model does."""
    angles = tf.cast(x, tf.float32) * tf.exp(-tf.range(4.0))
    return tf.concat([tf.sin(angles), tf.cos(angles)], -1)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("encode", [sinusoidal, widened_by_hand])
def test_what_encodes_positions_takes_them_unrounded(encode, policy):
    x = np.random.default_rng(0).uniform(0, 999, (64, 1)).astype("float32")
    with tfamp.scope(policy):
        model = Subclassed([Own(encode)])
        found = keras.ops.convert_to_numpy(model(x))
    np.testing.assert_allclose(found, encode(x), atol=0.005)
