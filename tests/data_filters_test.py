"""`Pipeline.filter`: what is dropped, for which reason, and how it is counted."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.file_sources import told
from tests.refusals import refusals
from tfamp.data import Pipeline

NAN = float("nan")


def table(rows=300):
    """Three float32 features with holes, and a target."""
    random = np.random.default_rng(0)
    values = random.normal([1.0, 5.0, -2.0], [1.0, 3.0, 0.1], (rows, 3))
    values[::7, 1] = NAN
    values[3::11, 2] = NAN
    return values.astype(np.float32), np.arange(rows)


VALUES, LABELS = table()
begin = Pipeline.from_arrays


def targets(pipeline):
    return [int(y) for _, y in pipeline.build()]


def test_outliers_go_by_the_limits_of_statistics():
    x = np.concatenate([np.linspace(-1, 1, 99), [50.0]]).astype("float32")
    y = np.arange(100)
    statistics = tfamp.data.fit_statistics(x)
    for rule in ("iqr", ("zscore", 3.0), (0.0, 0.99)):
        pipeline = begin(x, y).filter(outliers=rule, statistics=statistics)
        assert targets(pipeline) == [*range(99)]
    rows = np.stack([x, x[::-1]], axis=1)
    statistics = tfamp.data.fit_statistics({"a": rows, "b": x})
    pipeline = begin({"a": rows, "b": x}, y).filter(
        lambda x, y: y > 1, outliers="iqr", statistics=statistics
    )
    assert targets(pipeline) == [*range(2, 99)]
    with pytest.raises(TypeError, match="expected both"):
        begin(x).filter(outliers="iqr")
    with pytest.raises(ValueError, match="has column 'a'"):
        begin(x, y).filter(outliers="iqr", statistics=statistics).build()


def test_what_is_dropped_is_counted_for_each_reason():
    by_predicate = begin(VALUES, LABELS).filter(lambda x, y: y % 3 == 0)
    assert targets(by_predicate) == list(range(0, 300, 3))
    assert "dropped 200 of 300 elements (66.7 %) in 1 pass" in told(by_predicate)
    assert "dropped" not in told(by_predicate.batch(2)), "another pipeline"
    by_nan = begin(VALUES, LABELS).filter(missing="drop")
    assert targets(by_nan) == list(np.flatnonzero(~np.isnan(VALUES).any(axis=1)))
    assert int(by_nan.build().cardinality()) == tf.data.UNKNOWN_CARDINALITY


def test_a_pass_that_keeps_nothing_ends_in_an_error_in_fit_too():
    values = np.full((10, 2), NAN, np.float32)
    pipeline = begin(values, np.zeros(10)).filter(missing="drop")
    message = re.escape("`filter` dropped all 10 elements;")
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(pipeline.build())
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        model.fit(pipeline.batch(2), verbose=0)


def filtered(pipeline, *arguments, **options):
    return lambda: pipeline.filter(*arguments, **options).build()


ERRORS = {
    "nothing": (filtered(begin(VALUES)), "`predicate` is None; expected something"),
    "batches": (
        filtered(
            Pipeline.from_dataset(begin(VALUES, LABELS).batch(2).build()),
            missing="drop",
        ),
        "look like batches; expected single examples",
    ),
    "no boolean": (
        filtered(begin(VALUES), lambda x: x > 0),
        "`predicate` returns TensorSpec(shape=(3,), dtype=tf.bool, name=None)",
    ),
}
test_errors_say_what_to_do = refusals(ERRORS, kind=(ValueError, TypeError))
