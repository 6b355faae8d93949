"""Filters: what is filled, clipped, reshaped and dropped, and counted."""

import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.impute import KNNImputer, SimpleImputer

import tfamp.data
from tests.refusals import refusals
from tests.replicas import two_replicas
from tfamp.data.fingerprints import fingerprint
from tfamp.data.stages import Settings
from tfamp.data.stages.dropped import DropLog
from tfamp.data.stages.filter import Filter
from tfamp.data.statistics import fit_statistics

SETTINGS = Settings(num_threads=2, autotune=False)
NAN = float("nan")


def table(rows=300):
    """Three float32 features with holes, and a target."""
    random = np.random.default_rng(0)
    values = random.normal([1.0, 5.0, -2.0], [1.0, 3.0, 0.1], (rows, 3))
    values[::7, 1] = NAN
    values[3::11, 2] = NAN
    return values.astype(np.float32), np.arange(rows)


def slices(*parts):
    return tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0])


def applied(stage, dataset):
    stage.check(dataset)
    return stage.apply(dataset, SETTINGS)


def targets(dataset):
    return [int(y) for _, y in dataset]


def inputs(dataset):
    return np.stack([x.numpy() for x, *_ in dataset])


# Predicates


def test_predicate_keeps_what_it_is_true_of():
    values, labels = table(20)
    stage = Filter(lambda x, y: y % 3 == 0)
    assert targets(applied(stage, slices(values, labels))) == list(range(0, 20, 3))
    log, kinds = stage.log, ("missing value", "outlier")
    assert (log.seen, log.passes) == (20, 1)
    assert log.dropped == {**dict.fromkeys(kinds, 0), "predicate": 13}


def test_predicate_takes_every_form_of_an_element():
    values, labels = table(6)
    flags = np.arange(6) < 2
    assert len(list(applied(Filter(lambda x: x[0] < 99), slices(values)))) == 6
    weighted = slices(values, labels, flags)
    kept = applied(Filter(lambda x, y, w: w), weighted)
    assert [int(y) for _, y, _ in kept] == [0, 1]
    assert kept.element_spec == weighted.element_spec
    columns = slices({"v": values, "n": labels}, labels)
    kept = applied(Filter(lambda x, y: x["n"] > 3), columns)
    assert targets(kept) == [4, 5]
    assert kept.element_spec == columns.element_spec


def test_predicate_may_branch_in_python():
    def is_large(x, y):
        if y > 2:
            return True
        return False

    kept = applied(Filter(is_large), slices(np.zeros(5), np.arange(5)))
    assert targets(kept) == [3, 4]


@pytest.mark.slow
def test_predicate_sees_what_is_filled_and_not_what_is_dropped_already():
    values = np.array([[1.0], [NAN], [5.0]], np.float32)
    stage = Filter(lambda x, y: x[0] == 9.0, missing=9.0)
    assert targets(applied(stage, slices(values, np.arange(3)))) == [1]

    def fails_on_nan(x, y):
        with tf.control_dependencies([tf.debugging.assert_equal(x, x)]):
            return y < 2

    stage = Filter(fails_on_nan, missing="drop")
    assert targets(applied(stage, slices(values, np.arange(3)))) == [0]
    assert stage.log.dropped["missing value"] == 1
    assert stage.log.dropped["predicate"] == 1


# Missing values


def test_elements_with_nan_are_dropped():
    values, labels = table()
    stage = Filter(missing="drop")
    kept = applied(stage, slices(values, labels))
    assert targets(kept) == list(np.flatnonzero(~np.isnan(values).any(axis=1)))
    assert kept.element_spec == slices(values, labels).element_spec
    assert stage.log.dropped["missing value"] == np.isnan(values).any(axis=1).sum()


def test_declared_values_are_dropped_in_numbers_and_text():
    columns = {
        "age": np.array([1, -9, 3, 4]),
        "city": np.array(["a", "b", "?", "d"]),
        "pay": np.array([1.0, 2.0, 3.0, NAN], np.float32),
    }
    statistics = fit_statistics(columns, missing_value=(-9, "?"))
    stage = Filter(missing="drop", statistics=statistics)
    assert targets(applied(stage, slices(columns, np.arange(4)))) == [0]
    some = fit_statistics(columns, columns=("age",), missing_value=-9)
    stage = Filter(missing="drop", statistics=some)
    assert targets(applied(stage, slices(columns, np.arange(4)))) == [0, 2, 3]


