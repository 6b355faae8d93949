"""`fit_statistics`, `Condition`, `Rescale`: numbers, layouts, dtypes, files."""

import re
import types

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals, refused_arguments
from tfamp.data import Condition, Pipeline, fit_statistics
from tfamp.data.layers import Rescale

NAN = float("nan")
# Two roundings in float32 at values of a few standard deviations.
FLOAT32_ERROR = 8 * 2.0**-24


def only(statistics):
    """The figures of the only feature."""
    column = statistics.columns[0]
    fields = ("missing", "mean", "variance", "values")
    figures = {name: getattr(column, name)[0] for name in fields}
    return types.SimpleNamespace(
        **figures, quantile=lambda q: float(np.ravel(column.quantile(q))[0])
    )


@pytest.mark.parametrize("mean", [0.0, 1e8, -1e12], ids=["0", "1e8", "-1e12"])
def test_variance_keeps_its_digits_beside_a_large_mean(mean):
    values = np.random.default_rng(0).normal(mean, 1.0, (6000, 2))
    given = tf.data.Dataset.from_tensor_slices((values,)).batch(30)
    column = fit_statistics(given, batched=True).columns[0]
    exact = values.astype(np.longdouble)
    variance = exact.var(axis=0).astype(np.float64)
    # At a mean of 1e12 values themselves are 1e-4 apart.
    rtol = max(1e-9, abs(mean) * 1e-15)
    np.testing.assert_allclose(column.array("variance"), variance, rtol=rtol)
    means = exact.mean(axis=0).astype(np.float64)
    np.testing.assert_allclose(column.array("mean"), means, rtol=1e-14, atol=1e-15)


def test_one_nan_changes_nothing_but_the_count_of_missing_values():
    clean = np.random.default_rng(1).normal(5, 2, (500, 1)).astype(np.float32)
    dirty = np.insert(clean, 100, np.nan, axis=0)
    without, with_nan = only(fit_statistics(clean)), only(fit_statistics(dirty))
    assert (without.missing, with_nan.missing) == (0, 1)
    # Only the grouping of the additions differs.
    assert with_nan.mean == pytest.approx(without.mean, rel=1e-14)
    assert with_nan.variance == pytest.approx(without.variance, rel=1e-13)
    assert with_nan.values == without.values
    # Keras's own layer is lost to it.
    stock = keras.layers.Normalization()
    stock.adapt(dirty)
    assert np.isnan(np.asarray(stock.mean)).all()


VALUES = np.arange(24, dtype=np.float32).reshape(12, 2)
TARGETS = np.arange(12)


def slices(parts):
    return tf.data.Dataset.from_tensor_slices(parts)


LAYOUTS = {
    "array": lambda: VALUES,
    "pairs": lambda: slices((VALUES, TARGETS)),
    "batches": lambda: slices((VALUES, TARGETS)).batch(5),
    "pipeline": lambda: Pipeline.from_arrays(VALUES, TARGETS).batch(4),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_every_form_of_a_dataset_gives_the_same(make):
    statistics = fit_statistics(make())
    assert statistics.num_examples == 12
    column = statistics["x"]
    np.testing.assert_array_equal(column.array("mean"), [11.0, 12.0])
    np.testing.assert_array_equal(column.array("count"), [12, 12])


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


def test_keras_own_layer_is_lost_at_a_mean_of_5e4_in_float16():
    """The contrast that `Condition` is there for."""
    values = np.random.default_rng(5).normal(5e4, 1.0, (100, 1)).astype(np.float32)
    stock = keras.layers.Normalization(dtype="mixed_float16")
    stock.adapt(values)
    exact = np.float64(values)
    exact = (exact - exact.mean()) / exact.std()
    assert np.abs(stock(values).numpy().astype(np.float64) - exact).max() > 0.5
    rules = fit_statistics(values).as_layer(clip=None).rules
    ours = Condition(rules, named=False, dtype="mixed_float16")
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


def test_saved_models_give_the_same_bits(tmp_path):
    values = np.random.default_rng(1).normal([5e4, 0.0, -3.0], [1, 1e-3, 9], (30, 3))
    values[::7, 1] = NAN
    values = values.astype(np.float32)
    columns = {"v": values, "t": np.arange(30) + 1_700_000_000, "u": np.ones(30)}
    statistics = fit_statistics(columns)
    rules = statistics.as_layer("median", clip=("iqr", 1.5), columns=("t", "v")).rules
    layer = Condition(rules, named=True, name="front", dtype="mixed_bfloat16")
    inputs = {
        "v": keras.Input((3,), name="v"),
        "t": keras.Input((1,), name="t", dtype="int64"),
    }
    values = {"v": tf.constant(columns["v"]), "t": tf.constant(columns["t"][:, None])}
    model = keras.Model(inputs, layer(inputs))
    expected = tf.cast(model(values), tf.float32).numpy()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    again = loaded.get_layer("front")
    assert (again.rules, again.named) == (rules, True)
    assert again.dtype_policy.name == "mixed_bfloat16"
    model.export(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "exported"))
    for found in (loaded(values), served.serve(values)):
        assert tf.cast(found, tf.float32).numpy().tobytes() == expected.tobytes()


