"""Two worker processes see each element of a pipeline once in an epoch."""

import collections

import pytest

from tests.data_distribute_test import LABELS, NUM, flat, sizes, write_records
from tests.multi_worker_test import run_workers

pytestmark = pytest.mark.slow

WHOLE = list(range(NUM))
EXPECTED = {
    "arrays": WHOLE,
    "arrays, odd batch": WHOLE,
    "records": WHOLE,
    "records, file cache": WHOLE,
    "dataset, file cache": WHOLE,
    "filter": [n for n in WHOLE if n % 3],
    "shard of arrays": WHOLE,
    "shard of records": WHOLE,
    "shard, file cache": WHOLE,
    "shard, odd batch": WHOLE,
    "shards of unequal steps": list(range(9)),
    "from a function": WHOLE,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each of the two workers wrote; they run once for all tests."""
    folder = tmp_path_factory.mktemp("workers")
    (folder / "data").mkdir()
    data = write_records(folder / "data")
    return run_workers(folder, "tests.data_worker_program", str(data))


def epochs(outcomes, case):
    """Returns, epoch by epoch, the steps of both workers."""
    return list(zip(*(outcome[case] for outcome in outcomes), strict=True))


@pytest.mark.most(4)
@pytest.mark.parametrize("case", EXPECTED)
def test_each_element_comes_once_on_one_of_the_workers(outcomes, case):
    for first, second in epochs(outcomes, case):
        assert sorted(flat(first) + flat(second)) == EXPECTED[case]
        assert len(first) == len(second)


@pytest.mark.parametrize(
    "case, batch",
    [("arrays", 8), ("records", 8), ("arrays, odd batch", 7), ("shard of arrays", 8),
     ("shard, odd batch", 7), ("from a function", 8)],
)  # fmt: skip
def test_a_step_takes_the_global_batch(outcomes, case, batch):
    for first, second in epochs(outcomes, case):
        for one, other in zip(sizes(first)[:3], sizes(second)[:3], strict=True):
            assert sum(one) + sum(other) == batch
            assert abs(sum(one) - sum(other)) <= 1


@pytest.mark.parametrize("case", ["arrays", "records", "shard of arrays"])
def test_each_epoch_has_another_order(outcomes, case):
    for outcome in outcomes:
        first, second = outcome[case]
        assert first != second


def test_without_remainder_all_workers_get_full_batches(outcomes):
    for first, second in epochs(outcomes, "arrays, no remainder"):
        assert sizes(first) == sizes(second) == [[4]] * 3
        assert max(collections.Counter(flat(first) + flat(second)).values()) == 1


def test_both_workers_draw_the_same_balance(outcomes):
    for first, second in epochs(outcomes, "balance"):
        numbers = collections.Counter(flat(first) + flat(second))
        assert sum(numbers.values()) == NUM
        rare = {n: many for n, many in numbers.items() if LABELS[n]}
        assert sum(rare.values()) in (13, 14)  # half of 27
        # Of 24 frequent ones 13 or 14 come, each once; 3 rare ones share their half.
        assert all(many == 1 for n, many in numbers.items() if not LABELS[n])
        assert max(rare.values()) - min(rare.values()) <= 1


@pytest.mark.parametrize("stage", ["shuffle", "balance", "weights"])
def test_orders_of_their_own_are_refused(outcomes, stage):
    for outcome in outcomes:
        name, text = outcome["errors"][stage]
        assert name == "ValueError"
        assert text.startswith(f"`.{stage}` has no seed, and 2 worker processes train")


@pytest.mark.parametrize("case", ["shuffled", "shard"])
def test_fit_sees_each_example_once(outcomes, case):
    for outcome in outcomes:
        # The mean of 0, 2, ..., 52; sums of such numbers are exact in float32.
        assert outcome["fit"][case] == [26.0, 26.0]


@pytest.mark.parametrize(
    "case", ["shards of unequal steps", "part of a batch on one worker"]
)
def test_fit_counts_no_more_where_a_worker_has_no_more(outcomes, case):
    for outcome in outcomes:
        mean = 2 * sum(outcome["subset"]) / 25
        assert outcome["fit"][case] == pytest.approx([mean, mean], rel=4 * 2**-23)
