"""Examples of an epoch: balance, weights, subsets, by position and on streams."""

import collections
import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals
from tfamp.data.sources.datasets import array_source
from tfamp.data.stages import Settings
from tfamp.data.stages import draw_plans as plans
from tfamp.data.stages.sampling import Balance, Subset, Weights

SETTINGS = Settings(num_threads=2, autotune=False)
# Of 1,000 examples, as skewed as class labels are.
SIZES = (1, 9, 90, 200, 700)


def chi_square_limit(degrees_of_freedom):
    """Returns what chi-square exceeds with probability 1e-4 (Wilson-Hilferty)."""
    part = 2 / (9 * degrees_of_freedom)
    return degrees_of_freedom * (1 - part + 3.719 * math.sqrt(part)) ** 3


def chi_square(observed, probabilities):
    expected = np.sum(observed) * np.asarray(probabilities, np.float64)
    return np.sum((np.asarray(observed) - expected) ** 2 / expected)


def assert_drawn_from(observed, probabilities):
    statistic = chi_square(observed, probabilities)
    assert statistic < chi_square_limit(len(probabilities) - 1)


def skewed_labels():
    labels = np.repeat(np.arange(len(SIZES)), SIZES)
    return np.random.default_rng(0).permutation(labels)


def numbered(labels):
    """Returns pairs (position, label) as a dataset."""
    return tf.data.Dataset.from_tensor_slices(
        (np.arange(len(labels)), np.asarray(labels))
    )


def generated(pairs):
    """Returns a dataset of unknown length, of the pairs of a generator."""
    scalar = tf.TensorSpec((), tf.int64)
    return tf.data.Dataset.from_generator(pairs, output_signature=(scalar, scalar))


def listed(dataset):
    """Returns the scalars of a dataset, read many at a time."""
    return [int(i) for batch in dataset.batch(1024) for i in batch.numpy()]


def positions_of(dataset):
    return listed(dataset.map(lambda x, y: x))


def by_position(stage, labels, x=None):
    x = np.arange(len(labels)) if x is None else x
    source = array_source(x, np.asarray(labels))
    stage = dataclasses.replace(stage, source=source)
    return stage.apply(source.positions(), SETTINGS)


