"""Each rule of the linter fires on stock Keras and is silent where nothing is wrong."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import Own
from tfamp import lint

L = keras.layers
pytestmark = [
    pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow"),
    # NumPy's, where a test writes a constant that float16 cannot hold.
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]


@contextlib.contextmanager
def stock(policy):
    """Puts one of Keras's own policies in force."""
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def sequential(*layers, shape=(16,), dtype="float32", **compiling):
    """Returns a model of these layers, compiled."""
    model = keras.Sequential([keras.Input(shape, dtype=dtype), *layers])
    options = {"optimizer": "adam", "loss": "mse", **compiling}
    model.compile(**options)
    return model


def head(units=8):
    return L.Dense(units, dtype="float32", name="head")


def batch(*shape, size=8, mean=0.0, scale=1.0, y=8):
    """Returns (x, y) of seeded normal numbers."""
    rng = np.random.default_rng(0)
    x = (mean + scale * rng.normal(size=(size, *shape))).astype("float32")
    return x, np.zeros((size, y), "float32")


def places(model, rule, **kwargs):
    """Returns [(severity, layer)] of what one rule finds."""
    found = lint(model, **kwargs)
    assert rule in found.rules, found.skipped
    return [(each.severity, each.layer) for each in found.of(rule=rule)]