def as_layer(*args, **options):
    return lambda: fit_statistics(VALUES).as_layer(*args, **options)


ERRORS = {
    "all NaN": (
        lambda: fit_statistics({"age": np.array([[1.0, NAN], [2.0, np.inf]])}),
        "Features ('age[1]',) have no finite value",
    ),
    "sequence of unknown length": (
        lambda: fit_statistics(
            slices((TARGETS, TARGETS)).map(lambda x, y: (tf.range(x), y))
        ),
        "Column 'x' has examples of shape (None,); expected a last axis of known",
    ),
    "quantile above 1": (
        lambda: fit_statistics(VALUES)["x"].quantile(50),
        "`q` is 50.0; expected a number in [0, 1]",
    ),
    "fill": (as_layer("average"), "Unknown `missing` 'average'; expected 'mean'"),
    "clip": (as_layer(clip="std"), "Unknown `clip` 'std'; expected 'zscore', 'iqr'"),
    "columns": (as_layer(columns=("a",)), "Unknown column 'a'; expected one of ('x'"),
    "text for numbers": (
        lambda: as_layer()()(tf.constant([["a", "b"]])),
        "Column 'x' is string of the shape (1, 2); expected numbers",
    ),
}
test_error_says_what_to_do = refusals(ERRORS, kind=(ValueError, TypeError))


MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
CASES = {
    "to 0..1": (1 / 255, 0.0),
    "to -1..1": (1 / 127.5, -1.0),
    "negative": (-0.0123, 0.777),
    "far offset": (0.01, 1000.0),
    "mean and deviation": (1 / (255 * STD), -MEAN / STD),
    "channels": ([0.1, 0.2, 0.3], [-0.5, 0.1, -2.0]),
}
PIXELS = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, axis=1)
FORMATS = {"mixed_float16": np.float16, "mixed_bfloat16": ml_dtypes.bfloat16}


def units_off(found, scale, offset, dtype):
    """Returns how far values are from the true ones, in units in the last place."""
    true = PIXELS.astype(np.float64) * np.asarray(scale) + np.asarray(offset)
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(true), 1e-300)))
    unit = np.maximum(2.0**exponent * float(info.eps), float(info.smallest_subnormal))
    return np.abs(np.asarray(found).astype(np.float64) - true) / unit


@pytest.mark.quick(
    "graph-mixed_float16-to -1..1",
    "graph-mixed_float16-far offset",
    "xla-mixed_bfloat16-to 0..1",
)
@pytest.mark.parametrize("scale, offset", CASES.values(), ids=CASES)
@pytest.mark.parametrize("policy", FORMATS)
@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
def test_every_pixel_value_is_the_nearest_to_the_true_one(policy, scale, offset, jit):
    layer = Rescale(scale, offset, dtype=policy)
    found = tf.function(layer, jit_compile=jit)(tf.constant(PIXELS))
    assert found.dtype == layer.compute_dtype
    assert units_off(found.numpy(), scale, offset, FORMATS[policy]).max() <= 0.5


@pytest.mark.parametrize(
    "policy, least",
    [("float32", 100), ("mixed_float16", 7), ("mixed_bfloat16", 100)],
    ids=["float32", "float16", "bfloat16"],
)
def test_the_layer_of_keras_still_loses_digits(policy, least):
    scale, offset = CASES["to -1..1"]
    found = keras.layers.Rescaling(scale, offset, dtype=policy)(PIXELS).numpy()
    dtype = FORMATS.get(policy, np.float32)
    assert units_off(found, scale, offset, dtype).max() > least


def test_a_model_keeps_it_through_its_file(tmp_path):
    inputs = keras.Input((3,), dtype="uint8")
    scale, offset = CASES["channels"]
    layer = Rescale(scale, offset, name="first", dtype="mixed_bfloat16")
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("first").get_config() == layer.get_config()
    np.testing.assert_array_equal(loaded(PIXELS).numpy(), model(PIXELS).numpy())


test_wrong_arguments_are_refused = refused_arguments(
    Rescale,
    ("scale", 0.0, "; expected numbers other than 0"),
    ("offset", np.nan, "; expected a finite number, or one for each"),
)
