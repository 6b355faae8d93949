"""`Pipeline.shard("auto")`: the cluster says how many parts there are, and which."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests.data_distribute_test import KINDS, NUM, arrays, inputs_of
from tests.refusals import refusals
from tfamp.data import Pipeline
from tfamp.data.stages import workers

VARIABLES = ("TF_CONFIG", "SLURM_JOB_ID")


@pytest.fixture
def join(monkeypatch):
    """Makes this process a worker, and TensorFlow one of as many."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def join(num_workers, index, num_trained=None):
        hosts = [f"host{worker}:2222" for worker in range(num_workers)]
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": hosts}, "task": task}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        monkeypatch.setattr(workers, "num_workers", lambda: num_trained or num_workers)

    return join


def epoch_of(dataset):
    """Returns the numbers of each batch."""
    return [np.ravel(inputs_of(batch)).tolist() for batch in dataset]


def told(pipeline):
    """Returns what `describe` says, without its line breaks."""
    return " ".join(pipeline.describe().split())


@pytest.mark.quick("arrays-3", "dataset-2")
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("kind", ["arrays", "dataset", "csv"])
def test_each_example_comes_once_in_an_epoch_on_one_worker(
    tmp_path, join, kind, num_workers
):
    pipeline, epochs = KINDS[kind](tmp_path), [[], []]
    for index in range(num_workers):
        join(num_workers, index)
        # Without a seed each has an order of its own.
        dataset = pipeline.shard("auto").shuffle().batch(4).build()
        for epoch in epochs:
            epoch += sum(epoch_of(dataset), [])
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM))] * 2


def test_buckets_without_remainder_are_refused_for_several_workers(join):
    texts = np.array(["a b", "c", "d e f"] * 8)
    words = Pipeline.from_arrays(texts).map(lambda text: tf.strings.split(text))
    pipeline = words.shard("auto").bucket(2, boundaries=[8], drop_remainder=True)
    join(1, 0)
    assert len(list(pipeline.build())) == 12
    join(2, 0)
    pipeline = words.shard("auto").bucket(2, boundaries=[8], drop_remainder=True)
    with pytest.raises(ValueError, match="one with fewer batches stops all"):
        pipeline.build()


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_batches_without_remainder_are_as_many_on_each_worker(join, kind):
    pipeline = KINDS[kind](None).shard("auto").batch(7, drop_remainder=True)
    found = []
    for index in range(2):
        join(2, index)
        pipeline = KINDS[kind](None).shard("auto").batch(7, drop_remainder=True)
        found.append(epoch_of(pipeline.build()))
        assert "the rest dropped" in told(pipeline)
    # Of 27 numbers the first worker would have 14: two batches, and the other one.
    assert [[len(batch) for batch in epoch] for epoch in found] == [[7], [7]]


@pytest.mark.parametrize("described, trained", [(2, 1), (1, 2)])
def test_other_workers_than_those_of_the_cluster_are_refused(join, described, trained):
    join(described, 0, trained)
    pipeline = arrays().shard("auto")
    message = (
        rf"`\.shard\('auto'\)` makes {described} part\(s\), as TF_CONFIG says, and "
        rf"TensorFlow trains with {trained} worker\(s\).*`tfamp.distribute.strategy"
    )
    with pytest.raises(ValueError, match=message):
        pipeline.build()
    pipeline.describe()


def test_one_process_has_all_elements(join):
    pipeline = arrays().shard("auto")
    text = "auto, by no cluster, so all elements"
    assert text in told(pipeline)
    assert [int(x) for x, _ in pipeline.build()] == list(range(NUM))


WRONG = {"no index": ((2,), "`index` is None", TypeError)}
test_wrong_arguments_are_refused = refusals(WRONG, lambda row: arrays().shard(*row))
