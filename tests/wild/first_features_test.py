"""Features that half precision does not hold: beyond float16, or rounded away."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import assembled
from tests.wild.own_layers import Own

layers = keras.layers
pytestmark = [
    pytest.mark.filterwarnings("ignore:'mixed_.*float16' will be slow"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
]
YEARS = np.random.default_rng(0).integers(1990, 2025, (512, 1)).astype("float32")
TREND = (YEARS - 2007) / 10


def incomes():
    """A column of which some values are beyond float16, and what hangs on it."""
    x = np.random.default_rng(0).integers(0, 9000, (64, 1)).astype("float32")
    x[20::8] = 99999  # none among the first examples
    return x, (x > 5000).astype("float32")


def of_columns(first):
    """Returns a model that adds what two layers make of a column."""
    x = keras.Input((1,), name="income")
    both = first(x) + keras.layers.Dense(8)(x)
    out = keras.layers.Dense(1)(keras.layers.LayerNormalization()(both))
    model = keras.Model({"income": x}, out)
    model.compile("sgd", "mse")
    return model


def test_what_is_given_more_than_float16_has_computes_in_float32(caplog):
    x, y = incomes()
    with tfamp.scope("mixed_float16"):
        model = of_columns(keras.layers.Dense(8, name="wide"))
        history = model.fit({"income": x}, y, epochs=3, shuffle=False, verbose=0)
    assert np.isfinite(model.predict({"income": x}, verbose=0)).all()
    assert np.isfinite(history.history["loss"]).all()
    assert int(model.optimizer.skipped_steps) == 0
    assert "'wide' computes in float32: it is given values up to 99999" in caplog.text


def test_where_that_does_not_help_the_feature_is_named():
    x, y = incomes()
    with tfamp.scope("mixed_float16"):
        first = Own(lambda x: tf.cast(tf.cast(x, "float16"), x.dtype))
        model = of_columns(first)
        with pytest.warns(UserWarning, match="income.* up to 99999.*Scale"):
            model.fit({"income": x}, y, shuffle=False, verbose=0)


def test_what_a_user_has_given_a_dtype_keeps_it_and_the_feature_is_named():
    x, y = incomes()
    with tfamp.scope("mixed_float16"):
        model = of_columns(keras.layers.Dense(8, dtype="float16", name="wide"))
        with pytest.warns(UserWarning, match="income.* up to 99999.*Scale"):
            model.fit({"income": x}, y, shuffle=False, verbose=0)
    assert model.get_layer("wide").compute_dtype == "float16"


class Squeezing(keras.layers.Layer):
    """Brings large numbers down between two layers."""

    def __init__(self):
        super().__init__()
        self.wide, self.deep = keras.layers.Dense(8), keras.layers.Dense(8)

    def call(self, x):
        wide = self.wide(x)
        return self.deep(wide / (1.0 + tf.abs(wide)))


def test_of_a_users_block_only_what_is_given_too_much_computes_in_float32():
    x, y = incomes()
    with tfamp.scope("mixed_float16"):
        block = Squeezing()
        model = keras.Sequential([block, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(x, y, shuffle=False, verbose=0)
    assert np.isfinite(model.predict(x, verbose=0)).all()
    dtypes = [layer.compute_dtype for layer in (block, block.wide, block.deep)]
    assert dtypes == ["float32", "float32", "float16"]


def test_ids_beyond_float16_are_no_such_feature(caplog):
    with tfamp.scope("mixed_float16"):
        model = keras.Sequential(
            [keras.layers.Embedding(2**17, 4), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        model.fit(np.full((8, 1), 99999.0), np.ones((8, 1, 1)), verbose=0)
    assert "beyond" not in caplog.text


def fitted(policy, x, y, *first, style="functional", **options):
    """Trains on a column; returns the model, and its answers."""
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy, **options):
        hidden = [*first, layers.Dense(32, activation="relu", name="hidden")]
        model = assembled([*hidden, layers.Dense(1)], style, (1,))
        model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=False)
        model.fit(x, y, epochs=3, verbose=0)
    return model, model.predict(x, verbose=0)


@pytest.mark.parametrize("style", ["functional", "sequential", "subclassed"])
def test_years_are_told_apart_as_in_float32(style, caplog):
    _, exact = fitted("float32", YEARS, TREND, style=style)
    model, found = fitted("mixed_bfloat16", YEARS, TREND, style=style)
    np.testing.assert_allclose(found, exact, rtol=1e-3)
    assert len(np.unique(found)) == len(np.unique(YEARS))
    assert model.layers[-2].compute_dtype == "float32"
    assert "bfloat16 rounds the feature inputs of its model by 2" in caplog.text
    _, rounded = fitted("mixed_bfloat16", YEARS, TREND, style=style, check=None)
    assert len(np.unique(rounded)) < 8  # as stock Keras's


def test_a_column_of_many_is_named_and_integers_are_looked_at_too(caplog):
    with tfamp.scope("mixed_bfloat16"):
        inputs = {
            "year": keras.Input((1,), name="year", dtype="int32"),
            "size": keras.Input((2,), name="size"),
        }
        both = layers.Concatenate()(
            [keras.ops.cast(inputs["year"], "float32"), inputs["size"]]
        )
        model = keras.Model(inputs, layers.Dense(1)(layers.Dense(8)(both)))
        model.compile("sgd", "mse", run_eagerly=True)
        sizes = np.random.default_rng(0).normal(size=(len(YEARS), 2))
        data = {"year": YEARS.astype("int32"), "size": sizes.astype("float32")}
        model.fit(data, TREND, verbose=0)
    assert "rounds the feature 'year' of its model" in caplog.text


@pytest.mark.parametrize(
    ("x", "first"),
    [
        (YEARS, [layers.BatchNormalization]),
        (YEARS, [lambda: layers.Normalization(mean=2007.0, variance=100.0)]),
        ((YEARS - 2007) / 10, []),
        (np.full_like(YEARS, 2007.3), []),
    ],
    ids=["BatchNormalization", "Normalization", "standardized", "constant"],
)
def test_what_is_standardized_first_trains_in_half_precision(x, first, caplog):
    with tfamp.scope("mixed_bfloat16"):
        parts = [*(make() for make in first), layers.Dense(8, name="hidden")]
        model = keras.Sequential([*parts, layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(x, TREND, epochs=1, verbose=0)
    assert model.get_layer("hidden").compute_dtype == "bfloat16"
    assert "rounds" not in caplog.text


def test_where_layers_have_their_dtypes_or_are_left_it_is_warned_of():
    hidden = layers.Dense(8, dtype="bfloat16")
    with pytest.warns(UserWarning, match="bfloat16 rounds features.*inputs by 2"):
        fitted("mixed_bfloat16", YEARS, TREND, hidden)
    with pytest.warns(UserWarning, match="'hidden' is spoiled.*the feature inputs"):
        model, _ = fitted("mixed_bfloat16", YEARS, TREND, check="warn")
    assert model.get_layer("hidden").compute_dtype == "bfloat16"


def test_what_layers_draw_is_no_error_of_rounding():
    model, _ = fitted("mixed_bfloat16", YEARS, TREND, layers.Dropout(0.5))
    assert model.get_layer("hidden").compute_dtype == "float32"
    noisy = Own(lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype))
    with pytest.warns(UserWarning, match="bfloat16 rounds features.*inputs by 2"):
        fitted("mixed_bfloat16", YEARS, TREND, noisy)
