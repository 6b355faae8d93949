"""The GNU C library's allocator, simulated: what it keeps of what is freed.

Source: glibc 2.36, malloc/malloc.c and malloc/arena.c; man 3 mallopt, 2026-11-23.
"""

import dataclasses

from tfamp.memory.estimate.addresses import PAGE, FreeRanges, Pages

_KIB, _MIB = 2**10, 2**20
# A block's header, and its alignment with that of TensorFlow's tensors.
_HEADER, _ALIGNMENT = 16, 64
_MAX_MMAP_THRESHOLD = 32 * _MIB
# Of an arena beside the main one; a block larger than it gets a mapping of its own.
_MAX_HEAP = 64 * _MIB
# Smaller blocks are freed without a look at what could be given back.
_MIN_TRIM = 64 * _KIB


@dataclasses.dataclass(frozen=True)
class GlibcSettings:
    """What the environment can set.

    Args:
        mmap_threshold: Blocks of at least so many bytes get a mapping of their own,
            where no free one is large enough.
        trim_threshold: So much at the end of an arena is given back.
        top_pad: What is taken beyond what is needed, and left when giving back.
        is_fixed: Whether both thresholds stay; else they grow with the blocks freed.
    """

    mmap_threshold: int = 128 * _KIB
    trim_threshold: int = 128 * _KIB
    top_pad: int = 128 * _KIB
    is_fixed: bool = False


class Glibc:
    """Arenas of blocks, and large blocks in mappings of their own.

    Args:
        settings: The thresholds.
        num_arenas: Threads that allocate, each in an arena of its own; the first is the
            main one.

    Attributes:
        mmap_threshold: The present one.
        resident_bytes: Pages that are written and not given back.

    Example:
        >>> heap = Glibc()
        >>> block = heap.allocate(2**20)  # a mapping of its own
        >>> heap.free(block)
        >>> heap.resident_bytes, heap.mmap_threshold // 2**20
        (0, 1)
    """

    def __init__(
        self, settings: GlibcSettings | None = None, *, num_arenas: int = 1
    ) -> None:
        given = settings or GlibcSettings()
        self._is_fixed = given.is_fixed
        self.mmap_threshold = given.mmap_threshold
        self.trim_threshold = given.trim_threshold
        self._mapped: dict[int, int] = {}
        self._mapped_bytes = self._number = 0
        self._blocks: dict[int, tuple[_Arena, int, int]] = {}
        self._arenas = [
            _Arena(given.top_pad, None if index == 0 else _MAX_HEAP)
            for index in range(num_arenas)
        ]

    @property
    def resident_bytes(self) -> int:
        """What the process shows of it."""
        return self._mapped_bytes + sum(a.pages.num_bytes for a in self._arenas)

    def allocate(self, num_bytes: int, thread: int = 0) -> int:
        """Returns the number of a new block, made by one of the threads."""
        self._number += 1
        size = -(-(num_bytes + _HEADER) // _ALIGNMENT) * _ALIGNMENT
        arena = self._arenas[thread % len(self._arenas)]
        start = arena.find(size)
        if start is None:
            if size >= self.mmap_threshold or size > arena.max_block:
                mapped = -(-size // PAGE) * PAGE
                self._mapped[self._number] = mapped
                self._mapped_bytes += mapped
                return self._number
            start = arena.grow(size)
        arena.pages.write(start, start + size)
        self._blocks[self._number] = arena, start, start + size
        return self._number

    def free(self, block: int) -> None:
        """Frees a block, and gives back what the thresholds say."""
        mapped = self._mapped.pop(block, None)
        if mapped is None:
            arena, start, end = self._blocks.pop(block)
            arena.free(start, end, self.trim_threshold)
            return
        self._mapped_bytes -= mapped
        if not self._is_fixed and self.mmap_threshold < mapped <= _MAX_MMAP_THRESHOLD:
            self.mmap_threshold, self.trim_threshold = mapped, 2 * mapped


class _Arena:
    """Blocks, free ranges between them, and the top, which grows.

    Args:
        top_pad: As in the settings.
        heap_bytes: Size of the heaps it consists of; None for one without an end.
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
