"""Examples of an epoch: balance, weights, subsets, by position and on streams."""

import collections
import itertools
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals
from tfamp.data import Pipeline

# Of 1,000 examples, as skewed as class labels are.
SIZES = (1, 9, 90, 200, 700)
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(len(SIZES)), SIZES))


def arrays(labels=LABELS, x=None):
    labels = np.asarray(labels)
    return Pipeline.from_arrays(np.arange(len(labels)) if x is None else x, labels)


def stream(labels=LABELS, x=None):
    return Pipeline.from_dataset(arrays(labels, x).build())


WAYS = {"position": arrays, "stream": stream}
ways = pytest.mark.parametrize("begin", WAYS.values(), ids=WAYS)


def epochs_of(pipeline, num=2):
    """Returns the positions of some epochs; the dataset knows how many they are."""
    dataset = pipeline.build()
    length = int(dataset.cardinality())
    batches = dataset.map(lambda x, y: x).batch(1024)
    epochs = [[int(x) for part in batches for x in part.numpy()] for _ in range(num)]
    assert [len(epoch) for epoch in epochs] == [length] * num
    return epochs


def limit(degrees_of_freedom):
    """Returns what chi-square exceeds with probability 1e-4 (Wilson-Hilferty)."""
    part = 2 / (9 * degrees_of_freedom)
    return degrees_of_freedom * (1 - part + 3.719 * np.sqrt(part)) ** 3


def assert_drawn_from(observed, probabilities):
    expected = np.sum(observed) * np.asarray(probabilities, np.float64)
    statistic = np.sum((np.asarray(observed) - expected) ** 2 / expected)
    assert statistic < limit(len(expected) - 1)


@ways
@pytest.mark.parametrize(
    "method, of_each", [("resample", 200), ("oversample", 700), ("undersample", 1)]
)
def test_balancing_gives_every_class_and_member_its_number(begin, method, of_each):
    for epoch in epochs_of(begin().balance(method=method, seed=1)):
        assert np.bincount(LABELS[epoch]).tolist() == [of_each] * 5
        times = np.bincount(epoch, minlength=1000)
        for label in range(5):
            of_class = times[LABELS == label]
            assert of_class.max() - of_class.min() <= 1


def test_stock_rejection_resampling_loses_the_cardinality():
    stock = stream([0, 0, 0, 1]).build()
    stock = stock.rejection_resample(lambda x, y: y, [0.5, 0.5], [0.75, 0.25], seed=1)
    assert int(stock.cardinality()) == int(tf.data.UNKNOWN_CARDINALITY)


def test_places_left_over_go_to_other_classes_and_members_each_time():
    pipeline = arrays([0, 0, 0, 1, 1, 1, 2]).balance(seed=1)
    epochs = epochs_of(pipeline, 300)
    # 7 places: each class gets 2, and one of the three gets the seventh.
    classes = np.array([0, 0, 0, 1, 1, 1, 2])[np.array(epochs)]
    counts = np.stack([np.bincount(row, minlength=3) for row in classes])
    assert (np.sort(counts) == [2, 2, 3]).all()
    assert_drawn_from((counts - 2).sum(axis=0), [1 / 3] * 3)
    firsts = np.bincount([epoch[0] for epoch in epochs], minlength=7)
    assert_drawn_from(firsts, [1 / 9] * 6 + [1 / 3])


@ways
def test_each_epoch_is_another_draw_and_a_seed_repeats_all_of_them(begin):
    def epochs(seed):
        return epochs_of(begin().balance(seed=seed))

    first, second = epochs(1)
    assert sorted(first) != sorted(second)
    assert epochs(1) == [first, second]
    assert epochs(2)[0] != first
    assert epochs(None)[0] != epochs(None)[0]
    again = begin().balance(seed=1).build().repeat(2).map(lambda x, y: x)
    assert [int(x) for x in again] == first + second


def test_a_draw_by_position_is_shuffled_and_a_stream_keeps_its_order():
    drawn, streamed = (epochs_of(make().balance(seed=1))[0] for make in WAYS.values())
    assert drawn != sorted(drawn)
    assert streamed == sorted(streamed) == sorted(drawn)