class Guarded(keras.layers.Layer):
    """Divides by the spread and an epsilon."""

    def __init__(self, epsilon=1e-8, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def call(self, x):
        lowest = keras.ops.min(x, -1, keepdims=True)
        return x / (keras.ops.max(x, -1, keepdims=True) - lowest + self.epsilon)


class Clamped(Guarded):
    """Divides by a root that an epsilon bounds from below."""

    def call(self, x):
        square = keras.ops.max(x * x, -1, keepdims=True)
        return x / keras.ops.sqrt(keras.ops.maximum(square, self.epsilon))


class Masked(keras.layers.Layer):
    """Adds (1 - mask) * constant to scores."""

    def __init__(self, constant, **kwargs):
        super().__init__(**kwargs)
        self.constant = constant

    def call(self, x):
        mask = keras.ops.cast(x > 0, x.dtype)
        return keras.ops.softmax(x + (1 - mask) * self.constant)


class Chosen(Masked):
    """Puts a constant where a mask is false."""

    def call(self, x):
        return keras.ops.softmax(keras.ops.where(x > 0, x, self.constant))


def soft(**options):
    return L.Dense(8, activation="softmax", name="out", **options)


def reduced(function, **options):
    return Own(function, name="own", **options)


def linear(**options):
    return L.Activation("linear", **options)


def normed(function, **options):
    """Returns what makes a stack around a norm of one's own."""
    return lambda: [L.Dense(8), reduced(function, **options), head()]


NORMS = {
    "normalize": keras.ops.normalize,
    "norm": lambda x: x / keras.ops.norm(x, axis=-1, keepdims=True),
    "by hand": lambda x: x * tf.math.rsqrt(tf.reduce_sum(x * x, -1, True) + 1e-3),
}
F16, BF16 = "mixed_float16", "mixed_bfloat16"
OUT, OWN = [("error", "out")], [("warning", "own")]
STACKS = {
    "half-head": {
        "softmax": (F16, lambda: [soft()], OUT),
        "softmax in bfloat16": (BF16, lambda: [soft()], OUT),
        "sigmoid": (F16, lambda: [L.Dense(8, "sigmoid", name="out")], OUT),
        "layer": (F16, lambda: [L.Dense(8), L.Softmax(name="out")], OUT),
        "linear": (BF16, lambda: [L.Dense(8, name="out")], [("warning", "out")]),
        "cast afterwards": (F16, lambda: [soft(), linear(dtype="float32")], OUT),
        "float32 head": (F16, lambda: [L.Dense(8), head()], []),
        "float32 softmax on logits": (
            F16,
            lambda: [L.Dense(8), L.Activation("softmax", dtype="float32")],
            [],
        ),
        "logits cast": (F16, lambda: [L.Dense(8), linear(dtype="float32")], []),
    },
    "half-weights": {
        "float16": ("float16", lambda: [L.Dense(8, name="own"), head()], OWN),
        "bfloat16": (
            "bfloat16",
            lambda: [L.Dense(8, name="own"), head()],
            [("error", "own"), *OWN],  # of Adam's beta_2, which is 1
        ),
        "frozen": ("float16", lambda: [L.Dense(8, trainable=False), head()], []),
        "mixed": (BF16, lambda: [L.Dense(8)], []),
    },
    "vanishing-epsilon": {
        "large": (F16, lambda: [Guarded(1e-4), head()], []),
        "large bound": (F16, lambda: [Clamped(1e-4), head()], []),
        "bfloat16": (BF16, lambda: [Guarded(1e-8), head()], []),
        # Python's `sum` begins with 0, which is no epsilon.
        "sum": (F16, lambda: [Own(lambda x: 1 / sum([x, x])), head()], []),
        "Keras's norms": (
            F16,
            lambda: [
                L.LayerNormalization(epsilon=1e-12),
                L.BatchNormalization(epsilon=1e-12),
                head(),
            ],
            [],
        ),
    },
    "constant-range": {
        "factor": (F16, lambda: [Masked(-1e9, name="out"), head()], OUT),
        "chosen": (F16, lambda: [Chosen(-1e9, name="own"), head()], OWN),
        "small factor": (F16, lambda: [Masked(-3e4), head()], []),
        "small choice": (F16, lambda: [Chosen(-3e4), head()], []),
        "in float32": (F16, lambda: [Masked(-1e9, dtype="float32"), head()], []),
        "in bfloat16": (BF16, lambda: [Masked(-1e9), head()], []),
        "cast": (
            F16,
            lambda: [
                reduced(lambda x: x + tf.cast(tf.constant(-1e9, "float32"), x.dtype)),
                head(),
            ],
            OWN,
        ),
        "product cast": (
            F16,
            lambda: [
                reduced(
                    lambda x: x + tf.cast(tf.cast(x > 0, "float32") * -1e9, x.dtype)
                ),
                head(),
            ],
            OWN,
        ),
        # The limit of 1 / 1e-12 that a norm has.
        **{name: (F16, normed(norm), []) for name, norm in NORMS.items()},
        "table": (
            F16,
            lambda: [reduced(lambda x: x * tf.constant([1e9] * 16, x.dtype)), head()],
            [("error", "own")],
        ),
    },
}
ROWS = {
    f"{rule}, {case}": (rule, *row)
    for rule, rows in STACKS.items()
    for case, row in rows.items()
}


@pytest.mark.quick(
    "half-weights, mixed",
    "vanishing-epsilon, bfloat16",
    "constant-range, normalize",
)
@pytest.mark.parametrize("rule, policy, layers, expected", ROWS.values(), ids=ROWS)
def test_a_rule_finds_what_it_should_in_a_stack(rule, policy, layers, expected):
    with stock(policy):
        model = sequential(*layers())
    assert places(model, rule) == expected


def test_half_head_finds_each_output_of_a_subclassed_model():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = L.Dense(4, activation="sigmoid", name="first")
            self.second = L.Dense(4, name="second")

        def call(self, x):
            return {"a": self.first(x), "b": self.second(x), "c": x[:, 0] > 0}

    with stock("mixed_bfloat16"):
        model = Two()
    assert places(model, "half-head", data=batch(16)) == [
        ("error", "first"),
        ("warning", "second"),
    ]


def test_half_head_looks_into_a_function_of_tensorflow():
    class Traced(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = L.Dense(8, activation="softmax", name="out")

        @tf.function
        def call(self, x):
            return tf.identity(self.out(x))

    with stock("mixed_bfloat16"):
        model = Traced()
    assert places(model, "half-head", data=batch(16)) == [("error", "out")]


def test_half_head_names_the_layer_before_an_operation():
    with stock("mixed_float16"):
        x = keras.Input((16,))
        logits = L.Dense(8, name="out")(x)
        model = keras.Model(x, keras.ops.reshape(logits, (-1, 2, 4)))
    assert places(model, "half-head") == [("warning", "out")]


def test_half_loss_reads_the_dtype_of_losses():
    loss = {"a": keras.losses.MeanSquaredError(dtype="bfloat16", name="low")}
    model = sequential(head())
    found = lint(model, loss=loss).of(rule="half-loss")
    assert [(each.severity, each.layer) for each in found] == [("error", None)]
    assert "'low' is computed in bfloat16" in found[0].message
    assert places(model, "half-loss", loss=keras.losses.MeanSquaredError()) == []
    assert places(model, "half-loss", loss="mse") == []


def test_half_loss_reads_the_default_dtype_of_losses():
    model = sequential(head())
    keras.config.set_floatx("float16")
    try:
        assert places(model, "half-loss") == [("error", None)]
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.parametrize("layer", [Guarded, Clamped], ids=["sum", "bound"])
def test_vanishing_epsilon_tells_one_that_is_0_in_float16(layer):
    with stock("mixed_float16"):
        model = sequential(layer(1e-8, name="guarded"), head())
    (found,) = lint(model).of(rule="vanishing-epsilon")
    assert (found.severity, found.layer, found.figure) == ("error", "guarded", 1e-8)


def test_an_epsilon_that_vanishes_gives_nan_as_the_rule_says():
    zeros = np.zeros((1, 4), "float32")
    assert np.isnan(Guarded(1e-8, dtype="float16")(zeros)).all()
    assert not np.isnan(Guarded(1e-7, dtype="float16")(zeros)).any()


def test_constant_range_lets_keras_masks_be():
    with stock("mixed_float16"):
        tokens = keras.Input((4,), dtype="int32")
        h = L.Embedding(16, 8, mask_zero=True)(tokens)
        h = L.MultiHeadAttention(2, 4, dropout=0.1)(h, h)
        h = L.GlobalAveragePooling1D()(L.LSTM(8, return_sequences=True)(h))
        attention = keras.Model(tokens, head()(h))
    assert places(attention, "constant-range") == []


def test_a_mask_beyond_the_range_gives_nan_as_the_rule_says():
    x = np.array([[1.0, -1.0]], "float32")
    assert np.isnan(Masked(-1e9, dtype="float16")(x)).any()
    assert not np.isnan(Masked(-1e9, dtype="float32")(x)).any()


REDUCTIONS = {
    "sum": (lambda x: tf.reduce_sum(x, 1), 4096, "float16", True),
    "sum that is short": (lambda x: tf.reduce_sum(x, 1), 2048, "float16", False),
    "mean": (lambda x: tf.reduce_mean(x, 1), 4096, "float16", True),
    "mean of Keras": (lambda x: keras.ops.mean(x, 1), 4096, "float16", False),
    "running sum": (lambda x: tf.cumsum(x, 1)[:, -1], 4096, "float16", True),
    "bfloat16 sum": (lambda x: tf.reduce_sum(x, 1), 4096, "bfloat16", False),
    "bfloat16 running": (lambda x: tf.cumsum(x, 1)[:, -1], 512, "bfloat16", True),
    "bfloat16 short": (lambda x: tf.cumsum(x, 1)[:, -1], 256, "bfloat16", False),
}


@pytest.mark.parametrize(
    "function, steps, dtype, hits", REDUCTIONS.values(), ids=REDUCTIONS
)
def test_long_reduction_counts_the_terms(function, steps, dtype, hits):
    with stock(f"mixed_{dtype}"):
        model = sequential(Own(function, name="sum"), head(), shape=(steps, 8))
    expected = [("warning", "sum")] if hits else []
    assert places(model, "long-reduction") == expected


@pytest.mark.parametrize("side, hits", [(32, True), (16, False)])
def test_long_reduction_counts_the_window_of_a_pool(side, hits):
    with stock("mixed_float16"):
        pool = L.AveragePooling2D(side, name="pool")
        model = sequential(pool, L.Flatten(), head(), shape=(side, side, 8))
    found = lint(model).of(rule="long-reduction")
    assert [each.figure for each in found] == ([1024] if hits else [])


def masked_pool(steps=4096):
    tokens = keras.Input((steps,), dtype="int32")
    h = L.Embedding(16, 8, mask_zero=True)(tokens)
    return keras.Model(tokens, L.Dense(8)(L.GlobalAveragePooling1D(name="pool")(h)))


def test_long_reduction_finds_masked_pooling():
    with stock("mixed_float16"):
        model = masked_pool()
    assert places(model, "long-reduction") == [("warning", "pool")]
    with tfamp.scope("mixed_float16"):
        managed = masked_pool()
    assert places(managed, "long-reduction") == []


INPUTS = {
    "normal": ((0.0, 1.0), []),
    "large": ((0.0, 1000.0), [("warning", "first")]),
    "far from 0": ((1000.0, 0.1), [("warning", "first")]),
    "beyond the range": ((70_000.0, 1.0), [("error", "first")]),
    "pixels": ((128.0, 40.0), []),
}


@pytest.mark.parametrize("numbers, expected", INPUTS.values(), ids=INPUTS)
def test_unnormalised_input_judges_the_numbers(numbers, expected):
    with stock("mixed_float16"):
        model = sequential(L.Dense(8, name="first"), head())
    data = batch(16, mean=numbers[0], scale=numbers[1])
    assert places(model, "unnormalised-input", data=data) == expected


def test_unnormalised_input_leaves_exact_inputs_alone():
    data = batch(16, mean=1000.0, scale=0.1)
    rule = "unnormalised-input"
    with tfamp.scope("mixed_float16"):
        model = sequential(L.BatchNormalization(), L.Dense(8), L.Dense(8))
    assert places(model, rule, data=data) == []
    with stock("mixed_float16"):
        low = sequential(L.BatchNormalization(name="norm"), L.Dense(8), head())
    assert places(low, rule, data=data) == [("warning", "norm")]
    assert places(sequential(head()), rule, data=data) == []


def test_unnormalised_input_looks_at_each_feature_and_batch():
    with stock("mixed_bfloat16"):
        model = sequential(L.Dense(8, name="first"), head(), shape=(3,))
    x, y = batch(3, size=64)
    x[:, 1] += 500
    found = lint(model, data=(x, y)).of(rule="unnormalised-input")
    assert ["in column 1" in each.message for each in found] == [True]
    later = batch(3, size=64)
    later[0][40, 2] = 3.4e38  # bfloat16 ends at 3.39e38
    assert places(model, "unnormalised-input", data=later) == [("error", "first")]


class Lookup(keras.Model):
    """Looks up rows; a subclassed model casts its inputs before its layers do."""

    def __init__(self, rows):
        super().__init__()
        self.table = L.Embedding(rows, 8, name="table")
        self.last = L.Dense(8, dtype="float32", name="last")

    def call(self, x):
        return self.last(keras.ops.max(self.table(x), 1))


def lookup(policy, rows=5000):
    with policy:
        return Lookup(rows)


def ids(largest):
    return np.array([[1, 2, 3, largest]] * 8, "float32"), np.zeros((8, 8), "float32")


FLOAT_IDS = {
    "rounded": (4999, 5000, "mixed_float16", [("error", "table")]),
    "may be": (100, 5000, "mixed_float16", [("warning", "table")]),
    "few": (100, 2000, "mixed_float16", []),
    "bfloat16": (300, 1000, "mixed_bfloat16", [("error", "table")]),
}


@pytest.mark.parametrize(
    "largest, rows, policy, expected", FLOAT_IDS.values(), ids=FLOAT_IDS
)
def test_float_ids_finds_ids_that_are_rounded(largest, rows, policy, expected):
    model = lookup(stock(policy), rows)
    found = lint(model, data=ids(largest))
    assert [(e.severity, e.layer) for e in found.of(rule="float-ids")] == expected
    assert found.of(rule="unnormalised-input") == ()


def test_float_ids_lets_integers_and_managed_tables_be():
    managed = lookup(tfamp.scope("mixed_float16"))
    assert places(managed, "float-ids", data=ids(4999)) == []
    integers = lookup(stock("mixed_float16"))
    data = tuple(array.astype("int32") for array in ids(4999))
    assert places(integers, "float-ids", data=data) == []


def test_float_ids_finds_a_packed_column_of_a_subclassed_model():
    class Packed(keras.Model):
        def __init__(self, rows=3000):
            super().__init__()
            self.table = L.Embedding(rows, 4, name="table")
            self.last = L.Dense(8, dtype="float32", name="last")

        def call(self, x):
            row = self.table(keras.ops.cast(x[:, 0], "int32"))
            return self.last(keras.ops.concatenate([row, x[:, 1:]], -1))

    x, y = batch(4)
    x[:, 0] = np.arange(8) + 2045
    with stock("mixed_float16"):
        model = Packed()
    found = lint(model, data=(x, y)).of(rule="float-ids")
    assert [(e.severity, e.layer, e.figure) for e in found] == [
        ("error", "table", 2052)
    ]
    x[:, 0], x[:, 1] = np.arange(8), 5000.25  # a quantity, no id
    with stock("mixed_float16"):
        model = Packed(rows=100)
    assert places(model, "float-ids", data=(x, y)) == []


@pytest.fixture
def distribution():
    """A distribution of Keras's own; making one fails with Keras 3.10."""
    try:
        made = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    except AttributeError:
        pytest.skip("this Keras cannot make one on TensorFlow")
    keras.distribution.set_distribution(made)
    yield made
    keras.distribution.set_distribution(None)


@pytest.mark.parametrize("where", ["enable", "fit"])
def test_enable_and_fit_warn_of_a_distribution_once(distribution, where):
    message = "`keras.distribution` is set to DataParallel, which Keras does not follow"
    if where == "enable":
        with pytest.warns(UserWarning, match=message), tfamp.scope("float32"):
            pass
        with tfamp.scope("float32"):
            return
    keras.distribution.set_distribution(None)
    with tfamp.scope("mixed_bfloat16"):
        model = sequential(head(), shape=(4,))
    keras.distribution.set_distribution(distribution)
    x, y = np.ones((2, 4), "float32"), np.ones((2, 8), "float32")
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.warns(UserWarning, match=message):
        model.fit(x, y, verbose=0)
    model.fit(x, y, verbose=0)


def test_late_policy_names_layers_made_before_it():
    early = [L.Dense(8, name="early"), L.Dense(8, name="earlier")]
    with tfamp.scope("mixed_bfloat16"):
        model = sequential(*early, L.Dense(8, name="on_time"), L.LayerNormalization())
        (found,) = lint(model).of(rule="late-policy")
    assert (found.severity, found.layer, found.figure) == ("warning", "early", 2)
    assert "'early' and 'earlier'" in found.message


def test_late_policy_sees_layers_made_before_a_policy_that_is_gone_again():
    early = L.Dense(8, name="early")
    with tfamp.scope("mixed_bfloat16"):
        model = sequential(early, L.Dense(8, dtype="float32"), L.Dense(8))
    assert places(model, "late-policy") == [("warning", "early")]
    assert places(sequential(L.Dense(8), head()), "late-policy") == []
