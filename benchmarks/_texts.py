"""What the tables and the summary of benchmarks write figures as."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Result = dict[str, Any]
Rows = list[list[str]]
# Benchmark -> columns of its table, and what makes rows of a result.
Tables = dict[str, tuple[tuple[str, ...], Callable[[Result], Rows]]]


def versions_of(result: Result) -> str:
    """Returns the versions in one line."""
    return ", ".join(f"{k} {v}" for k, v in result["versions"].items() if k != "numpy")


def interval_text(found: Result, digits: int = 3) -> str:
    """Returns a ratio with its interval."""
    low, high = found["interval"]
    return f"{found['ratio']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def ratio_text(interval: Sequence[Any] | None, other: str = "") -> str:
    """Returns a ratio with its interval, or another text where there is none."""
    if interval is None:
        return other
    middle, low, high = interval
    if low is None or high is None:
        return f"{middle:.2f}"
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def range_text(values: Iterable[float], digits: int = 2) -> str:
    """Returns the smallest and the largest value, or the one that both are."""
    low, *_, high = sorted(values) * 2
    text = f"{low:.{digits}f}"
    return text if text == f"{high:.{digits}f}" else f"{text} to {high:.{digits}f}"


def missed(*met: bool) -> str:
    """Returns what stands behind a figure that misses its goal."""
    return "" if all(met) else ", missed"


def mebibytes(num_bytes: int) -> str:
    """Returns bytes in MiB."""
    return f"{num_bytes / 2**20:,.0f} MiB"


def by_policy(result: Result) -> Iterable[tuple[str, str, Any]]:
    """Yields case, policy and figures of results that are kept so."""
    for case, policies in result["cases"].items():
        for policy, found in policies.items():
            yield case, policy, found
