"""Examples of an epoch: balance, weights, subsets, by position and on streams.

Parts of datasets that shuffle themselves are refused with the remedy, never mixed up.
"""

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


@ways
def test_balancing_gives_every_class_and_member_its_number(begin):
    for epoch in epochs_of(begin().balance(seed=1)):
        assert np.bincount(LABELS[epoch]).tolist() == [200] * 5
        times = np.bincount(epoch, minlength=1000)
        for label in range(5):
            of_class = times[LABELS == label]
            assert of_class.max() - of_class.min() <= 1


@pytest.mark.quick("stream")
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


CLASSES = {
    "strings": np.array(["cat", "dog", "dog", "dog"]),
    "one-hot rows": np.eye(3, dtype=np.float32)[[2, 0, 0, 0]],
    "probabilities": np.array([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]),
}


@ways
@pytest.mark.parametrize("labels", CLASSES.values(), ids=CLASSES)
def test_classes_may_be(labels, begin):
    for epoch in epochs_of(begin(labels).balance(seed=1)):
        assert epoch.count(0) == 2
        assert len(epoch) == 4


@ways
def test_a_single_class_is_warned_of(begin):
    message = "All 4 examples are of class 3; expected two classes or more."
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        dataset = begin([3, 3, 3, 3]).balance(seed=1).build()
    assert caught[0].filename == __file__
    assert sorted(int(x) for x, _ in dataset) == [0, 1, 2, 3]


@ways
def test_weights_are_drawn_in_proportion_over_epochs(begin):
    weights = np.array([0.0, 3.0, 0.0, 1.0, 1.0, 0.0])
    each = np.tile(weights, 1500)
    epochs = epochs_of(begin(np.zeros(9000)).weights(each, seed=2))
    assert epochs[0] != epochs[1]
    share = weights / weights.sum()
    for epoch in epochs:
        times = np.bincount(np.array(epoch) % 6, minlength=6)
        # Four deviations of a binomial number.
        off = 4 * np.sqrt(9000 * share * (1 - share))
        assert (np.abs(times - 9000 * share) <= off).all()


@ways
def test_a_subset_is_the_same_for_any_global_seed(begin):
    kept = []
    for seed in (1, 2):
        tf.random.set_seed(seed)
        kept.append(epochs_of(begin([0] * 50).subset(5))[0])
    assert kept[0] == kept[1] != epochs_of(begin([0] * 50).subset(5, seed=1))[0]


ERRORS = {
    "no target": (
        lambda: Pipeline.from_dataset(tf.data.Dataset.range(3)).balance().build(),
        "expected (input, target) with one tensor as target,",
    ),
    "no end": (
        lambda: Pipeline.from_dataset(stream().build().repeat()).balance().build(),
        "`.balance` got a dataset without end; expected one that ends",
    ),
    "subset too large": (
        lambda: arrays([0, 1, 2]).subset(4).build(),
        "`size` is 4; expected at most 3, the number of examples.",
    ),
    "continuous": (
        lambda: arrays([1.0, 0.25]).balance().build(),
        "are not one class each; expected integers",
    ),
}
test_errors_say_what_to_do = refusals(ERRORS)


NUM = 60


def plain():
    return tf.data.Dataset.range(NUM)


def listed(folder):
    (folder / "0.txt").write_text("0")
    return tf.data.Dataset.list_files(str(folder / "*.txt"))


SHUFFLED = {
    "a seed, anew each epoch": lambda folder: plain().shuffle(NUM, seed=1),
    "list_files": listed,
    "inside an interleave": lambda folder: tf.data.Dataset.range(2).interleave(
        lambda n: tf.data.Dataset.range(30).shuffle(30).map(lambda x: 30 * n + x)
    ),
    "parallel calls as they come": lambda folder: plain().map(
        lambda x: x, num_parallel_calls=4, deterministic=False
    ),
}
PARTS = {
    "subset": lambda pipeline: pipeline.subset(0.2),
    "shards": lambda pipeline: pipeline.shard(2, 1),
    "weights of examples": lambda pipeline: pipeline.weights([1.0] * NUM),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("shuffle", SHUFFLED.values(), ids=SHUFFLED)
def test_parts_of_what_shuffles_itself_are_refused_with_the_remedy(
    tmp_path, shuffle, part
):
    pipeline = part(Pipeline.from_dataset(shuffle(tmp_path)))
    with pytest.raises(ValueError, match=r"order.*\.shuffle"):
        pipeline.build()


def numbers(dataset):
    return sorted(int(x) for x in dataset)


IN_ORDER = {
    "as it is": plain,
    "shuffled once": lambda: plain().shuffle(
        NUM, seed=1, reshuffle_each_iteration=False
    ),
    "a generator": lambda: tf.data.Dataset.from_generator(
        lambda: range(NUM), output_signature=tf.TensorSpec((), tf.int64)
    ),
}


@pytest.mark.parametrize("make", IN_ORDER.values(), ids=IN_ORDER)
def test_parts_of_what_keeps_its_order_are_the_same_and_whole(make):
    subset = Pipeline.from_dataset(make()).subset(0.2).shuffle(seed=1).build()
    first, second = numbers(subset), numbers(subset)
    assert first == second and len(first) == NUM // 5
    shards = [Pipeline.from_dataset(make()).shard(3, i).build() for i in range(3)]
    assert sorted(sum(map(numbers, shards), [])) == list(range(NUM))


def test_an_unseeded_order_is_another_in_each_process():
    # The same in each epoch here; another process would draw its own.
    given = plain().shuffle(NUM, reshuffle_each_iteration=False)
    assert len(numbers(Pipeline.from_dataset(given).subset(0.2).build())) == NUM // 5
    with pytest.raises(ValueError, match="seed"):
        Pipeline.from_dataset(given).shard(2, 0).build()
