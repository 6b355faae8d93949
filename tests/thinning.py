"""Chooses a few cases of each test, for a run that must be short."""

import zlib
from collections.abc import Mapping, Sequence


def test_of(name: str) -> str:
    """Returns the test that a case is of, by the names that pytest gives them."""
    return name.split("[")[0]


def chosen(
    names: Sequence[str], most: int, own: Mapping[str, int] | None = None
) -> list[str]:
    """Returns the names, at most so many cases of each test among them.

    They lie evenly from the first case to the last, as neighbours differ least. Where
    a test has one case alone, it is the first of some, the last or a middle one of
    others, by their names: so graph and eager, float32 and half all run.

    Args:
        names: Names as pytest gives them, "file::test[case]".
        most: Cases of each test; 0 keeps all.
        own: Fewer for some tests, by name; 0 says nothing.

    Example:
        >>> chosen(["a[1]", "a[2]", "b", "a[3]", "a[4]", "a[5]"], 3)
        ['a[1]', 'b', 'a[3]', 'a[5]']
        >>> chosen(["fit[graph]", "fit[eager]", "loop[graph]", "loop[eager]"], 1)
        ['fit[eager]', 'loop[graph]']
    """
    tests: dict[str, list[str]] = {}
    for name in names:
        tests.setdefault(test_of(name), []).append(name)
    kept: set[str] = set()
    for test, cases in tests.items():
        limits = (most, (own or {}).get(test, 0), len(cases))
        num = min(limit for limit in limits if limit > 0)
        last, gaps = len(cases) - 1, max(1, num - 1)
        first = zlib.crc32(test.encode()) % len(cases) if num == 1 else 0
        kept.update(cases[first + round(i * last / gaps)] for i in range(num))
    return [name for name in names if name in kept]
