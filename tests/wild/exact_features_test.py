"""Preprocessing layers, bins and marks in a model: what they make of raw features.

Features come in units of their own: a year, an id, seconds since 1970, -999.1 for a
value that is missing. The reference is the same model of stock Keras in float32; what
it gives is a small whole number, or a difference that half precision holds.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers, ops = keras.layers, keras.ops
POLICIES = ["mixed_float16", "mixed_bfloat16"]
IDS = np.array([[2049], [3001], [257], [301], [3999], [7]])
AMOUNTS = np.float32([[2000.6], [2001.4], [4000.9], [4001.0], [257.2], [300.7]])
BINS = [256.5, 300.5, 2001.0, 4000.95]
EDGES = np.float32(BINS)
pytestmark = [
    pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow"),
    # Of NumPy, in stock Keras too: 86400 is a constant beside float16.
    pytest.mark.filterwarnings("ignore:(.|\n)*overflow encountered in cast"),
]


def graph(layer, shape=(1,), dtype="float32", after=None):
    """A model of one layer, with a last layer that gives what it is given."""
    i = keras.Input(shape, dtype=dtype)
    x = layer(i)
    return keras.Model(i, x if after is None else after(x))


def column_of(x):
    """Returns the numbers of a matrix of hot tokens."""
    kernel = np.arange(4096.0)[:, None]
    dense = layers.Dense(
        1, use_bias=False, kernel_initializer=lambda *_, **__: kernel, dtype="float32"
    )
    return dense(x)


def given(x):
    return layers.Dense(x.shape[-1], use_bias=False, kernel_initializer="identity")(x)


def own(call, layer=None):
    """A model of the user's own around a layer."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def call(self, x):
            return call(self.layer, x)

    return Own()


def hot(mode, **kwargs):
    layer = layers.CategoryEncoding(4096, output_mode=mode)
    return graph(layer, after=column_of, **kwargs)


def normalized(shape=(1,)):
    layer = layers.Normalization(mean=[2001.0], variance=[4.0])
    return graph(layer, shape, after=given)


def features():
    """Two raw columns, one crossed with itself, as `FeatureSpace` makes them."""
    space = keras.utils.FeatureSpace(
        {
            "amount": keras.utils.FeatureSpace.float_discretized(
                num_bins=4, output_mode="int"
            ),
            "id": keras.utils.FeatureSpace.integer_hashed(
                num_bins=997, output_mode="int"
            ),
        },
        output_mode="dict",
    )
    rng = np.random.default_rng(0)
    table = {"amount": 1990 + 20 * rng.random(64), "id": np.arange(64)}
    space.adapt(tf.data.Dataset.from_tensor_slices(table))
    inputs, encoded = space.get_inputs(), space.get_encoded_features()
    return keras.Model(inputs, encoded)


MASKED = np.float32([[[-999.1], [-999.2], [1.0]], [[5.0], [-999.1], [-999.1]]])


def masked():
    i = keras.Input((3, 1))
    return keras.Model(i, layers.Masking(mask_value=-999.1)(i))


PROGRAMS = {
    "one-hot float ids": (lambda: hot("one_hot"), IDS.astype("float32")),
    "counted ids": (
        lambda: hot("count", shape=(2,), dtype="int64"),
        np.hstack([IDS, IDS - 1]),
    ),
    "bins": (lambda: graph(layers.Discretization(bin_boundaries=BINS)), AMOUNTS),
    "hashed float ids": (lambda: graph(layers.Hashing(997)), IDS.astype("float32")),
    "normalized": (normalized, AMOUNTS[:2]),
    "masked by a number": (masked, MASKED),
    "equal to a number of NumPy's": (
        lambda: own(lambda _, x: ops.cast(ops.equal(x, EDGES[2] + 0.4), "float32")),
        AMOUNTS,
    ),
    "above thresholds": (
        lambda: own(
            lambda _, x: ops.sum(
                ops.cast(ops.greater(x, ops.convert_to_tensor(EDGES)), "int32"), -1
            )
        ),
        AMOUNTS,
    ),
    "ops.digitize": (lambda: own(lambda _, x: ops.digitize(x, EDGES)), AMOUNTS),
    "largest column": (
        lambda: own(lambda _, x: ops.argmax(x, axis=-1)),
        np.hstack([AMOUNTS, AMOUNTS + np.float32(0.1)]),
    ),
    "normalized column": (
        lambda: own(
            lambda layer, x: layer(x[:, :1]),
            graph(layers.Normalization(mean=2000.0, variance=1.0), after=given),
        ),
        np.hstack([AMOUNTS, AMOUNTS])[:2],
    ),
    "hour of the day": (
        lambda: own(lambda _, x: tf.cast(x[:, 0] / 3600.0 % 24.0, tf.int32)),
        np.float32([[3600 * 5], [3600 * 29], [3600 * 100 + 10]]),
    ),
    "crossed columns": (
        lambda: own(
            lambda layer, x: layer(
                (ops.cast(x[:, :1], "int64"), ops.cast(x[:, 1:], "int64"))
            ),
            layers.HashedCrossing(997),
        ),
        np.hstack([IDS, IDS + 1]).astype("float32"),
    ),
    "features of FeatureSpace": (features, {"amount": AMOUNTS, "id": IDS}),
}


@pytest.mark.quick("one-hot float ids-mixed_float16")
@pytest.mark.parametrize("policy", POLICIES)
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
@pytest.mark.parametrize("policy", POLICIES)
def test_layer_in_a_pipeline_encodes_the_ids_that_were_given(policy):
    dataset = tf.data.Dataset.from_tensor_slices((IDS.astype("int32"), AMOUNTS))

    def encoded():
        layer = layers.CategoryEncoding(4096, output_mode="one_hot")
        bins = layers.Discretization(BINS)
        made = list(dataset.map(lambda i, a: (layer(i), bins(a))))
        return [(int(np.argmax(hot)), np.ravel(each).tolist()) for hot, each in made]

    stock = encoded()
    with tfamp.scope(policy):
        assert encoded() == stock
    assert [each for each, _ in stock] == IDS.ravel().tolist()
