"""Two worker processes see each element of a pipeline once in an epoch.

As a program, `python -m tests.data_workers_test OUT` with `TF_CONFIG` set, it is each
of the two, and writes what came out as JSON.
"""

import collections
import json
import sys

import pytest
import tensorflow as tf

from tests.data_distribute_test import LABELS, NUM, arrays, epoch_of, flat, sizes
from tests.multi_worker_test import run_workers

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
    return run_workers(tmp_path_factory.mktemp("workers"), "tests.data_workers_test")


def epochs(outcomes, case):
    """Returns, epoch by epoch, the steps of both workers."""
    return list(zip(*(outcome[case] for outcome in outcomes), strict=True))


@pytest.mark.parametrize("case", ["arrays", "by the cluster"])
def test_each_element_comes_once_on_one_of_the_workers(outcomes, case):
    for first, second in epochs(outcomes, case):
        assert sorted(flat(first) + flat(second)) == list(range(NUM))
        assert len(first) == len(second)
        for one, other in zip(sizes(first)[:3], sizes(second)[:3], strict=True):
            assert sum(one) == sum(other) == 4


def test_both_workers_draw_the_same_balance(outcomes):
    for first, second in epochs(outcomes, "balance"):
        numbers = collections.Counter(flat(first) + flat(second))
        rare = {n: many for n, many in numbers.items() if LABELS[n]}
        assert sum(rare.values()) in (13, 14)  # half of 27
        # Of 24 frequent ones 13 or 14 come, each once; 3 rare ones share their half.
        assert all(many == 1 for n, many in numbers.items() if not LABELS[n])
        assert max(rare.values()) - min(rare.values()) <= 1


def test_orders_of_their_own_are_refused(outcomes):
    for outcome in outcomes:
        (text,) = outcome["errors"]
        assert text.startswith("`.shuffle` has no seed, and 2 worker processes train")


if __name__ == "__main__":
    main(*sys.argv[1:])
