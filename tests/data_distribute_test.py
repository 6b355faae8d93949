"""What `Pipeline.build` gives loses and doubles nothing under `tf.distribute`.

As a program, `python -m tests.data_distribute_test OUT` with `TF_CONFIG` set, it is one
of two workers, and writes what came out as JSON.
"""

import collections
import json
import re
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import write_records
from tests.multi_worker_test import run_workers
from tests.replicas import two_replicas
from tfamp.data import Pipeline
from tfamp.data.stages import workers

Policy = tf.data.experimental.AutoShardPolicy
NUM = 27
# Classes of unequal size: 0, 9 and 18 are of class 1, the others of class 0.
LABELS = (np.arange(NUM) % 9 == 0).astype(np.int64)


def arrays(folder=None):
    return Pipeline.from_arrays(np.arange(NUM), LABELS)


def from_records(folder):
    """Reads files of unequal size which together hold 0, 1, 2 and so on."""
    for file, numbers in enumerate((range(5), range(5, 18), range(18, NUM))):
        write_records(folder / f"{file}.tfrecord", [b"%d" % n for n in numbers])
    pipeline = Pipeline.from_tfrecord(str(folder / "*.tfrecord"))
    return pipeline.map(lambda record: tf.strings.to_number(record, tf.int64))


def from_csv(folder):
    for file, rows in enumerate((range(11), range(11, NUM))):
        text = "x,y\n" + "".join(f"{row},{row % 3}\n" for row in rows)
        (folder / f"{file}.csv").write_text(text)
    return Pipeline.from_csv(str(folder / "*.csv"), label="y")


def inputs_of(batch):
    x = batch[0] if isinstance(batch, tuple) else batch
    return x["x"] if isinstance(x, dict) else x


def batches_of(dataset):
    """Returns the numbers of each batch."""
    return [np.ravel(inputs_of(batch)).tolist() for batch in dataset]


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
    "arrays": arrays,
    "records": from_records,
    "records, file cache": lambda folder: from_records(folder).cache(folder / "c"),
    "csv": from_csv,
    "dataset": lambda folder: Pipeline.from_dataset(tf.data.Dataset.range(NUM)),
}


@pytest.mark.quick("arrays")
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_share_every_batch_and_miss_no_element(tmp_path, kind):
    strategy = two_replicas()
    dataset = KINDS[kind](tmp_path).shuffle(seed=1).batch(8).build()
    # Workers divide elements, not files.
    policy = dataset.options().experimental_distribute.auto_shard_policy
    assert policy == Policy.DATA
    distributed = strategy.experimental_distribute_dataset(dataset)
    epochs = [epoch_of(strategy, distributed) for _ in range(2)]
    for steps in epochs:
        assert sizes(steps) == [[4, 4], [4, 4], [4, 4], [2, 1]]
        assert sorted(flat(steps)) == list(range(NUM))
    assert epochs[0] != epochs[1] and flat(epochs[0]) != list(range(NUM))


def test_dividing_files_behind_a_cache_that_needs_all_of_them_is_refused(tmp_path):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = Policy.FILE
    given = tf.data.Dataset.range(4).with_options(options)
    pipeline = Pipeline.from_dataset(given).cache(tmp_path / "cache")
    with pytest.raises(ValueError, match="expected elements of all files there"):
        pipeline.build()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.quick("arrays-4")
