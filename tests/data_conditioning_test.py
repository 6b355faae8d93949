"""`Statistics.as_layer`: fills, clips, scales, in every place and dtype."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals
from tfamp.data import Condition, fit_statistics

# Two roundings in float32 at values of a few standard deviations.
FLOAT32_ERROR = 8 * 2.0**-24
NAN = float("nan")


def table(rows=400):
    """Three features of very different size, with holes."""
    random = np.random.default_rng(1)
    values = random.normal([5e4, 0.0, -3.0], [1.0, 1e-3, 9.0], (rows, 3))
    values[::7, 1] = NAN
    return values.astype(np.float32)


def oracle(values):
    """Standardized, in float64, by NumPy alone."""
    values = np.asarray(values, np.float64)
    return (values - values.mean(axis=0)) / values.std(axis=0)


# Numbers


@pytest.mark.parametrize("missing", ["mean", "median", 7.0])
def test_missing_values_are_filled(missing):
    values = np.array([[1.0], [1.0], [5.0], [9.0], [NAN]])
    layer = fit_statistics(values).as_layer(missing, clip=None)
    # Without NaN: 1, 1, 5, 9.
    filled = {"mean": 4.0, "median": 1.0, 7.0: 7.0}[missing]
    expected = (np.array([1, 1, 5, 9, filled]) - 4) / np.sqrt(11)
    np.testing.assert_allclose(layer(values)[:, 0], expected, atol=FLOAT32_ERROR)


STD = np.sqrt(9999 / 12)  # of 1, ..., 100
CLIPS = {
    # Of 1, ..., 100: values at ranks 1 and 99.
    "quantiles": ((0.01, 0.99), 1.0, 99.0),
    "zscore": (("zscore", 1.0), 50.5 - STD, 50.5 + STD),
    # Quartiles 25 and 75.
    "iqr": (("iqr", 0.2), 15.0, 85.0),
}


@pytest.mark.parametrize("clip, low, high", CLIPS.values(), ids=CLIPS)
def test_outliers_are_clipped_at_limits_of_the_training_data(clip, low, high):
    values = np.arange(1.0, 101.0)
    layer = fit_statistics(values).as_layer(clip=clip)
    new = np.array([-1e6, 1.0, 50.0, 100.0, 200.0, np.inf])
    clipped = np.clip(values, low, high)
    expected = (np.clip(new, low, high) - clipped.mean()) / clipped.std()
    np.testing.assert_allclose(layer(new), expected, rtol=FLOAT32_ERROR)


def test_rare_flags_are_not_clipped_away_and_it_is_said():
    flags = np.zeros((300, 2), np.float32)
    flags[7, 1] = 1.0
    message = (
        "`clip` would make features ('x[1]',) constant, as nearly all of their "
        "values are equal; they are not clipped. To clip nothing, pass `clip=None`."
    )
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        layer = fit_statistics(flags).as_layer()
    assert caught[0].filename == __file__
    assert np.ptp(layer(flags).numpy()[:, 1]) > 1


# Dtypes and policies


def test_keras_own_layer_is_lost_at_a_mean_of_5e4_in_float16():
    """The contrast that `Condition` is there for."""
    values = np.random.default_rng(5).normal(5e4, 1.0, (100, 1)).astype(np.float32)
    stock = keras.layers.Normalization(dtype="mixed_float16")
    stock.adapt(values)
    exact = oracle(values)
    assert np.abs(stock(values).numpy().astype(np.float64) - exact).max() > 0.5
    ours = Condition(
        fit_statistics(values).as_layer(clip=None).rules,
        named=False,
        dtype="mixed_float16",
    )
    assert np.abs(ours(values).numpy().astype(np.float64) - exact).max() < 4 * 2**-10


@pytest.mark.parametrize("jit_compile", [None, True], ids=["graph", "XLA"])
@pytest.mark.parametrize("clip", [None, (0.1, 0.9)], ids=["free", "clipped"])
def test_far_features_keep_their_digits_without_float64(jit_compile, clip):
    values = np.random.default_rng(11).normal(5e4 + 0.3, 0.7, (400, 1))
    values[::5] = NAN
    values = values.astype(np.float32)
    layer = fit_statistics(values).as_layer(clip=clip)
    outputs = tf.function(layer, jit_compile=jit_compile)(values)
    (rule,) = layer.rules
    low, high, fill = (np.array(x) for x in (rule.lower, rule.upper, rule.fill))
    exact = np.clip(np.where(np.isnan(values), fill, np.float64(values)), low, high)
    exact = (exact - np.array(rule.center)) / np.array(rule.width)
    assert clip is None or 30 <= np.sum(exact == exact.max()) <= 35
    np.testing.assert_allclose(outputs, exact, atol=FLOAT32_ERROR)
    if clip is None:  # what is filled with the mean is exactly 0
        assert (np.asarray(outputs)[::5] == 0).all()


# Saving


def test_config_keeps_every_field():
    columns = {
        "v": table(50),
        "s": np.random.default_rng(9).lognormal(size=50).astype(np.float32),
    }
    rules = fit_statistics(columns).as_layer("median", clip=("iqr", 1.5)).rules
    layer = Condition(rules, named=True, name="front", dtype="mixed_bfloat16")
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(layer)
    )
    assert again.rules == layer.rules
    assert again.named is True
    assert (again.name, again.dtype_policy.name) == ("front", "mixed_bfloat16")


def test_saved_models_give_the_same_bits(tmp_path):
    columns = {"v": table(30), "t": np.arange(30) + 1_700_000_000, "u": np.ones(30)}
    layer = fit_statistics(columns).as_layer(columns=("t", "v"))
    inputs = {
        "v": keras.Input((3,), name="v"),
        "t": keras.Input((1,), name="t", dtype="int64"),
    }
    values = {"v": tf.constant(columns["v"]), "t": tf.constant(columns["t"][:, None])}
    model = keras.Model(inputs, layer(inputs))
    expected = tf.cast(model(values), tf.float32).numpy()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    model.export(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "exported"))
    for found in (loaded(values), served.serve(values)):
        assert tf.cast(found, tf.float32).numpy().tobytes() == expected.tobytes()


# Dicts


# Errors

VALUES = np.array([[1.0, 2.0], [3.0, 4.0], [-5.0, 7.0]])


def as_layer(*args, **options):
    return lambda: fit_statistics(VALUES).as_layer(*args, **options)


ERRORS = {
    "fill": (as_layer("average"), "Unknown `missing` 'average'; expected 'mean'"),
    "clip": (as_layer(clip="std"), "Unknown `clip` 'std'; expected 'zscore', 'iqr'"),
    "columns": (as_layer(columns=("a",)), "Unknown column 'a'; expected one of ('x'"),
    "text for numbers": (
        lambda: as_layer()()(tf.constant([["a", "b"]])),
        "Column 'x' is string of the shape (1, 2); expected numbers",
    ),
}


test_error_says_what_to_do = refusals(ERRORS, kind=(ValueError, TypeError))