CLASSES = {
    "strings": np.array(["cat", "dog", "dog", "dog"]),
    "booleans": np.array([True, False, False, False]),
    "whole floats": np.array([1.0, 0.0, 0.0, 0.0], np.float32),
    "columns": np.array([[7], [9], [9], [9]]),
    "one-hot rows": np.eye(3, dtype=np.float32)[[2, 0, 0, 0]],
    "probabilities": np.array([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]),
    "far apart": np.array([10**12, -5, -5, -5]),
}


@ways
@pytest.mark.parametrize("labels", CLASSES.values(), ids=CLASSES)
def test_classes_may_be(labels, begin):
    for epoch in epochs_of(begin(labels).balance(seed=1)):
        assert epoch.count(0) == 2
        assert len(epoch) == 4


@ways
@pytest.mark.parametrize(
    "by",
    ["group", lambda x, y: x["group"] == 8, lambda x, y: y[1]],
    ids=["key", "of the input", "of the target"],
)
def test_classes_may_come_from_a_function_or_a_key(begin, by):
    x = {"id": np.arange(6), "group": np.array([5, 5, 5, 5, 5, 8])}
    targets = np.stack([np.arange(6), x["group"]], axis=1)
    pipeline = begin(targets, x).map(lambda x, y: (x, y)).balance(by, seed=1)
    assert [int(x["id"]) for x, _ in pipeline.build()].count(5) == 3


@ways
def test_a_single_class_is_warned_of(begin):
    message = "All 4 examples are of class 3; expected two classes or more."
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        dataset = begin([3, 3, 3, 3]).balance(seed=1).build()
    assert caught[0].filename == __file__
    assert sorted(int(x) for x, _ in dataset) == [0, 1, 2, 3]


RAGGED = tf.ragged.constant([[[1]], [[2, 3], [5]], [], [[4]]])
COUNT = tf.data.Dataset.range(4)
KINDS = {
    "static": COUNT.map(lambda i: (tf.fill([3], i), i % 3)),
    "strings": COUNT.map(lambda i: (tf.strings.as_string(i), i % 3)),
    "unknown length": COUNT.map(
        lambda i: (tf.ensure_shape(tf.range(i), [None]), i % 3)
    ),
    "ragged": tf.data.Dataset.zip(
        (tf.data.Dataset.from_tensor_slices(RAGGED), COUNT.map(lambda i: i % 3))
    ),
    "sparse": COUNT.map(lambda i: (tf.sparse.eye(2), i % 3)),
}