@pytest.mark.parametrize("how", ["mean", "median", "mode"])
def test_missing_values_are_filled_from_statistics(how):
    values, labels = table()
    values = np.round(values * 4) / 4  # so that there is a mode
    statistics = fit_statistics(values)
    stage = Filter(missing=how, statistics=statistics)
    filled = applied(stage, slices(values, labels))
    present = [column[~np.isnan(column)].astype(np.float64) for column in values.T]
    fill = {
        "mean": [column.mean() for column in present],
        "median": [
            np.quantile(column, 0.5, method="inverted_cdf") for column in present
        ],
        "mode": [
            max(sorted(set(column)), key=list(column).count) for column in present
        ],
    }[how]
    expected = np.where(np.isnan(values), fill, values).astype(np.float32)
    np.testing.assert_array_equal(inputs(filled), expected)
    assert int(filled.cardinality()) == len(values)
    assert filled.element_spec == slices(values, labels).element_spec


def test_a_number_fills_nan_in_every_column_of_floats():
    columns = {"a": np.array([NAN, 2.0]), "n": np.array([3, 4]), "v": np.eye(2)}
    columns["v"][0, 1] = NAN
    filled = list(applied(Filter(missing=-1), slices(columns, np.arange(2))))
    assert [float(x["a"]) for x, _ in filled] == [-1, 2]
    np.testing.assert_array_equal(filled[0][0]["v"], [1, -1])
    assert [int(x["n"]) for x, _ in filled] == [3, 4]


def test_declared_values_are_filled_in_integers_and_text():
    columns = {"n": np.array([2, -9, 4, 4]), "city": np.array(["a", "?", "b", "b"])}
    statistics = fit_statistics(columns, missing_value=(-9, "?"))
    stage = Filter(missing="median", statistics=statistics)
    filled = list(applied(stage, slices(columns)))
    assert [int(x["n"]) for x in filled] == [2, 4, 4, 4]
    assert [x["city"].numpy() for x in filled] == [b"a", b"b", b"b", b"b"]


# Outliers

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


def tukey(values, width):
    low, high = np.quantile(values, [0.25, 0.75], method="inverted_cdf")
    return low - width * (high - low), high + width * (high - low)


@pytest.mark.parametrize("rule, limits", RULES.values(), ids=RULES)
def test_outliers_are_dropped_or_clipped_at_limits_of_the_statistics(rule, limits):
    values, labels = table()
    pairs = [limits(v[~np.isnan(v)].astype(np.float64)) for v in values.T]
    low, high = np.array(pairs).T
    options = {"outliers": rule, "statistics": fit_statistics(values)}
    drop = Filter(**options, outlier_action="drop")
    # NaN is no outlier.
    is_out = ((values < low) | (values > high)).any(axis=1)
    assert 20 < is_out.sum() < 280
    assert targets(applied(drop, slices(values, labels))) == list(
        np.flatnonzero(~is_out)
    )
    assert drop.log.dropped["outlier"] == is_out.sum()
    clip = Filter(**options, outlier_action="clip")
    clipped = applied(clip, slices(values, labels))
    # Limits in float64 are rounded once, to float32.
    np.testing.assert_allclose(inputs(clipped), np.clip(values, low, high), rtol=1e-7)
    assert int(clipped.cardinality()) == len(values)


def test_infinities_are_outliers_and_clip_to_the_limit():
    values = np.array([[1.0], [2.0], [3.0], [np.inf], [-np.inf]])
    options = {"outliers": "iqr", "statistics": fit_statistics(values)}
    kept = applied(Filter(**options, outlier_action="drop"), slices(values))
    assert [float(x[0]) for x in kept] == [1, 2, 3]
    clipped = applied(Filter(**options, outlier_action="clip"), slices(values))
    # Quartiles 1 and 3: fences at -2 and 6.
    assert [float(x[0]) for x in clipped] == [1, 2, 3, 6, -2]


