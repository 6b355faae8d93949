"""Parts of datasets that shuffle themselves: refused with the remedy, never mixed up.

Over two epochs of a subset, and over all shards, each element comes as often as it
should, or `build` says why it would not.
"""

import pytest
import tensorflow as tf

from tfamp.data import Pipeline

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


def numbers(pipeline):
    return sorted(int(x) for x in pipeline.build())


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
    first, second = (sorted(int(x) for x in subset) for _ in range(2))
    assert first == second and len(first) == NUM // 5
    shards = [Pipeline.from_dataset(make()).shard(3, index) for index in range(3)]
    assert sorted(sum(map(numbers, shards), [])) == list(range(NUM))


def test_an_unseeded_order_is_another_in_each_process():
    # The same in each epoch here; another process would draw its own.
    given = plain().shuffle(NUM, reshuffle_each_iteration=False)
    assert len(numbers(Pipeline.from_dataset(given).subset(0.2))) == NUM // 5
    with pytest.raises(ValueError, match="seed"):
        Pipeline.from_dataset(given).shard(2, 0).build()