def epoch_of(stage, labels, way):
    """Returns the positions of two epochs, drawn in one of the two ways.

    The dataset has to know how many they are.
    """
    if way == "position":
        dataset = by_position(stage, labels)
    else:
        dataset = stage.apply(numbered(labels), SETTINGS).map(lambda x, y: x)
    epochs = [listed(dataset) for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [int(dataset.cardinality())] * 2
    return epochs


def for_seeds(draw, num):
    """Returns what `draw` gives for so many seeds, one row for each."""
    seeds = tf.data.Dataset.range(num).map(lambda n: tf.stack([n, 3]))
    return next(iter(seeds.map(draw).batch(num))).numpy()


ways = pytest.mark.parametrize("way", ["position", "stream"])


# Plans.


@pytest.mark.parametrize("num_outputs", [1000, 1003, 37, 3500], ids=str)
def test_a_balanced_plan_is_exact_by_class_and_by_member(num_outputs):
    labels = skewed_labels()
    for seed in range(3):
        plan = plans.balanced_plan(tf.constant(labels), 5, num_outputs, [seed, 7])
        times = np.bincount(plan.numpy(), minlength=1000)
        assert len(plan) == num_outputs
        for label in range(5):
            of_class = times[labels == label]
            assert abs(of_class.sum() - num_outputs / 5) < 1
            assert of_class.max() - of_class.min() <= 1


def test_places_left_over_go_to_other_classes_and_members_each_time():
    labels = tf.constant([0, 0, 0, 1, 1, 1, 2, 2, 2])
    copies = for_seeds(
        lambda s: plans.copies_of(plans.balanced_plan(labels, 3, 7, s), 9),
        1500,
    )
    totals = copies.sum(axis=0)
    # 7 places: each class gets 2, and one of the three gets the seventh.
    assert totals.sum() == 7 * 1500
    by_class = totals.reshape(3, 3).sum(axis=1) - 2 * 1500
    assert_drawn_from(by_class, [1 / 3] * 3)
    # Copies of members vary less than independent draws, so this bound holds too.
    assert_drawn_from(totals, [1 / 9] * 9)


def test_a_balanced_plan_comes_in_random_order():
    labels = tf.constant([0, 0, 0, 1, 2, 2])
    firsts = for_seeds(lambda s: plans.balanced_plan(labels, 3, 6, s)[0], 2000)
    share = np.array([1 / 3 / 3] * 3 + [1 / 3] + [1 / 6] * 2)
    assert_drawn_from(np.bincount(firsts, minlength=6), share)


def test_a_rare_class_takes_no_memory_for_all_others():
    # With `tf.repeat` these copies need 200,000 x 100,000 places.
    labels = np.zeros(200_000, np.int32)
    labels[5] = 1
    plan = plans.balanced_plan(tf.constant(labels), 2, 200_000, [0, 1])
    assert np.sum(plan.numpy() == 5) == 100_000


WEIGHTS = {
    "linear": np.arange(1, 21, dtype=float),
    "geometric": np.geomspace(1e-3, 1.0, 12),
    "with zeros": np.array([0.0, 3.0, 0.0, 1.0, 1.0, 0.0]),
    "huge": np.array([0.5, 1.0, 1.5]) * 1e308,
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_draws_with_replacement_pass_chi_square(weights):
    plan = plans.weighted_plan(
        tf.constant(weights), 100_000, [5, 6], replacement=True
    ).numpy()
    times = np.bincount(plan, minlength=len(weights))
    share = weights / weights.max()
    share /= share.sum()
    assert times[share == 0].sum() == 0
    assert_drawn_from(times[share > 0], share[share > 0])
    # Independent draws: pairs that follow each other have the products as shares.
    if len(weights) <= 6:
        kept = np.flatnonzero(share)
        pairs = collections.Counter(zip(plan[::2], plan[1::2], strict=True))
        observed = [pairs[pair] for pair in itertools.product(kept, kept)]
        assert_drawn_from(observed, np.outer(share[kept], share[kept]).ravel())


def test_draws_without_replacement_are_successive_draws():
    weights = np.array([1.0, 2.0, 0.0, 3.0, 4.0])
    drawn = for_seeds(
        lambda s: plans.weighted_plan(tf.constant(weights), 2, s, replacement=False),
        4000,
    )
    sets = collections.Counter(frozenset(pair.tolist()) for pair in drawn)
    probabilities = {}
    for i, j in itertools.permutations([0, 1, 3, 4], 2):
        both = frozenset([i, j])
        chance = weights[i] / 10 * weights[j] / (10 - weights[i])
        probabilities[both] = probabilities.get(both, 0) + chance
    assert set(sets) == set(probabilities)
    assert_drawn_from([sets[key] for key in probabilities], [*probabilities.values()])
    # The heavy one comes no more often first than second.
    order = [pair.tolist().index(4) for pair in drawn if 4 in pair]
    assert_drawn_from(np.bincount(order), [0.5, 0.5])


def test_weights_that_underflow_are_still_drawn_in_proportion():
    weights = tf.constant([1e-310, 3e-310, 0.0], tf.float64)
    plan = plans.weighted_plan(weights, 2, [1, 2], replacement=False).numpy()
    assert sorted(plan) == [0, 1]


def largest_remainders(counts, size):
    """Returns the seats of each class, by fractions of Python's integers."""
    total = sum(counts)
    seats = [count * size // total for count in counts]
    order = sorted(range(len(counts)), key=lambda k: -(counts[k] * size % total))
    for k in order[: size - sum(seats)]:
        seats[k] += 1
    return seats


@pytest.mark.parametrize("size", [1, 10, 333, 999, 1000], ids=str)
def test_a_stratified_subset_has_the_seats_of_largest_remainders(size):
    labels = skewed_labels()
    chosen = plans.stratified_subset(tf.constant(labels), 5, size, [0, 0]).numpy()
    seats = np.bincount(labels[chosen], minlength=5)
    assert seats.tolist() == largest_remainders(SIZES, size)
    assert (np.diff(chosen) > 0).all()


def test_members_of_a_subset_are_drawn_uniformly():
    labels = tf.constant([0] * 6 + [1] * 3)
    chosen = for_seeds(lambda s: plans.stratified_subset(labels, 2, 3, s), 2000)
    assert_drawn_from(np.bincount(chosen.ravel(), minlength=9), [1 / 9] * 9)


# Balance.


@pytest.mark.quick("oversample-700-position")
@ways
@pytest.mark.parametrize(
    "method, of_each", [("resample", 200), ("oversample", 700), ("undersample", 1)]
)
def test_balancing_gives_every_class_its_number(way, method, of_each):
    labels = skewed_labels()
    stage = Balance(method=method, seed=1)
    for epoch in epoch_of(stage, labels, way):
        assert np.bincount(labels[epoch]).tolist() == [of_each] * 5


def test_stock_rejection_resampling_loses_the_cardinality():
    stock = numbered([0, 0, 0, 1]).rejection_resample(
        lambda x, y: y, [0.5, 0.5], [0.75, 0.25], seed=1
    )
    assert int(stock.cardinality()) == int(tf.data.UNKNOWN_CARDINALITY)


@pytest.mark.quick("position")
@ways
def test_each_epoch_is_another_draw_and_a_seed_repeats_all_of_them(way):
    labels = skewed_labels()
    stage = Balance(method="undersample", seed=1)
    labels[:10] = np.repeat(np.arange(5), 2)
    first, second = epoch_of(stage, labels, way)
    assert sorted(first) != sorted(second)
    again = epoch_of(Balance(method="undersample", seed=1), labels, way)
    assert again == [first, second]
    other = epoch_of(Balance(method="undersample", seed=2), labels, way)
    assert other[0] != first
    free = [epoch_of(Balance(method="undersample"), labels, way) for _ in "ab"]
    assert free[0] != free[1]


def test_repeat_gives_another_draw_each_time_too():
    dataset = by_position(Balance(seed=1), skewed_labels()).repeat(2)
    drawn = listed(dataset)
    assert sorted(drawn[:1000]) != sorted(drawn[1000:])


def test_a_draw_by_position_is_shuffled_and_a_stream_keeps_its_order():
    labels = skewed_labels()
    stage = Balance(seed=1)
    drawn = epoch_of(stage, labels, "position")[0]
    streamed = epoch_of(stage, labels, "stream")[0]
    assert drawn != sorted(drawn)
    assert streamed == sorted(streamed)
    # The same plan, in two orders.
    assert sorted(drawn) == streamed


CLASSES = {
    "strings": np.array(["cat", "dog", "dog", "dog"]),
    "booleans": np.array([True, False, False, False]),
    "whole floats": np.array([1.0, 0.0, 0.0, 0.0], np.float32),
    "columns": np.array([[7], [9], [9], [9]]),
    "one-hot rows": np.eye(3, dtype=np.float32)[[2, 0, 0, 0]],
    "probabilities": np.array([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]),
    "far apart": np.array([10**12, -5, -5, -5]),
}


@pytest.mark.quick("whole floats-position", "one-hot rows-position")
@ways
@pytest.mark.parametrize("labels", CLASSES.values(), ids=CLASSES)
def test_classes_may_be(labels, way):
    for epoch in epoch_of(Balance(seed=1), labels, way):
        assert epoch.count(0) == 2
        assert len(epoch) == 4


@pytest.mark.quick("key-position")
@ways
@pytest.mark.parametrize(
    "by",
    ["group", lambda x, y: x["group"] == 8, lambda x, y: y[1]],
    ids=["key", "of the input", "of the target"],
)
def test_classes_may_come_from_a_function_or_a_key(way, by):
    x = {"id": np.arange(6), "group": np.array([5, 5, 5, 5, 5, 8])}
    stage = Balance(by, seed=1)
    targets = np.stack([np.arange(6), x["group"]], axis=1)
    if way == "position":
        found = listed(by_position(stage, targets, x))
    else:
        dataset = tf.data.Dataset.from_tensor_slices((x, targets))
        found = listed(stage.apply(dataset, SETTINGS).map(lambda x, y: x["id"]))
    assert found.count(5) == 3


def test_elements_that_are_dicts_have_keys():
    dataset = tf.data.Dataset.from_tensor_slices({"a": [0, 1, 2], "b": [0, 0, 1]})
    balanced = Balance("b", method="oversample", seed=1).apply(dataset, SETTINGS)
    assert [int(e["a"]) for e in balanced] == [0, 1, 2, 2]


@ways
def test_a_single_class_is_warned_of(way):
    stage = Balance(seed=1)
    message = "All 4 examples are of class 3; expected two classes or more."
    with pytest.warns(UserWarning, match=re.escape(message)):
        epochs = epoch_of(stage, [3, 3, 3, 3], way)
    assert [sorted(epoch) for epoch in epochs] == [[0, 1, 2, 3]] * 2


# Streams.


def elements_of_many_kinds():
    ragged = tf.ragged.constant([[[1]], [[2, 3], [5]], [], [[4]]])
    count = tf.data.Dataset.range(4)
    return {
        "small and static": count.map(lambda i: (tf.fill([3], i), i % 3)),
        "strings": count.map(lambda i: (tf.strings.as_string(i), i % 3)),
        "unknown length": count.map(
            lambda i: (tf.ensure_shape(tf.range(i), [None]), i % 3)
        ),
        "too large to copy": count.map(lambda i: (tf.fill([2**19], i), i % 3)),
        "ragged": tf.data.Dataset.zip(
            (tf.data.Dataset.from_tensor_slices(ragged), count.map(lambda i: i % 3))
        ),
        "sparse": count.map(lambda i: (tf.sparse.eye(2), i % 3)),
    }


@pytest.mark.quick("sparse")
@pytest.mark.parametrize("kind", elements_of_many_kinds())
def test_elements_of_every_kind_are_copied_whole(kind):
    dataset = elements_of_many_kinds()[kind]
    stage = Balance(method="oversample", seed=1)
    stream = stage.apply(dataset, SETTINGS)
    assert stream.element_spec == dataset.element_spec
    assert int(stream.cardinality()) == 6
    # Classes are 0, 1, 2, 0: examples 1 and 2 come twice.
    given = [tf.nest.flatten(e, expand_composites=True) for e in dataset]
    came = [tf.nest.flatten(e, expand_composites=True) for e in stream]
    for index, element in zip([0, 1, 1, 2, 2, 3], came, strict=True):
        for a, b in zip(element, given[index], strict=True):
            np.testing.assert_array_equal(a, b)


def test_labels_are_read_once_for_one_dataset():
    reads = []

    def generate():
        reads.append(1)
        yield from ((i, i % 2) for i in range(6))

    dataset = generated(generate)
    stage = Balance(seed=1)
    first, second = stage.apply(dataset, SETTINGS), stage.apply(dataset, SETTINGS)
    assert len(reads) == 1
    assert positions_of(first) == positions_of(second)
    assert len(reads) == 3
    stage.apply(dataset.take(4), SETTINGS)
    assert len(reads) == 4


def test_the_pass_over_labels_fills_a_cache_before_it():
    calls = []

    def note(x):
        calls.append(int(x))
        return x

    dataset = numbered([0, 0, 0, 1]).map(
        lambda x, y: (tf.ensure_shape(tf.numpy_function(note, [x], x.dtype), []), y)
    )
    stream = Balance(seed=1).apply(dataset.cache(), SETTINGS)
    assert sorted(calls) == [0, 1, 2, 3]
    assert len(list(stream)) == len(list(stream)) == 4
    assert len(calls) == 4


@pytest.mark.quick("target")
@pytest.mark.parametrize("by", [None, lambda x, y: y], ids=["target", "function"])
def test_a_dataset_that_shuffles_itself_is_an_error(by):
    shuffled = numbered(skewed_labels()).shuffle(1000, seed=1)
    stream = Balance(by, seed=1).apply(shuffled, SETTINGS)
    message = "Labels or weights were read once, in `build`, and elements have changed"
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        list(stream)


@pytest.mark.parametrize("by", [None, lambda x, y: y], ids=["chunks", "one by one"])
@pytest.mark.parametrize(
    "later, told",
    [(4, "contain 6 elements"), (7, "or are more, since"), (200, "or are more, since")],
    ids=["fewer", "one more", "more"],
)
def test_a_dataset_that_changes_its_length_is_an_error(later, told, by):
    lengths = iter([6, later])
    dataset = generated(lambda: ((i, i % 2) for i in range(next(lengths))))
    stream = Balance(by, seed=1).apply(dataset, SETTINGS)
    with pytest.raises(tf.errors.OpError, match=told):
        list(stream)


def test_explaining_reads_nothing():
    def generate():
        raise AssertionError("read")
        yield 0, 0

    dataset = generated(generate)
    stages = [
        Balance(),
        Balance(method="oversample"),
        Weights(lambda x, y: y),
        Weights([1.0, 2.0], num_examples=5),
        Subset(0.5, stratify=True),
        Subset(3),
    ]
    for stage in stages:
        stage.check(dataset)
        setting, reason = stage.explain(dataset, SETTINGS)
        assert setting and reason
        preview = stage.preview(dataset, SETTINGS)
        assert preview.element_spec == dataset.element_spec
    balanced = Balance("group", method="undersample", seed=3)
    assert balanced.explain(dataset, SETTINGS) == (
        "undersample by 'group', seed 3",
        "classes equally often, each as often as the smallest; anew each epoch; "
        "labels are read once, at build",
    )


STAGES = {
    "balance": Balance(seed=1),
    "weights": Weights([1.0, 1.0, 1.0, 1.0], num_examples=9),
    "subset": Subset(3),
    "share": Subset(0.5),
}


@pytest.mark.quick("share")
@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_preview_has_the_length_that_comes_out(stage):
    dataset = numbered([0, 1, 1, 1])
    preview = stage.preview(dataset, SETTINGS)
    built = stage.apply(dataset, SETTINGS)
    assert int(preview.cardinality()) == int(built.cardinality()) > 0


# Weights.


@pytest.mark.quick("position")
@ways
def test_weights_are_drawn_in_proportion_over_epochs(way):
    weights = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    labels = np.arange(5)
    epochs = epoch_of(Weights(weights, num_examples=20_000, seed=2), labels, way)
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        times = np.bincount(epoch, minlength=5)
        assert times[0] == 0
        assert_drawn_from(times[1:], weights[1:] / 10)


@ways
def test_weights_may_come_from_a_function(way):
    stage = Weights(lambda x, y: tf.cast(y, tf.float32), num_examples=100, seed=1)
    labels = [0, 1, 0, 2]
    for epoch in epoch_of(stage, labels, way):
        assert set(epoch) == {1, 3}
        assert len(epoch) == 100


@ways
def test_without_replacement_nothing_comes_twice(way):
    weights = np.arange(20.0)
    stage = Weights(weights, replacement=False, num_examples=12, seed=1)
    first, second = epoch_of(stage, np.zeros(20), way)
    assert len(set(first)) == len(set(second)) == 12
    assert 0 not in first + second
    assert set(first) != set(second)


@ways
def test_weights_keep_the_cardinality(way):
    for num_examples, expected in ((None, 4), (11, 11)):
        stage = Weights([1, 2, 3, 4], num_examples=num_examples, seed=1)
        epochs = epoch_of(stage, [0] * 4, way)
        assert [len(epoch) for epoch in epochs] == [expected] * 2


def test_weights_of_a_dataset_of_unknown_length_are_counted():
    dataset = numbered([0] * 4).filter(lambda x, y: x < 3)
    stage = Weights([1.0, 1.0, 1.0, 1.0], seed=1)
    stage.check(dataset)
    message = "`weights` has 4 values for 3 examples; expected one"
    with pytest.raises(ValueError, match=re.escape(message)):
        stage.apply(dataset, SETTINGS)


# Subsets.


@pytest.mark.quick("30-30-position", "0.25-250-position")
@ways
@pytest.mark.parametrize("size, expected", [(30, 30), (0.25, 250)], ids=str)
def test_a_stratified_subset_keeps_proportions_and_order(way, size, expected):
    labels = skewed_labels()
    stage = Subset(size, stratify="target", seed=4)
    source = array_source(np.arange(1000), labels)
    if way == "position":
        kept = stage.chosen(source, SETTINGS).numpy().tolist()
    else:
        dataset = stage.apply(numbered(labels), SETTINGS)
        assert int(dataset.cardinality()) == expected
        kept = positions_of(dataset)
        assert kept == positions_of(dataset)
        assert kept == stage.chosen(source, SETTINGS).numpy().tolist()
    assert kept == sorted(kept)
    seats = np.bincount(labels[kept], minlength=5).tolist()
    assert seats == largest_remainders(SIZES, expected)


def test_a_subset_is_the_same_for_any_global_seed():
    kept = []
    for seed in (1, 2):
        tf.random.set_seed(seed)
        kept.append(positions_of(Subset(5).apply(numbered([0] * 50), SETTINGS)))
    assert kept[0] == kept[1]
    other = positions_of(Subset(5, seed=1).apply(numbered([0] * 50), SETTINGS))
    assert kept[0] != other


def test_a_subset_counts_a_dataset_of_unknown_length():
    dataset = numbered([0] * 10).filter(lambda x, y: x % 2 == 0)
    kept = Subset(0.6).apply(dataset, SETTINGS)
    assert int(kept.cardinality()) == len(list(kept)) == 3


def test_a_subset_as_large_as_the_data_is_all_of_it():
    kept = positions_of(Subset(7).apply(numbered([0] * 7), SETTINGS))
    assert kept == list(range(7))


# Errors.


def check(stage, dataset):
    stage.check(dataset)
    stage.apply(dataset, SETTINGS)


ERRORS = {
    "no target": (
        lambda: check(Balance(), tf.data.Dataset.range(3)),
        "Elements are a tensor (), without a target; expected (input, target).",
    ),
    "many targets": (
        lambda: check(
            Balance(),
            tf.data.Dataset.from_tensor_slices(([1], {"a": [1], "b": [2]})),
        ),
        "The target is a dict of ('a', 'b'); expected one tensor that tells the class.",
    ),
    "no such key": (
        lambda: check(Balance("c"), tf.data.Dataset.from_tensor_slices({"a": [1]})),
        "`by` is 'c'; expected a key of the elements, which have the keys ('a',).",
    ),
    "no dict": (
        lambda: check(Balance("c"), numbered([0, 1])),
        "`by` is 'c'; expected a key of the elements, which have no dict but "
        "(a tensor (), a tensor ()).",
    ),
    "several weights": (
        lambda: check(Weights(lambda x, y: y), numbered(np.zeros((3, 2)))),
        "What `weights` reads has shape (2,); expected a scalar.",
    ),
    "no end": (
        lambda: check(Balance(), numbered([0, 1]).repeat()),
        "`.balance` got a dataset without end; expected one that ends",
    ),
    "weights without end": (
        lambda: check(Weights([1.0]), numbered([0, 1]).repeat()),
        "`.weights` got a dataset without end; expected one that ends",
    ),
    "subset without end": (
        lambda: check(Subset(1), numbered([0, 1]).repeat()),
        "`.subset` got a dataset without end; expected one that ends",
    ),
    "other number": (
        lambda: Weights([1.0, 2.0]).check(numbered([0, 1, 2])),
        "`weights` has 2 values for 3 examples; expected one for each example",
    ),
    "other number of rows": (
        lambda: by_position(Weights([1.0, 2.0]), [0, 1, 2]),
        "`weights` has 2 values for 3 examples; expected one for each example",
    ),
    "negative": (
        lambda: Weights([1.0, -2.0, -3.0]),
        "`weights` has -2.0 at index 1 and 2 such values in all; expected finite",
    ),
    "infinite": (lambda: Weights([np.inf]), "`weights` has inf at index 0"),
    "weight not a number": (
        lambda: check(Weights(lambda x, y: y), numbered([1.0, np.nan])),
        "`weights` has nan at index 1 and 1 such values in all",
    ),
    "all zero": (
        lambda: Weights([0, 0]),
        "All 2 `weights` are 0, from index 0 on; expected at least one above 0.",
    ),
    "too many": (
        lambda: Weights([1, 0, 1], replacement=False, num_examples=3),
        "`num_examples` is 3 with `replacement=False`; expected at most 2, the number "
        "of weights above 0 (the first 0 is at index 1).",
    ),
    "all of them": (
        lambda: Weights([1, 2], replacement=False),
        "`num_examples` is None with `replacement=False`; expected fewer",
    ),
    "unknown method": (
        lambda: Balance(method="smote"),
        "Unknown `method` 'smote'; expected 'resample', 'oversample' or 'undersample'.",
    ),
    "subset too large": (
        lambda: check(Subset(4), numbered([0, 1, 2])),
        "`size` is 4; expected at most 3, the number of examples.",
    ),
    "share of more than all": (
        lambda: Subset(1.5),
        "`size` is 1.5; expected a number above 0 and below 1.",
    ),
    "subset of none": (
        lambda: Subset(0),
        "`size` is 0; expected an integer of at least 1.",
    ),
    "empty": (
        lambda: check(Balance(), numbered([0]).filter(lambda x, y: y > 0)),
        "The dataset has no elements to read `by` of; expected at least one.",
    ),
}


test_errors_say_what_to_do = refusals(ERRORS)


NO_CLASS = "is not one class"
LABELS = {
    "matrix": (np.zeros((3, 2, 2)), "What `by` reads has shape (2, 2); expected a sca"),
    "continuous": ([1.0, 0.25], "Example 1 has 0.25 as its class; expected integers"),
    "not a number": ([1.0, 0.0, np.nan], "Example 2 has nan as its class"),
    "several labels": ([[1, 0], [1, 1]], f"The row of example 1 {NO_CLASS}; expected"),
    "two largest": ([[0.5, 0.5], [0.4, 0.6]], f"The row of example 0 {NO_CLASS}"),
    "no shares": ([[1.0, 0.0], [0.5, 0.2]], f"The row of example 1 {NO_CLASS}"),
    "regression": ([[1.0, 0.0], [1.2, -0.2]], f"The row of example 1 {NO_CLASS}"),
}


test_labels_that_are_no_classes_are_errors = refusals(
    LABELS, lambda labels: check(Balance(), numbered(labels))
)


TYPE_ERRORS = {
    "by": (lambda: Balance(3), "`by` is 3; expected None, a key or a function."),
    "stratify": (
        lambda: Subset(3, stratify=2),
        "`stratify` is 2; expected None, 'target', a key or a function",
    ),
    "weights": (
        lambda: Weights([["a"]]),
        "`weights` has shape (1, 1) and dtype <U1; expected one number",
    ),
    "text weight": (
        lambda: check(Weights(lambda x, y: y), numbered(["a"])),
        "`weights` gave a string; expected a weight of at least 0.",
    ),
    "structure": (
        lambda: check(Balance(lambda x, y: (y, y)), numbered([0])),
        "expected one value for an element. Return a single number or string.",
    ),
    "seed": (lambda: Balance(seed=0.5), "`seed` is 0.5, of type float"),
    "size": (lambda: Subset("a"), "`size` is 'a', of type str"),
    "truth": (lambda: Subset(True), "`size` is True, of type bool"),
}


test_type_errors_say_what_to_do = refusals(TYPE_ERRORS, kind=TypeError)