def test_integers_are_clipped_inwards_and_declared_values_left_alone():
    values = np.array([0, 1, 2, 3, 4, 100, -999])
    statistics = fit_statistics({"n": values}, missing_value=-999)
    options = {"outliers": ("iqr", 0.25), "statistics": statistics}
    # Quartiles 1 and 4: fences at 0.25 and 4.75.
    clipped = applied(Filter(**options, outlier_action="clip"), slices({"n": values}))
    assert [int(x["n"]) for x in clipped] == [1, 1, 2, 3, 4, 4, -999]
    kept = applied(Filter(**options, outlier_action="drop"), slices({"n": values}))
    assert [int(x["n"]) for x in kept] == [1, 2, 3, 4, -999]


def test_each_element_is_counted_for_its_first_reason():
    # The first is an outlier too.
    rows = [[NAN, 50.0], [1.0, 50.0], [1.0, 1.0], [2.0, 1.0], [NAN, 1.0]]
    values = np.array(rows, np.float32)
    statistics = fit_statistics(np.repeat(np.arange(10.0)[:, None], 2, axis=1))
    stage = Filter(
        lambda x: x[0] < 2,
        missing="drop",
        outliers=("zscore", 3),
        outlier_action="drop",
        statistics=statistics,
    )
    assert [float(x[0]) for x in applied(stage, slices(values))] == [1.0]
    assert stage.log.dropped == {
        "missing value": 2,
        "outlier": 1,
        "predicate": 1,
    }


# Imputers


def filling(imputer):
    def fill(x, y):
        row = tf.numpy_function(lambda x: imputer.transform(x[None])[0], [x], x.dtype)
        return tf.ensure_shape(row, x.shape), y

    return fill


def test_a_fitted_imputer_fills_in_a_map():
    values, labels = table()
    imputer = KNNImputer(n_neighbors=3).fit(values)
    pipeline = tfamp.data.Pipeline.from_arrays(values, labels).map(filling(imputer))
    filled = pipeline.build()
    np.testing.assert_array_equal(inputs(filled), imputer.transform(values))
    assert targets(filled) == list(labels)


def test_a_fingerprint_tells_imputers_that_were_fitted_to_other_data():
    fitted = [SimpleImputer().fit([[mean], [NAN]]) for mean in (1, 1, 2)]
    first, same, other = (fingerprint(filling(imputer)).digest for imputer in fitted)
    assert first == same != other


# Counting