@pytest.mark.parametrize(
    "kind, num_shards", [("arrays", 1), ("arrays", 4), ("records", 2), ("csv", 2)]
)
def test_shards_are_disjoint_and_complete(tmp_path, kind, num_shards):
    pipeline = KINDS[kind](tmp_path)
    found = []
    for index in range(num_shards):
        # No seed, so each worker has an order of its own.
        dataset = pipeline.shard(num_shards, index).shuffle().batch(4).build()
        own = sum(batches_of(dataset), [])
        assert sorted(own) == list(range(index, NUM, num_shards))
        assert int(dataset.cardinality()) == -(-len(own) // 4)
        found += own
        policy = dataset.options().experimental_distribute.auto_shard_policy
        assert policy == Policy.OFF
    assert sorted(found) == list(range(NUM))
    with pytest.raises(TypeError, match="`index` is None"):
        pipeline.shard(num_shards)


@pytest.fixture
def join(monkeypatch):
    """Makes this process a worker, and TensorFlow one of as many."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("TF_CONFIG", raising=False)

    def join(num_workers, index, num_trained=None):
        hosts = [f"host{worker}:2222" for worker in range(num_workers)]
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": hosts}, "task": task}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        monkeypatch.setattr(workers, "num_workers", lambda: num_trained or num_workers)

    return join


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
def test_several_workers_need_one_order(join, stage, name):
    pipeline = stage(arrays()).batch(8)
    pipeline.build()
    join(2, 0)
    message = f"`.{name}` has no seed, and 2 worker processes train together; expected"
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.build()
    pipeline.describe()


def test_a_part_has_no_length_that_fit_would_take_for_its_steps(join):
    part, whole = arrays().shard(2, 0).batch(7), arrays().batch(7)
    assert int(part.build().cardinality()) == 2
    join(2, 0)
    dataset = part.build()
    assert int(dataset.cardinality()) == tf.data.UNKNOWN_CARDINALITY
    assert [len(y) for _, y in dataset] == [7, 7]
    assert int(whole.build().cardinality()) == 4


@pytest.mark.quick("arrays-3", "dataset-2")
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("kind", ["arrays", "dataset", "csv"])
def test_by_the_cluster_each_example_comes_once_in_an_epoch_on_one_worker(
    tmp_path, join, kind, num_workers
):
    pipeline, epochs = KINDS[kind](tmp_path), [[], []]
    for index in range(num_workers):
        join(num_workers, index)
        dataset = pipeline.shard("auto").shuffle().batch(4).build()
        for epoch in epochs:
            epoch += sum(batches_of(dataset), [])
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM))] * 2


def test_workers_whose_numbers_of_batches_would_differ_stop_before_they_wait(join):
    found = []
    for index in range(2):
        join(2, index)
        pipeline = arrays().shard("auto").batch(7, drop_remainder=True)
        found.append([len(batch) for batch in batches_of(pipeline.build())])
    # Of 27 numbers the first worker would have 14: two batches, and the other one.
    assert found == [[7], [7]]
    words = Pipeline.from_arrays(np.array(["a b", "c"])).map(tf.strings.split)
    pipeline = words.shard("auto").bucket(1, boundaries=[8], drop_remainder=True)
    with pytest.raises(ValueError, match="one with fewer batches stops all"):
        pipeline.build()


@pytest.mark.parametrize("described, trained", [(2, 1), (1, 2)])
def test_other_workers_than_those_of_the_cluster_are_refused(join, described, trained):
    join(described, 0, trained)
    with pytest.raises(ValueError, match=rf"makes {described} part.*{trained} worker"):
        arrays().shard("auto").build()
    arrays().shard("auto").describe()


PIPELINES = {
    "arrays": lambda: arrays().shuffle(seed=1),
    "balance": lambda: arrays().balance(seed=1).shuffle(seed=2),
    "by the cluster": lambda: arrays().shard("auto").shuffle(),
}


def failure_of(pipeline):
    """Returns the text of what `build` raises."""
    try:
        pipeline.batch(8).build()
    except ValueError as error:
        return str(error)
    return None


def main(out):
    """Runs the cases in turn: a process can make the strategy once."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    results = {"errors": [failure_of(arrays().shuffle())]}
    for name, make in PIPELINES.items():
        dataset = make().batch(8).build()
        distributed = strategy.experimental_distribute_dataset(dataset)
        results[name] = [epoch_of(strategy, distributed) for _ in range(2)]
    with open(out, "w") as file:
        json.dump(results, file)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each of the two workers wrote; they run once for all tests."""
    return run_workers(tmp_path_factory.mktemp("workers"), "tests.data_distribute_test")


def epochs(outcomes, case):
    """Returns, epoch by epoch, the steps of both workers."""
    return list(zip(*(outcome[case] for outcome in outcomes), strict=True))


slow = pytest.mark.slow("test_by_the_cluster_... has the parts of each worker")


@slow
@pytest.mark.parametrize("case", ["arrays", "by the cluster"])
def test_each_element_comes_once_on_one_of_the_workers(outcomes, case):
    for first, second in epochs(outcomes, case):
        assert sorted(flat(first) + flat(second)) == list(range(NUM))
        assert len(first) == len(second)
        for one, other in zip(sizes(first)[:3], sizes(second)[:3], strict=True):
            assert sum(one) == sum(other) == 4


@slow
def test_both_workers_draw_the_same_balance(outcomes):
    for first, second in epochs(outcomes, "balance"):
        numbers = collections.Counter(flat(first) + flat(second))
        rare = {n: many for n, many in numbers.items() if LABELS[n]}
        assert sum(rare.values()) in (13, 14)  # half of 27
        # Of 24 frequent ones 13 or 14 come, each once; 3 rare ones share their half.
        assert all(many == 1 for n, many in numbers.items() if not LABELS[n])
        assert max(rare.values()) - min(rare.values()) <= 1


@slow
def test_orders_of_their_own_are_refused(outcomes):
    for outcome in outcomes:
        (text,) = outcome["errors"]
        assert text.startswith("`.shuffle` has no seed, and 2 worker processes train")


if __name__ == "__main__":
    main(*sys.argv[1:])
