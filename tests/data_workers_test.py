"""Two worker processes see each element of a pipeline once in an epoch."""

import collections

import pytest

from tests.data_distribute_test import LABELS, NUM, flat, sizes, write_records
from tests.multi_worker_test import run_workers

EVERY = list(range(NUM))
EXPECTED = {
    "arrays": EVERY,
    "shard by the cluster": EVERY,
}
# The workers run what the chosen tests ask for: a second or two for each.
IN_SHORT = ("arrays", "balance", "errors")
slow = pytest.mark.slow("arrays show how a batch is divided; others take the time")


def cases(*names):
    """Gives a test its `case`: those that are not in short runs are marked."""
    marks = {name: () if name in IN_SHORT else (slow,) for name in names}
    params = [pytest.param(name, marks=marks[name]) for name in names]
    return pytest.mark.parametrize("case", params)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """What each of the two workers wrote; they run once for all tests."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = sorted({item.callspec.params["case"] for item in items})
    folder = tmp_path_factory.mktemp("workers")
    (folder / "data").mkdir()
    data = write_records(folder / "data")
    return run_workers(folder, "tests.data_worker_program", str(data), *asked)


def epochs(outcomes, case):
    """Returns, epoch by epoch, the steps of both workers."""
    return list(zip(*(outcome[case] for outcome in outcomes), strict=True))


@cases(*EXPECTED)
def test_each_element_comes_once_on_one_of_the_workers(outcomes, case):
    for first, second in epochs(outcomes, case):
        assert sorted(flat(first) + flat(second)) == EXPECTED[case]
        assert len(first) == len(second)


@cases("arrays", "shard by the cluster")
def test_a_step_takes_the_global_batch(outcomes, case):
    for first, second in epochs(outcomes, case):
        for one, other in zip(sizes(first)[:3], sizes(second)[:3], strict=True):
            assert sum(one) == sum(other) == 4


@cases("balance")
def test_both_workers_draw_the_same_balance(outcomes, case):
    for first, second in epochs(outcomes, case):
        numbers = collections.Counter(flat(first) + flat(second))
        assert sum(numbers.values()) == NUM
        rare = {n: many for n, many in numbers.items() if LABELS[n]}
        assert sum(rare.values()) in (13, 14)  # half of 27
        # Of 24 frequent ones 13 or 14 come, each once; 3 rare ones share their half.
        assert all(many == 1 for n, many in numbers.items() if not LABELS[n])
        assert max(rare.values()) - min(rare.values()) <= 1


@cases("errors")
def test_orders_of_their_own_are_refused(outcomes, case):
    for outcome in outcomes:
        for stage in ("shuffle", "balance", "weights"):
            name, text = outcome[case][stage]
            assert name == "ValueError"
            start = f"`.{stage}` has no seed, and 2 worker processes train"
            assert text.startswith(start)