def run_at_once(work, number):
    threads = [threading.Thread(target=work) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_counts_add_up_over_passes_and_threads():
    stage = Filter(lambda x, y: y < 4)
    dataset = applied(stage, slices(np.zeros(10), np.arange(10)))
    run_at_once(lambda: list(dataset), 3)
    log = stage.log
    assert (log.seen, log.dropped["predicate"], log.passes) == (30, 18, 3)
    assert str(log) == ("Dropped 18 of 30 elements (60.0 %) in 3 passes: 18 predicate.")


def test_what_one_build_drops_is_no_other_builds():
    base = tfamp.data.Pipeline.from_arrays(np.arange(10)).filter(lambda x: x < 4)
    some, other = base.batch(2), base.batch(3)
    list(some.build())
    list(some.build())
    assert "Dropped 12 of 20" in " ".join(some.describe().split())
    assert "Dropped" not in other.describe() + base.describe()


def test_log_loses_no_count_between_threads():
    log = DropLog(("a",))

    def work():
        for _ in range(2_000):
            log.add([2, 1], passes=0)

    run_at_once(work, 4)
    assert (log.seen, log.dropped, log.passes) == (16_000, {"a": 8_000}, 0)


def test_a_long_pass_is_counted_before_its_end():
    stage = Filter(missing="drop")
    values = np.zeros((9_000, 1), np.float32)
    values[:1_000] = NAN
    iterator = iter(applied(stage, slices(values)))
    for _ in range(7_500):
        next(iterator)
    log = stage.log
    # Reported every 4,096 elements.
    assert log.seen == 8_192 and log.dropped["missing value"] == 1_000
    assert log.passes == 0


def test_a_pass_that_drops_nothing_is_told():
    stage = Filter(missing="drop")
    kept = applied(stage, slices(np.ones((3, 1), np.float32)))
    list(kept)
    assert str(stage.log) == "Dropped 0 of 3 elements (0.0 %) in 1 pass."


def test_a_pass_that_keeps_nothing_ends_in_an_error_in_fit_too():
    values = np.full((10, 2), NAN, np.float32)
    stage = Filter(missing="drop")
    dataset = applied(stage, slices(values, np.zeros(10)))
    message = re.escape(
        "`filter` dropped all 10 elements (10 missing value, 0 outlier, 0 predicate); "
        "expected one or more to be left."
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(dataset)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        model.fit(dataset.batch(2), verbose=0)
    # A plain filter lets `fit` train on nothing.
    assert stage.log.passes == 0


def test_an_empty_dataset_and_two_interleaved_passes_raise_no_error():
    stage = Filter(lambda x, y: y == 9)
    assert list(applied(stage, slices(np.zeros(3), np.arange(3)).take(0))) == []
    dataset = applied(stage, slices(np.zeros(10), np.arange(10)))
    first, second = iter(dataset), iter(dataset)
    assert int(next(first)[1]) == int(next(second)[1]) == 9
    assert list(first) == list(second) == []


def test_it_feeds_replicas_of_a_strategy():
    strategy = two_replicas()
    with strategy.scope():
        stage = Filter(lambda x, y: y % 2 == 0)
        dataset = applied(stage, slices(np.zeros(16), np.arange(16))).batch(4)
    found = []
    for _, labels in strategy.experimental_distribute_dataset(dataset):
        for part in strategy.experimental_local_results(labels):
            found += part.numpy().tolist()
    assert sorted(found) == list(range(0, 16, 2))
    assert stage.log.dropped["predicate"] == 8


def test_order_and_length_are_kept_where_nothing_goes():
    values, labels = table(1_000)
    dataset = applied(Filter(missing=0.0), slices(values, labels))
    assert targets(dataset) == list(labels)
    unknown = slices(values, labels).filter(lambda x, y: True)
    dataset = applied(Filter(missing=0.0), unknown)
    assert int(dataset.cardinality()) == tf.data.UNKNOWN_CARDINALITY
    dropping = applied(Filter(missing="drop"), slices(values, labels))
    assert int(dropping.cardinality()) == tf.data.UNKNOWN_CARDINALITY


def test_explain_says_what_is_done():
    values, labels = table()
    stage = Filter(
        missing="median",
        outliers=("iqr", 1.5),
        outlier_action="drop",
        statistics=fit_statistics(values),
    )
    setting, reason = stage.explain(slices(values, labels), SETTINGS)
    assert setting == "fill missing values with median and drop outliers"
    assert "drops are counted" in reason
    list(applied(stage, slices(values, labels)))
    assert "Dropped" in stage.explain(slices(values, labels), SETTINGS)[1]


def test_stages_that_do_the_same_are_equal():
    statistics = fit_statistics(table()[0])
    options = {"missing": "mean", "statistics": statistics}
    assert Filter(**options) == Filter(**options)
    options["missing"] = "median"
    assert Filter(missing="mean", statistics=statistics) != Filter(**options)


# Errors

VALUES, LABELS = table(8)
STATISTICS = fit_statistics(VALUES)
RULE = ("quantile", 0.01, 0.99)
FLAGS = fit_statistics(np.repeat([0.0, 1.0], [999, 1]))


def checked(dataset, **options):
    return lambda: Filter(**options).check(dataset)


UNUSED = "`statistics` came without `outliers` or a `missing` that reads them"
OPTIONS = {
    "nothing": ({}, "`.filter` came without anything to do"),
    "function": ({"predicate": 3}, "`predicate` is 3; expected something"),
    "action alone": (
        {"missing": "drop", "outlier_action": "drop"},
        "`outlier_action` is 'drop' and `outliers` is None; expected both",
    ),
    "action": (
        {"outliers": "iqr", "outlier_action": "cut", "statistics": STATISTICS},
        "Unknown `outlier_action` 'cut'; expected 'drop' or 'clip'",
    ),
    "missing": (
        {"missing": "delete", "statistics": STATISTICS},
        "Unknown `missing` 'delete'; expected 'drop', 'mean', 'median' or 'mode'",
    ),
    "missing type": ({"missing": [0]}, "`missing` is [0], of type"),
    "no statistics": (
        {"missing": "mean"},
        "`missing` is 'mean' and `statistics` is None; expected what",
    ),
    "statistics of another kind": (
        {"outliers": "iqr", "outlier_action": "drop", "statistics": {"mean": 1}},
        "`outliers` is 'iqr' and `statistics` is {'mean': 1}; expected what",
    ),
    "statistics unused": ({"missing": 0.0, "statistics": STATISTICS}, UNUSED),
    "collapse": (
        {"outliers": RULE, "outlier_action": "drop", "statistics": FLAGS},
        "leaves feature 'x' one value, since nearly all are equal",
    ),
    "imputer": (
        {"missing": SimpleImputer()},
        "`missing` is SimpleImputer(); expected 'drop', one of ('mean', 'median', "
        "'mode') or a number. Fit an imputer to the training rows",
    ),
}
test_wrong_options_are_refused = refusals(
    OPTIONS, lambda given: Filter(**given), kind=(ValueError, TypeError)
)
ERRORS = {
    "batches": (
        checked(slices(VALUES, LABELS).batch(2), missing="drop"),
        "look like batches; expected single examples",
    ),
    "no boolean": (
        checked(slices(VALUES, LABELS), predicate=lambda x, y: x > 0),
        "`predicate` returns TensorSpec(shape=(3,), dtype=tf.bool, name=None)",
    ),
    "nothing can be missing": (
        checked(slices(np.arange(3)), missing="drop"),
        "`missing` is 'drop', and columns {'x': 'int64'} cannot hold NaN",
    ),
    "mean of integers": (
        checked(
            slices({"n": np.array([1, 2, -1])}),
            missing="mean",
            statistics=fit_statistics({"n": np.array([1, 2, -1])}, missing_value=-1),
        ),
        "column 'n' of dtype int64 cannot hold (1.5,); expected whole numbers",
    ),
    "other features": (
        checked(slices(np.ones((2, 5))), missing="mean", statistics=STATISTICS),
        "Column 'x' has shape (5,); expected a last axis of 3 features",
    ),
    "other names": (
        checked(slices({"v": VALUES}), missing="mean", statistics=STATISTICS),
        "`statistics` has column 'x', and elements have ('v',)",
    ),
    "vectors for scalars": (
        checked(
            slices(VALUES), missing="drop", statistics=fit_statistics(np.arange(3.0))
        ),
        "`statistics` were taken of scalars; expected shape ()",
    ),
    "ragged elements": (
        lambda: Filter(lambda x: True).apply(
            slices(tf.ragged.constant([[[1]], [[1, 2], []]])), SETTINGS
        ),
        "expected dense tensors of known rank where `.filter` drops some",
    ),
}


test_error_says_what_to_do = refusals(ERRORS, kind=(ValueError, TypeError))


def test_a_pipeline_filters_before_its_cache_and_describes_what_went(capsys):
    values, labels = table(70)
    pipeline = tfamp.data.Pipeline.from_arrays(values, labels)
    pipeline = pipeline.filter(missing="drop").cache("memory").batch(8)
    dataset = pipeline.build()
    kept = int((~np.isnan(values).any(axis=1)).sum())
    # The second epoch comes from the cache: nothing is filtered or counted again.
    for _ in range(2):
        assert sum(len(y) for _, y in dataset) == kept
    assert f"Dropped {70 - kept} of 70" in " ".join(pipeline.describe().split())
    capsys.readouterr()
    statistics = tfamp.data.fit_statistics(pipeline)
    assert statistics.num_examples == kept
