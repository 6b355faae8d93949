"""Chooses a few cases of each test, for a run that must be short."""

from collections.abc import Sequence


def chosen(names: Sequence[str], most: int) -> list[str]:
    """Returns the names, at most so many cases of each test among them.

    They lie evenly from the first case to the last, as neighbours differ least.

    Args:
        names: Names as pytest gives them, "file::test[case]".
        most: Cases of each test; 0 keeps all.

    Example:
        >>> chosen(["a[1]", "a[2]", "b", "a[3]", "a[4]", "a[5]"], 3)
        ['a[1]', 'b', 'a[3]', 'a[5]']
    """
    tests: dict[str, list[str]] = {}
    for name in names:
        tests.setdefault(name.split("[")[0], []).append(name)
    kept: set[str] = set()
    for cases in tests.values():
        num = most if 0 < most < len(cases) else len(cases)
        last, gaps = len(cases) - 1, max(1, num - 1)
        kept.update(cases[round(i * last / gaps)] for i in range(num))
    return [name for name in names if name in kept]
