"""What `Pipeline.build` gives loses and doubles nothing under `tf.distribute`."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.replicas import two_replicas
from tfamp.data import Pipeline
from tfamp.data.stages import workers

Policy = tf.data.experimental.AutoShardPolicy
NUM = 27
# Classes of unequal size: 0, 9 and 18 are of class 1, the others of class 0.
LABELS = (np.arange(NUM) % 9 == 0).astype(np.int64)
FEATURES = {"x": tf.io.FixedLenFeature([], tf.int64)}


def arrays():
    return Pipeline.from_arrays(np.arange(NUM), LABELS)


def write_records(folder, sizes=(5, 13, 9)):
    """Writes files of these sizes which together hold 0, 1, 2 and so on."""
    numbers = iter(range(sum(sizes)))
    for file, size in enumerate(sizes):
        with tf.io.TFRecordWriter(str(folder / f"{file}.tfrecord")) as writer:
            for _ in range(size):
                value = tf.train.Int64List(value=[next(numbers)])
                feature = {"x": tf.train.Feature(int64_list=value)}
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())
    return folder


def from_records(folder):
    pipeline = Pipeline.from_tfrecord(
        str(write_records(folder) / "*.tfrecord"), features=FEATURES
    )
    return pipeline.map(lambda example: example["x"])


def from_csv(folder):
    for file, rows in enumerate((range(11), range(11, NUM))):
        text = "x,y\n" + "".join(f"{row},{row % 3}\n" for row in rows)
        (folder / f"{file}.csv").write_text(text)
    return Pipeline.from_csv(str(folder / "*.csv"), label="y")


def careful(pipeline):
    """Skips number 4, which cannot be worked on."""

    def refuse(x, y):
        four = tf.constant(4, x.dtype)
        with tf.control_dependencies([tf.debugging.assert_none_equal(x, four)]):
            return tf.identity(x), y

    return pipeline.map(refuse).on_error("skip", max_fraction=0.5)


@pytest.fixture(scope="module")
def strategy():
    return two_replicas()


def inputs_of(batch):
    x = batch[0] if isinstance(batch, tuple) else batch
    return x["x"] if isinstance(x, dict) else x


def epoch_of(strategy, distributed):
    """Returns, step by step, the numbers that each replica got."""
    return [
        [np.ravel(part).tolist() for part in strategy.experimental_local_results(x)]
        for x in map(inputs_of, distributed)
    ]


def flat(steps):
    return [number for step in steps for part in step for number in part]


def sizes(steps):
    return [[len(part) for part in step] for step in steps]


KINDS = {
    "arrays": lambda folder: arrays(),
    "records": from_records,
    "records, file cache": lambda folder: from_records(folder).cache(folder / "c"),
    "csv": from_csv,
    "dataset": lambda folder: Pipeline.from_dataset(tf.data.Dataset.range(NUM)),
}


@pytest.mark.quick("arrays-True")
@pytest.mark.parametrize(
    "kind, is_shuffled",
    [("arrays", False), *((kind, True) for kind in KINDS)],
)
def test_replicas_share_every_batch_and_miss_no_element(
    strategy, tmp_path, kind, is_shuffled
):
    pipeline = KINDS[kind](tmp_path)
    if is_shuffled:
        pipeline = pipeline.shuffle(seed=1)
    dataset = pipeline.batch(8).build()
    # Workers divide elements, not files.
    policy = dataset.options().experimental_distribute.auto_shard_policy
    assert policy == Policy.DATA
    distributed = strategy.experimental_distribute_dataset(dataset)
    epochs = [epoch_of(strategy, distributed) for _ in range(2)]
    for steps in epochs:
        assert sizes(steps) == [[4, 4], [4, 4], [4, 4], [2, 1]]
        assert sorted(flat(steps)) == list(range(NUM))
    assert (flat(epochs[0]) == list(range(NUM))) is not is_shuffled
    assert (epochs[0] == epochs[1]) is not is_shuffled


NEED_ALL = {
    "cache": lambda p, folder: p.cache(folder / "cache"),
}


@pytest.mark.parametrize("name", NEED_ALL)
def test_dividing_files_behind_what_needs_all_of_them_is_refused(tmp_path, name):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = Policy.FILE
    given = tf.data.Dataset.range(4).with_options(options)
    pipeline = NEED_ALL[name](Pipeline.from_dataset(given), tmp_path)
    message = (
        f"`dataset` has the option `auto_shard_policy` FILE, and `.{name}` came with "
        "it; expected elements of all files there. Leave the option as it was"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.build()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.quick("arrays-1", "arrays-4")
@pytest.mark.parametrize(
    "kind, num_shards",
    [("arrays", 1), ("arrays", 4), ("records", 2), ("csv", 2)],
)
def test_shards_are_disjoint_and_complete(tmp_path, kind, num_shards):
    pipeline = KINDS[kind](tmp_path)
    found = []
    for index in range(num_shards):
        # No seed, so each worker has an order of its own.
        dataset = pipeline.shard(num_shards, index).shuffle().batch(4).build()
        own = [int(n) for batch in dataset for n in np.ravel(inputs_of(batch))]
        assert sorted(own) == list(range(index, NUM, num_shards))
        assert int(dataset.cardinality()) == -(-len(own) // 4)
        found += own
        policy = dataset.options().experimental_distribute.auto_shard_policy
        assert policy == Policy.OFF
    assert sorted(found) == list(range(NUM))


@pytest.mark.quick("shuffle")
@pytest.mark.parametrize(
    "stage, name",
    [
        (lambda p: p.shuffle(), "shuffle"),
        (lambda p: p.cache("memory").map(lambda x, y: (x, y)).balance(), "balance"),
        (lambda p: p.weights(np.ones(NUM)), "weights"),
    ],
    ids=["shuffle", "balance on a stream", "weights"],
)
def test_several_workers_need_one_order(monkeypatch, stage, name):
    pipeline = stage(arrays()).batch(8)
    pipeline.build()
    monkeypatch.setattr(workers, "num_workers", lambda: 2)
    message = (
        f"`.{name}` has no seed, and 2 worker processes train together; expected one "
        "order in all of them: some elements would come twice, others never. Pass the "
        "same `seed=` everywhere"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.build()
    pipeline.describe()


def test_a_part_has_no_length_that_fit_would_take_for_its_steps(monkeypatch):
    part, whole = arrays().shard(2, 0).batch(7), arrays().batch(7)
    assert int(part.build().cardinality()) == 2
    monkeypatch.setattr(workers, "num_workers", lambda: 2)
    dataset = part.build()
    assert int(dataset.cardinality()) == tf.data.UNKNOWN_CARDINALITY
    assert [len(y) for _, y in dataset] == [7, 7]
    assert int(whole.build().cardinality()) == 4