@pytest.mark.parametrize("dataset", KINDS.values(), ids=KINDS)
def test_elements_of_every_kind_are_copied_whole(dataset):
    balanced = Pipeline.from_dataset(dataset).balance(method="oversample", seed=1)
    balanced = balanced.build()
    assert balanced.element_spec == dataset.element_spec
    # Classes are 0, 1, 2, 0: examples 1 and 2 come twice.
    given = [tf.nest.flatten(e, expand_composites=True) for e in dataset]
    came = [tf.nest.flatten(e, expand_composites=True) for e in balanced]
    for index, element in zip([0, 1, 1, 2, 2, 3], came, strict=True):
        for a, b in zip(element, given[index], strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_pass_over_labels_fills_a_cache_before_it():
    calls = []

    def note(x):
        calls.append(int(x))
        return x

    def noted(x, y):
        return tf.ensure_shape(tf.numpy_function(note, [x], x.dtype), []), y

    pipeline = stream([0, 0, 0, 1]).map(noted).cache("memory").balance(seed=1)
    dataset = pipeline.build()
    assert len(list(dataset)) == len(list(dataset)) == 4
    assert sorted(calls) == [0, 1, 2, 3]


def test_a_dataset_that_shuffles_itself_is_refused():
    shuffled = Pipeline.from_dataset(stream().build().shuffle(1000, seed=1))
    with pytest.raises(ValueError, match="order differs in each pass"):
        shuffled.balance(seed=1).build()


@pytest.mark.parametrize("write", [
    lambda p: p.balance(), lambda p: p.weights(lambda x, y: y),
    lambda p: p.weights([1.0, 2.0], num_examples=5),
    lambda p: p.subset(0.5, stratify="target"), lambda p: p.subset(3),
], ids=["balance", "weights", "given weights", "share", "subset"])  # fmt: skip
def test_describing_reads_nothing(write):
    def generate():
        raise AssertionError("read")
        yield 0, 0

    scalar = tf.TensorSpec((), tf.int64)
    given = tf.data.Dataset.from_generator(generate, output_signature=(scalar, scalar))
    assert write(Pipeline.from_dataset(given)).describe()


WEIGHTS = {
    "linear": np.arange(1, 21, dtype=float),
    "with zeros": np.array([0.0, 3.0, 0.0, 1.0, 1.0, 0.0]),
    "huge": np.array([0.5, 1.0, 1.5]) * 1e308,
}


@ways
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_are_drawn_in_proportion_over_epochs(begin, weights):
    pipeline = begin(np.zeros(len(weights))).weights(weights, num_examples=9000, seed=2)
    epochs = epochs_of(pipeline)
    assert epochs[0] != epochs[1]
    share = weights / weights.max() / (weights / weights.max()).sum()
    for epoch in epochs:
        times = np.bincount(epoch, minlength=len(weights))
        assert times[share == 0].sum() == 0
        assert_drawn_from(times[share > 0], share[share > 0])


@ways
def test_weights_may_come_from_a_function_and_keep_the_length(begin):
    pipeline = begin([0, 1, 0, 2]).weights(lambda x, y: tf.cast(y, tf.float32), seed=1)
    for epoch in epochs_of(pipeline):
        assert set(epoch) <= {1, 3}
        assert len(epoch) == 4


@pytest.mark.slow
def test_draws_without_replacement_are_successive_draws():
    weights = np.array([1.0, 2.0, 0.0, 3.0, 4.0])
    pipeline = arrays(np.zeros(5)).weights(
        weights, replacement=False, num_examples=2, seed=5
    )
    sets = collections.Counter(map(frozenset, epochs_of(pipeline, 1500)))
    probabilities = collections.Counter()
    for i, j in itertools.permutations([0, 1, 3, 4], 2):
        chance = weights[i] / 10 * weights[j] / (10 - weights[i])
        probabilities[frozenset([i, j])] += chance
    assert set(sets) == set(probabilities)
    assert_drawn_from([sets[key] for key in probabilities], [*probabilities.values()])


def largest_remainders(counts, size):
    """Returns the seats of each class, by fractions of Python's integers."""
    total = sum(counts)
    seats = [count * size // total for count in counts]
    order = sorted(range(len(counts)), key=lambda k: -(counts[k] * size % total))
    for k in order[: size - sum(seats)]:
        seats[k] += 1
    return seats


@pytest.mark.parametrize(
    "size, expected", [(30, 30), (0.25, 250), (1, 1), (1000, 1000)]
)
def test_a_stratified_subset_keeps_proportions_and_order(size, expected):
    found = [
        epochs_of(begin().subset(size, stratify="target", seed=4))
        for begin in WAYS.values()
    ]
    assert found[0] == found[1], "on a stream as by position"
    first, second = found[0]
    assert first == second == sorted(first)
    seats = np.bincount(LABELS[first], minlength=5).tolist()
    assert seats == largest_remainders(SIZES, expected)


@ways
def test_a_subset_is_uniform_and_the_same_for_any_global_seed(begin):
    kept = []
    for seed in (1, 2):
        tf.random.set_seed(seed)
        kept.append(epochs_of(begin([0] * 50).subset(5))[0])
    assert kept[0] == kept[1] != epochs_of(begin([0] * 50).subset(5, seed=1))[0]
    times = np.zeros(9)
    for seed in range(60):
        times[epochs_of(begin([0] * 6 + [1] * 3).subset(3, seed=seed), 1)[0]] += 1
    assert_drawn_from(times, [1 / 9] * 9)


def odd(x, y):
    return x % 2 == 1


NO_CLASS = "are not one class"
ERRORS = {
    "no target": (
        lambda: Pipeline.from_dataset(tf.data.Dataset.range(3)).balance().build(),
        "expected (input, target) with one tensor as target.",
    ),
    "many targets": (
        lambda: stream([0, 1]).map(lambda x, y: (x, {"a": y})).balance().build(),
        "expected (input, target) with one tensor as target.",
    ),
    "no such key": (
        lambda: stream([0], {"a": np.zeros(1)}).balance("c").build(),
        "`by` is 'c'; expected a key of the elements, which have the keys ('a',).",
    ),
    "no end": (
        lambda: Pipeline.from_dataset(stream().build().repeat()).balance().build(),
        "`.balance` got a dataset without end; expected one that ends",
    ),
    "subset without end": (
        lambda: Pipeline.from_dataset(stream().build().repeat()).subset(1).build(),
        "`.subset` got a dataset without end; expected one that ends",
    ),
    "other number": (
        lambda: arrays([0, 1, 2]).weights([1.0, 2.0]).build(),
        "`weights` has 2 values for 3 examples; expected one for each example",
    ),
    "other number behind a filter": (
        lambda: arrays([0, 1, 2]).filter(odd).weights([1.0, 2.0, 1.0]).build(),
        "`weights` has 3 values for 1 examples; expected one for each example",
    ),
    "negative": (
        lambda: arrays([0, 1, 2]).weights([1.0, -2.0, -3.0]),
        "`weights` has -2.0 at index 1 and 2 such values in all; expected finite",
    ),
    "weight not a number": (
        lambda: arrays([1.0, np.nan]).weights(lambda x, y: y).build(),
        "`weights` has nan at index 1 and 1 such values in all",
    ),
    "all zero": (lambda: arrays([0, 0]).weights([0, 0]), "expected at least 1"),
    "too many": (
        lambda: arrays([0] * 3).weights([1, 0, 1], replacement=False, num_examples=3),
        "`weights` has 2 values above 0 of 3; expected at least 3",
    ),
    "all of them": (
        lambda: arrays([0, 1]).weights([1, 2], replacement=False),
        "`num_examples` is None with `replacement=False`; expected fewer",
    ),
    "unknown method": (
        lambda: arrays().balance(method="smote"),
        "Unknown `method` 'smote'; expected 'resample', 'oversample' or 'undersample'.",
    ),
    "subset too large": (
        lambda: arrays([0, 1, 2]).subset(4).build(),
        "`size` is 4; expected at most 3, the number of examples.",
    ),
    "share of more than all": (
        lambda: arrays().subset(1.5),
        "`size` is 1.5; expected a number above 0 and below 1.",
    ),
    "matrix": (lambda: arrays(np.zeros((3, 2, 2))).balance().build(), NO_CLASS),
    "continuous": (
        lambda: arrays([1.0, 0.25]).balance().build(),
        "Example 1 has 0.25 as its class; expected integers",
    ),
    "several labels": (lambda: arrays([[1, 0], [1, 1]]).balance().build(), NO_CLASS),
    "two largest": (lambda: arrays([[0.5, 0.5]]).balance().build(), NO_CLASS),
    "regression": (lambda: arrays([[1.2, -0.2]]).balance().build(), NO_CLASS),
}
test_errors_say_what_to_do = refusals(ERRORS)

TYPE_ERRORS = {
    "by": (
        lambda: arrays().balance(3),
        "`by` is 3; expected None, a key or a function",
    ),
    "stratify": (
        lambda: arrays().subset(3, stratify=2),
        "`stratify` is 2; expected None, a key or a function",
    ),
    "weights": (
        lambda: arrays().weights([["a"]]),
        "`weights` has shape (1, 1) and dtype <U1; expected one number",
    ),
    "structure": (
        lambda: stream([0]).balance(lambda x, y: (y, y)).build(),
        "expected one value for an element. Return a single number or string.",
    ),
    "seed": (lambda: arrays().balance(seed=0.5), "`seed` is 0.5, of type float"),
    "size": (lambda: arrays().subset("a"), "`size` is 'a', of type str"),
}
test_type_errors_say_what_to_do = refusals(TYPE_ERRORS, kind=TypeError)
