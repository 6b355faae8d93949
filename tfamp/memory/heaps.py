"""Allocators, simulated: TensorFlow's with oneDNN, and the GNU C library's.

The one finds the best fit and gives nothing back, the other gives back what lies at
the end of an arena, and mappings.

Source: TensorFlow 2.21, tensorflow/core/common_runtime/mkl_cpu_allocator.h and
xla/tsl/framework/bfc_allocator.cc; glibc 2.36, malloc/malloc.c and malloc/arena.c;
man 3 mallopt, 2026-11-23.
"""

import bisect
import dataclasses

PAGE = 4096
# Smaller blocks come from the C library.
MIN_BYTES = 2**18
_REGION_ALIGNMENT = 256
_FIRST_REGION = 2**21
# A larger rest is split off even from a block less than twice the size.
_MAX_WASTE = 2**27
_KIB, _MIB = 2**10, 2**20
# A block's header, and its alignment with that of TensorFlow's tensors.
_HEADER, _ALIGNMENT = 16, 64
_MAX_MMAP_THRESHOLD = 32 * _MIB
# Of an arena beside the main one; a block larger than it gets a mapping of its own.
_MAX_HEAP = 64 * _MIB
# Smaller blocks are freed without a look at what could be given back.
_MIN_TRIM = 64 * _KIB


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


class BestFit:
    """Blocks in regions, each twice the size of the last."""

    def __init__(self) -> None:
        self._free, self._pages = FreeRanges(), Pages()
        self._region_bytes, self._end = _FIRST_REGION, 0
        self._small = 0

    @property
    def resident_bytes(self) -> int:
        """What the process shows of it."""
        return self._pages.num_bytes + self._small

    def allocate(self, num_bytes: int, thread: int = 0) -> tuple[int, int]:
        """Returns where a new block begins and ends, wherever it is asked for."""
        if num_bytes < MIN_BYTES:
            self._small += num_bytes
            return -num_bytes, 0
        size = -(-num_bytes // _REGION_ALIGNMENT) * _REGION_ALIGNMENT
        found = self._free.take(size)
        if found is None:
            self._extend(size)
            found = self._free.take(size)
        start, end = found or (0, 0)
        rest = end - start - size
        if rest >= size or rest >= _MAX_WASTE:
            end = start + size
            self._free.give(end, end + rest)
        self._pages.write(start, start + num_bytes)
        return start, end

    def free(self, block: tuple[int, int]) -> None:
        """Frees a block; its pages stay."""
        start, end = block
        if end:
            self._free.give(start, end)
        else:
            self._small += start

    def _extend(self, size: int) -> None:
        """Adds a region that holds so much."""
        has_grown = size > self._region_bytes
        while size > self._region_bytes:
            self._region_bytes *= 2
        # Regions do not touch: blocks never reach from one into the next.
        start = self._end + PAGE
        self._end = start + self._region_bytes
        self._free.give(start, self._end)
        if not has_grown:
            self._region_bytes *= 2


@dataclasses.dataclass(frozen=True)
class GlibcSettings:
    """What the environment can set.

    Blocks of at least `mmap_threshold` bytes get a mapping of their own, where no free
    one is large enough.
    """

    mmap_threshold: int = 128 * _KIB
    trim_threshold: int = 128 * _KIB
    top_pad: int = 128 * _KIB
    is_fixed: bool = False


class Glibc:
    """Arenas of blocks, one a thread that allocates, and large blocks in mappings."""

    def __init__(
        self, settings: GlibcSettings | None = None, *, num_arenas: int = 1
    ) -> None:
        given = settings or GlibcSettings()
        self._is_fixed = given.is_fixed
        self.mmap_threshold = given.mmap_threshold
        self.trim_threshold = given.trim_threshold
        self._mapped_bytes = 0
        self._arenas = [
            _Arena(given.top_pad, None if index == 0 else _MAX_HEAP)
            for index in range(num_arenas)
        ]

    @property
    def resident_bytes(self) -> int:
        """What the process shows of it."""
        return self._mapped_bytes + sum(a.pages.num_bytes for a in self._arenas)

    def allocate(
        self, num_bytes: int, thread: int = 0
    ) -> "tuple[_Arena | None, int, int]":
        """Returns the arena, begin and end of a new block, made by one of the threads.

        It has no arena where it got a mapping.
        """
        size = -(-(num_bytes + _HEADER) // _ALIGNMENT) * _ALIGNMENT
        arena = self._arenas[thread % len(self._arenas)]
        start = arena.find(size)
        if start is None:
            if size >= self.mmap_threshold or size > arena.max_block:
                mapped = -(-size // PAGE) * PAGE
                self._mapped_bytes += mapped
                return None, 0, mapped
            start = arena.grow(size)
        arena.pages.write(start, start + size)
        return arena, start, start + size

    def free(self, block: "tuple[_Arena | None, int, int]") -> None:
        """Frees a block, and gives back what the thresholds say."""
        arena, start, end = block
        if arena is not None:
            arena.free(start, end, self.trim_threshold)
            return
        self._mapped_bytes -= end
        if not self._is_fixed and self.mmap_threshold < end <= _MAX_MMAP_THRESHOLD:
            self.mmap_threshold, self.trim_threshold = end, 2 * end


class _Arena:
    """Blocks, free ranges between them, and the top, which grows.

    It consists of heaps of `heap_bytes`; None for one without an end.
    """

    def __init__(self, top_pad: int, heap_bytes: int | None) -> None:
        self._pad, self._heap_bytes = top_pad, heap_bytes
        self.pages = Pages()
        self._free = FreeRanges()
        # Where the last heap begins, its top begins and ends; and the heaps before.
        self._begin = self._top = self._end = PAGE
        self._earlier: list[tuple[int, int]] = []

    @property
    def max_block(self) -> float:
        """The largest block that fits into a heap."""
        return float("inf") if self._heap_bytes is None else self._heap_bytes - PAGE

    def find(self, size: int) -> int | None:
        """Takes a free range, or from the top; None if both are too small."""
        found = self._free.take(size)
        if found is not None:
            start, end = found
            if end > start + size:
                self._free.give(start + size, end)
            return start
        if self._end - self._top < size:
            return None
        self._top += size
        return self._top - size

    def grow(self, size: int) -> int:
        """Takes from the top, which is moved, or from a new heap."""
        heap = self._heap_bytes
        if heap is not None and self._top + size > self._begin + heap:
            if self._end > self._top:
                self._free.give(self._top, self._end)
            self._earlier.append((self._begin, self._end))
            # Heaps do not touch.
            self._begin = self._top = self._begin + heap + PAGE
        self._end = -(-(self._top + size + self._pad) // PAGE) * PAGE
        if heap is not None:
            self._end = min(self._end, self._begin + heap)
        self._top += size
        return self._top - size

    def free(self, start: int, end: int, trim_threshold: int) -> None:
        """Frees a block; gives back from the top where it is large."""
        start, end = self._free.give(start, end)
        if end == self._top:
            self._free.take_last(end)
            self._top = start
        if end - start >= _MIN_TRIM:
            self._trim(trim_threshold)

    def _trim(self, threshold: int) -> None:
        while self._top == self._begin and self._earlier:
            # The last heap is empty: it goes, and the one before has the top.
            self.pages.give_back(self._begin, self._end)
            self._begin, self._end = self._earlier.pop()
            last = self._free.take_last(self._end)
            self._top = self._end if last is None else last[0]
        if self._end - self._top >= threshold:
            keep = -(-(self._top + self._pad) // PAGE) * PAGE
            self.pages.give_back(keep, self._end)
            self._end = keep
