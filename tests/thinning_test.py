"""A thinned run has cases of every test: the first and the last, or one of them."""

import pytest

from tests.thinning import chosen

NAMES = [*(f"x::many[{i}]" for i in range(10)), "x::one", "x::two[a]", "x::two[b-[c]]"]


def test_all_run_where_nothing_is_thinned():
    assert chosen(NAMES, 0) == NAMES


def test_a_test_may_have_a_limit_of_its_own():
    found = chosen(NAMES, 3, {"x::many": 2, "x::two": 0})
    assert found == ["x::many[0]", "x::many[9]", "x::one", "x::two[a]", "x::two[b-[c]]"]
    assert len(chosen(NAMES, 0, {"x::many": 99})) == len(NAMES)


@pytest.mark.parametrize(
    "most, many", [(1, [2]), (2, [0, 9]), (3, [0, 4, 9]), (4, [0, 3, 6, 9])]
)
def test_cases_lie_evenly_and_every_test_has_one(most, many):
    found = chosen(NAMES, most)
    assert [name for name in found if "many" in name] == [f"x::many[{i}]" for i in many]
    assert "x::one" in found
    assert sum("two" in name for name in found) == min(2, most)
    assert found == [name for name in NAMES if name in found]
