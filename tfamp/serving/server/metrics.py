"""Counts and times as Prometheus reads them.

Source: Prometheus's text-based exposition format 0.0.4.
"""

import bisect
import resource
import sys
from collections.abc import Iterable, Sequence

# Seconds: from a tenth of a millisecond, what a small model takes, to ten seconds.
SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
EXAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
Labels = tuple[str, ...]


class Number:
    """A number for each set of labels: a "counter" that grows, or a "gauge"."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], kind: str = "counter"
    ) -> None:
        self.name, self.text, self.kind, self._labels = name, text, kind, labels
        self.values: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1) -> None:
        """Adds to the number of these labels."""
        self.values[labels] = self.values.get(labels, 0) + amount

    def lines(self) -> Iterable[str]:
        """Yields a line for each set of labels."""
        for labels, value in self.values.items():
            yield f"{self.name}{_braces(self._labels, labels)} {value:g}"


class Histogram:
    """How many values lie below each of a row of bounds, for each set of labels."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        bounds: Sequence[float] = SECONDS,
    ) -> None:
        self.name, self.text, self._labels, self._bounds = name, text, labels, bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, labels: Labels, value: float) -> None:
        """Adds a value."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
        counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sums[labels] = self._sums.get(labels, 0.0) + value

    def lines(self) -> Iterable[str]:
        """Yields the buckets, the sum and the count of each set of labels."""
        names = (*self._labels, "le")
        for labels, counts in self._counts.items():
            below = 0
            bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
            for bound, count in zip(bounds, counts, strict=True):
                below += count
                yield f"{self.name}_bucket{_braces(names, (*labels, bound))} {below}"
            braces = _braces(self._labels, labels)
            yield f"{self.name}_sum{braces} {self._sums[labels]:g}"
            yield f"{self.name}_count{braces} {below}"


class Metrics:
    """All that the server counts, by model and version where it knows them."""

    def __init__(self) -> None:
        own = ("model", "version")
        self.requests = Number(
            "tfamp_requests_total",
            "Answers by protocol and HTTP status.",
            (*own, "protocol", "status"),
        )
        self.seconds = Histogram(
            "tfamp_request_seconds",
            "From the last byte of a request to its answer.",
            own,
        )
        self.waited = Histogram("tfamp_queue_seconds", "Time in the queue.", own)
        self.run = Histogram("tfamp_run_seconds", "Runs of the model.", own)
        self.examples = Histogram(
            "tfamp_batch_examples", "Examples in a run of the model.", own, EXAMPLES
        )
        self.waiting = Number(
            "tfamp_queue_requests",
            "Requests that wait or are computed.",
            own,
            kind="gauge",
        )
        self.loads = Number(
            "tfamp_loads_total",
            "Versions that were loaded, or failed to.",
            (*own, "result"),
        )
        self._memory = Number(
            "process_resident_memory_bytes",
            "Memory of the server's process.",
            (),
            kind="gauge",
        )

    def text(self) -> str:
        """Returns all of it in Prometheus's text format."""
        self._memory.values = {(): resident_bytes()}
        lines = []
        for each in vars(self).values():
            lines += [
                f"# HELP {each.name} {each.text}",
                f"# TYPE {each.name} {each.kind}",
            ]
            lines += each.lines()
        return "\n".join(lines) + "\n"


def resident_bytes() -> int:
    """Returns the memory that this process holds; its peak where that is unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _braces(names: Sequence[str], values: Labels) -> str:
    if not names:
        return ""
    pairs = zip(names, values, strict=True)
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}"


def _escaped(value: str) -> str:
    r"""Returns a label's value in which nothing ends it.

    Example:
        >>> print(_escaped('a"b'))
        a\"b
    """
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
