"""How often each value occurs: exact while there are few, with a bound after that."""

import collections
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np

# Above as many distinct values of one feature, counting is approximate.
MAX_DISTINCT = 10_000


class Counts:
    """The most frequent values of a stream, by a Misra-Gries summary.

    All values are counted until there are more than `max_distinct`. From then on
    the rarest are let go, and all others lose as many counts as the largest of
    those had: a count is too low by at most `error`, which is at most
    1 / `max_distinct` of the stream.

    Args:
        max_distinct: Values that are kept.

    Attributes:
        error: By how much a count may be too low; 0 while counts are exact.

    Example:
        >>> counts = Counts(max_distinct=2)
        >>> counts.add(["a", "b", "a", "c", "a"])
        >>> counts.most_common(), counts.error
        ([('a', 2)], 1)

    Source: Misra and Gries, Finding Repeated Elements, 1982; merging: Agarwal et
        al., Mergeable Summaries, 2012, section 2.
    """

    def __init__(self, max_distinct: int = MAX_DISTINCT) -> None:
        self.max_distinct = max_distinct
        self.error = 0
        self._counts: collections.Counter[Any] = collections.Counter()

    def add(self, values: Iterable[Hashable] | Mapping[Any, int]) -> None:
        """Counts values, or merges how often each occurs."""
        self._counts.update(values)
        if len(self._counts) > self.max_distinct:
            order = sorted(self._counts.values(), reverse=True)
            taken = order[self.max_distinct]
            self.error += taken
            self._counts = collections.Counter(
                {v: n - taken for v, n in self._counts.items() if n > taken}
            )

    def add_counted(self, values: np.ndarray, counts: np.ndarray) -> None:
        """Counts distinct values of which each occurs `counts` times."""
        if len(values) > self.max_distinct:
            # The same letting go as in `add`, before the slow part.
            place = len(counts) - 1 - self.max_distinct
            taken = int(np.partition(counts, place)[place])
            self.error += taken
            values, counts = values[counts > taken], counts[counts > taken] - taken
        self.add(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def distinct(self) -> int | None:
        """Returns how many values there are, None once some were let go."""
        return None if self.error else len(self._counts)

    def most_common(self, num: int | None = None) -> list[tuple[Any, int]]:
        """Returns values and counts, the largest first, ties by value."""
        items = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        return items[:num]

    def mode(self) -> tuple[Any, int] | None:
        """Returns the most frequent value and its count, None if that's open.

        With equal counts it is the smallest value. Once values were let go, the
        first is certain if no other could have reached it.
        """
        first = self.most_common(2)
        if not first:
            return None
        others = first[1][1] if len(first) > 1 else 0
        certain = not self.error or first[0][1] > others + self.error
        return first[0] if certain else None
