"""Parts of datasets that shuffle themselves: refused with the remedy, never mixed up.

What a program would do is counted here: over two epochs of a subset, and over all
shards, each element comes as often as it should, or `build` says why it would not.
"""

import numpy as np
import pytest
import tensorflow as tf

from tfamp.data import Pipeline

NUM = 60


def plain():
    return tf.data.Dataset.range(NUM)


@pytest.fixture
def files(tmp_path):
    for number in range(NUM):
        (tmp_path / f"{number:02}.txt").write_text(str(number))
    return str(tmp_path / "*.txt")


SHUFFLED = {
    "a seed, anew each epoch": lambda files: plain().shuffle(NUM, seed=1),
    "list_files": lambda files: tf.data.Dataset.list_files(files).map(
        lambda path: tf.strings.to_number(tf.io.read_file(path), tf.int64)
    ),
    "inside an interleave": lambda files: tf.data.Dataset.range(2).interleave(
        lambda n: tf.data.Dataset.range(30).shuffle(30).map(lambda x: 30 * n + x)
    ),
    "parallel calls as they come": lambda files: plain().map(
        lambda x: x, num_parallel_calls=4, deterministic=False
    ),
}


def numbers(dataset):
    return sorted(int(x) for x in dataset)


PARTS = {
    "subset": lambda given: [Pipeline.from_dataset(given).subset(0.2)],
    "shards": lambda given: [
        Pipeline.from_dataset(given).shard(2, index) for index in range(2)
    ],
    "weights of examples": lambda given: [
        Pipeline.from_dataset(given).weights(np.arange(NUM) < 3)
    ],
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("shuffle", SHUFFLED.values(), ids=SHUFFLED)
def test_parts_of_what_shuffles_itself_are_refused_with_the_remedy(
    files, shuffle, part
):
    for pipeline in part(shuffle(files)):
        with pytest.raises(ValueError, match="order") as caught:
            pipeline.build()
        assert ".shuffle" in str(caught.value)


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
    assert first == second
    assert len(first) == NUM // 5
    shards = [Pipeline.from_dataset(make()).shard(3, i).build() for i in range(3)]
    for _ in range(2):
        assert sorted(sum(map(numbers, shards), [])) == list(range(NUM))


def test_an_unseeded_order_is_another_in_each_process():
    # The same in each epoch here; another process would draw its own.
    given = plain().shuffle(NUM, reshuffle_each_iteration=False)
    subset = Pipeline.from_dataset(given).subset(0.2).build()
    assert numbers(subset) == numbers(subset)
    with pytest.raises(ValueError, match="seed"):
        Pipeline.from_dataset(given).shard(2, 0).build()
