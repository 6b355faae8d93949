"""`tfamp.data.fit_statistics`: moments, quantiles, missing values, layouts."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals
from tfamp.data import Pipeline, fit_statistics


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


NAN = float("nan")
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
}


test_error_says_what_to_do = refusals(ERRORS, kind=(ValueError, TypeError))
