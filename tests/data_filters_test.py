"""`Pipeline.filter`: what is dropped, for which reason, and how it is counted."""

import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import told
from tests.refusals import refusals
from tests.replicas import two_replicas
from tfamp.data import Pipeline, fit_statistics

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


def is_small(x, y):
    return y < 4


def test_predicate_keeps_what_it_is_true_of_and_counts_the_rest():
    pipeline = begin(VALUES, LABELS).filter(lambda x, y: y % 3 == 0)
    assert targets(pipeline) == list(range(0, 300, 3))
    assert "Dropped 200 of 300 elements (66.7 %) in 1 pass: 200" in told(pipeline)
    assert int(pipeline.build().cardinality()) == tf.data.UNKNOWN_CARDINALITY


FORMS = {
    "x": (lambda: begin(VALUES), lambda x: x[0] < 99),
    "weights": (lambda: begin(VALUES, LABELS, LABELS < 9), lambda x, y, w: w),
    "a dict": (
        lambda: begin({"v": VALUES, "n": LABELS}, LABELS),
        lambda x, y: x["n"] > 3,
    ),
    "a dict alone": (lambda: begin({"n": LABELS}), lambda x: x["n"] > 3),
}


@pytest.mark.parametrize("make, predicate", FORMS.values(), ids=FORMS)
def test_predicate_takes_every_form_of_an_element(make, predicate):
    kept = make().filter(predicate).build()
    stock = make().build()
    stock = stock.filter(predicate)
    assert kept.element_spec == stock.element_spec
    assert str(list(kept.as_numpy_iterator())) == str(list(stock.as_numpy_iterator()))


def test_predicate_may_branch_in_python_and_sees_nothing_that_is_dropped_already():
    def fails_on_nan(x, y):
        with tf.control_dependencies([tf.debugging.assert_equal(x, x)]):
            if y > 1:
                return False
            return True

    values = np.array([[1.0], [NAN], [5.0]], np.float32)
    pipeline = begin(values, np.arange(3)).filter(fails_on_nan, missing="drop")
    assert targets(pipeline) == [0]
    assert "1 missing value and 1 predicate" in told(pipeline)


def test_elements_with_nan_are_dropped():
    pipeline = begin(VALUES, LABELS).filter(missing="drop")
    assert targets(pipeline) == list(np.flatnonzero(~np.isnan(VALUES).any(axis=1)))
    assert pipeline.build().element_spec == begin(VALUES, LABELS).build().element_spec


def test_declared_values_are_dropped_in_numbers_and_text():
    columns = {
        "age": np.array([1, -9, 3, 4]),
        "city": np.array(["a", "b", "?", "d"]),
        "pay": np.array([1.0, 2.0, 3.0, NAN], np.float32),
    }
    statistics = fit_statistics(columns, missing_value=(-9, "?"))
    pipeline = begin(columns, np.arange(4))
    assert targets(pipeline.filter(missing="drop", statistics=statistics)) == [0]
    some = fit_statistics({"age": columns["age"]}, missing_value=-9)
    assert targets(pipeline.filter(missing="drop", statistics=some)) == [0, 2, 3]


def tukey(values, width):
    low, high = np.quantile(values, [0.25, 0.75], method="inverted_cdf")
    return low - width * (high - low), high + width * (high - low)


RULES = {
    "zscore": (
        ("zscore", 1.5),
        lambda v: (v.mean() - 1.5 * v.std(), v.mean() + 1.5 * v.std()),
    ),
    "iqr": (("iqr", 0.5), lambda v: tukey(v, 0.5)),
    "quantile": (
        ("quantile", 0.1, 0.8),
        lambda v: np.quantile(v, [0.1, 0.8], method="inverted_cdf"),
    ),
}


@pytest.mark.parametrize("rule, limits", RULES.values(), ids=RULES)
def test_outliers_are_dropped_at_limits_of_the_statistics(rule, limits):
    pairs = [limits(v[~np.isnan(v)].astype(np.float64)) for v in VALUES.T]
    low, high = np.array(pairs).T
    statistics = fit_statistics(VALUES)
    pipeline = begin(VALUES, LABELS).filter(outliers=rule, statistics=statistics)
    # NaN is no outlier.
    is_out = ((VALUES < low) | (VALUES > high)).any(axis=1)
    assert 20 < is_out.sum() < 280
    assert targets(pipeline) == list(np.flatnonzero(~is_out))
    assert f"{is_out.sum()} outlier" in told(pipeline)


