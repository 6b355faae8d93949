"""Addresses of simulated memory: free ranges that merge, and the pages once written."""

import bisect

PAGE = 4096


class FreeRanges:
    """Ranges of addresses that nothing holds; neighbours become one.

    Example:
        >>> free = FreeRanges()
        >>> free.give(0, 64), free.give(128, 192), free.give(64, 128)
        ((0, 64), (128, 192), (0, 192))
        >>> free.take(100), free.take(100)
        ((0, 192), None)
    """

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}

    def take(self, num_bytes: int) -> tuple[int, int] | None:
        """Takes the smallest range that holds so much, of equals the first."""
        index = bisect.bisect_left(self._by_size, (num_bytes, -1))
        if index == len(self._by_size):
            return None
        start = self._by_size[index][1]
        return self._remove(start, self._ends[start])

    def give(self, start: int, end: int) -> tuple[int, int]:
        """Puts a range among the free ones; returns what it has merged to."""
        if end in self._ends:
            _, end = self._remove(end, self._ends[end])
        if start in self._starts:
            start, _ = self._remove(self._starts[start], start)
        self._ends[start], self._starts[end] = end, start
        bisect.insort(self._by_size, (end - start, start))
        return start, end

    def take_last(self, end: int) -> tuple[int, int] | None:
        """Takes the range that ends at an address, if there is one."""
        start = self._starts.get(end)
        return None if start is None else self._remove(start, end)

    def _remove(self, start: int, end: int) -> tuple[int, int]:
        del self._ends[start], self._starts[end]
        index = bisect.bisect_left(self._by_size, (end - start, start))
        del self._by_size[index]
        return start, end


class Pages:
    """The pages that were written, which stay with the process until given back.

    Attributes:
        num_bytes: What they come to.

    Example:
        >>> pages = Pages()
        >>> pages.write(0, 3 * PAGE), pages.write(PAGE, 5 * PAGE)
        (None, None)
        >>> pages.give_back(2 * PAGE + 1, 4 * PAGE)  # page 3 as a whole
        >>> pages.num_bytes // PAGE
        4
    """

    def __init__(self) -> None:
        self._written = bytearray()
        self.num_bytes = 0

    def write(self, start: int, end: int) -> None:
        """Marks what a block covers."""
        first, last = start // PAGE, -(-end // PAGE)
        if last > len(self._written):
            self._written += bytes(last - len(self._written))
        self._set(first, last, 1)

    def give_back(self, start: int, end: int) -> None:
        """Takes the mark off the pages that lie inside."""
        first, last = -(-start // PAGE), min(end // PAGE, len(self._written))
        if last > first:
            self._set(first, last, 0)

    def _set(self, first: int, last: int, value: int) -> None:
        before = self._written.count(1, first, last)
        self._written[first:last] = bytes([value]) * (last - first)
        self.num_bytes += ((last - first) * value - before) * PAGE
