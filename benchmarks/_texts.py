"""Figures of benchmarks as text."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Result = dict[str, Any]


def versions_of(result: Result) -> str:
    """Returns the versions in one line."""
    return ", ".join(f"{k} {v}" for k, v in result["versions"].items() if k != "numpy")


def interval_text(found: Result, digits: int = 3) -> str:
    """Returns a ratio with its interval."""
    return ratio_text([found["ratio"], *found["interval"]], digits=digits)


def ratio_text(interval: Sequence[Any] | None, other: str = "", digits: int = 2) -> str:
    """Returns a ratio with its interval, or another text where there is none."""
    if interval is None:
        return other
    middle, low, high = interval
    if low is None or high is None:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def range_text(values: Iterable[float]) -> str:
    """Returns the smallest and the largest value, or the one that both are."""
    low, *_, high = (f"{value:.2f}" for value in sorted(values) * 2)
    return low if low == high else f"{low} to {high}"


def missed(*met: bool) -> str:
    """Returns what stands behind a figure that misses its goal."""
    return "" if all(met) else ", missed"


def mebibytes(num_bytes: int) -> str:
    """Returns bytes in MiB."""
    return f"{num_bytes / 2**20:,.0f} MiB"


def by_policy(result: Result) -> Iterator[tuple[str, str, Any]]:
    """Yields case, policy and figures of results that are kept so."""
    for case, policies in result["cases"].items():
        for policy, found in policies.items():
            if isinstance(found, dict):
                yield case, policy, found