def test_infinities_are_outliers():
    values = np.array([[1.0], [2.0], [3.0], [np.inf], [-np.inf]])
    statistics = fit_statistics(values)
    pipeline = begin(values).filter(outliers="iqr", statistics=statistics)
    assert [float(x[0]) for x in pipeline.build()] == [1, 2, 3]


def test_counts_add_up_over_passes_threads_and_builds():
    pipeline = begin(np.zeros(10), np.arange(10)).filter(is_small)
    dataset = pipeline.build()
    threads = [threading.Thread(target=lambda: list(dataset)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = "Dropped 18 of 30 elements (60.0 %) in 3 passes: 18 predicate."
    assert text in told(pipeline)
    assert "Dropped" not in told(pipeline.batch(2)), "another pipeline"


def test_a_long_pass_is_counted_before_its_end():
    values = np.zeros((9_000, 1), np.float32)
    values[:1_000] = NAN
    pipeline = begin(values).filter(missing="drop")
    iterator = iter(pipeline.build())
    for _ in range(7_500):
        next(iterator)
    # Reported every 4,096 elements.
    assert "Dropped 1,000 of 8,192 elements" in told(pipeline)


def test_a_pass_that_keeps_nothing_ends_in_an_error_in_fit_too():
    values = np.full((10, 2), NAN, np.float32)
    pipeline = begin(values, np.zeros(10)).filter(missing="drop")
    message = re.escape("`filter` dropped all 10 elements ([10 0 0] of them by")
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(pipeline.build())
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        model.fit(pipeline.batch(2), verbose=0)


def test_two_interleaved_passes_raise_no_error():
    dataset = begin(np.zeros(10), np.arange(10)).filter(lambda x, y: y == 9).build()
    first, second = iter(dataset), iter(dataset)
    assert int(next(first)[1]) == int(next(second)[1]) == 9
    assert list(first) == list(second) == []


def test_it_feeds_replicas_of_a_strategy():
    strategy = two_replicas()
    pipeline = begin(np.zeros(16), np.arange(16)).filter(lambda x, y: y % 2 == 0)
    found = []
    distributed = strategy.experimental_distribute_dataset(pipeline.batch(4).build())
    for _, labels in distributed:
        for part in strategy.experimental_local_results(labels):
            found += part.numpy().tolist()
    assert sorted(found) == list(range(0, 16, 2))


def test_a_fitted_imputer_fills_in_a_map():
    sklearn = pytest.importorskip("sklearn.impute")
    imputer = sklearn.KNNImputer(n_neighbors=3).fit(VALUES)

    def fill(x, y):
        row = tf.numpy_function(lambda x: imputer.transform(x[None])[0], [x], x.dtype)
        return tf.ensure_shape(row, x.shape), y

    filled = [x.numpy() for x, _ in begin(VALUES, LABELS).map(fill).build()]
    np.testing.assert_array_equal(filled, imputer.transform(VALUES))


STATISTICS = fit_statistics(VALUES)


def filtered(pipeline, *arguments, **options):
    return lambda: pipeline.filter(*arguments, **options).build()


ERRORS = {
    "nothing": (filtered(begin(VALUES)), "`.filter` came without anything to do"),
    "function": (filtered(begin(VALUES), 3), "`predicate` is 3; expected something"),
    "missing": (
        filtered(begin(VALUES), missing="mean"),
        "Unknown `missing` 'mean'; expected 'drop'",
    ),
    "no statistics": (
        filtered(begin(VALUES), outliers="iqr"),
        "`outliers` is 'iqr' and `statistics` is None; expected what",
    ),
    "statistics of another kind": (
        filtered(begin(VALUES), outliers="iqr", statistics={"mean": 1}),
        "`outliers` is 'iqr' and `statistics` is {'mean': 1}; expected what",
    ),
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
    "nothing can be missing": (
        filtered(begin(np.arange(3)), missing="drop"),
        "`missing` is 'drop', and columns {'x': 'int64'} cannot hold NaN",
    ),
    "other names": (
        filtered(begin({"v": VALUES}), outliers="iqr", statistics=STATISTICS),
        "`statistics` has column 'x', and elements have ('v',)",
    ),
}
test_errors_say_what_to_do = refusals(ERRORS, kind=(ValueError, TypeError))
