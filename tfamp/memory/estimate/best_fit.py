"""TensorFlow's allocator with oneDNN, simulated: best fit, and nothing given back.

Source: TensorFlow 2.21, tensorflow/core/common_runtime/mkl_cpu_allocator.h and
xla/tsl/framework/bfc_allocator.cc, 2026-11-23.
"""

from tfamp.memory.estimate.addresses import PAGE, FreeRanges, Pages

# Smaller blocks come from the C library.
MIN_BYTES = 2**18
_ALIGNMENT = 256
_FIRST_REGION = 2**21
# A larger rest is split off even from a block less than twice the size.
_MAX_WASTE = 2**27


class BestFit:
    """Blocks in regions, each twice the size of the last.

    Attributes:
        resident_bytes: Pages that were ever written, and the small blocks in use.

    Example:
        >>> heap = BestFit()
        >>> first, second = heap.allocate(2**20), heap.allocate(2**20)
        >>> heap.free(first)
        >>> third = heap.allocate(2**19)  # in the place of the first
        >>> heap.resident_bytes // 2**20
        2
    """

    def __init__(self) -> None:
        self._free, self._pages = FreeRanges(), Pages()
        self._region_bytes, self._end = _FIRST_REGION, 0
        self._blocks: dict[int, tuple[int, int]] = {}
        self._number = self._small = 0

    @property
    def resident_bytes(self) -> int:
        """What the process shows of it."""
        return self._pages.num_bytes + self._small

    def allocate(self, num_bytes: int, thread: int = 0) -> int:
        """Returns the number of a new block, wherever it is asked for."""
        self._number += 1
        if num_bytes < MIN_BYTES:
            self._blocks[self._number] = (-num_bytes, 0)
            self._small += num_bytes
            return self._number
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        found = self._free.take(size)
        if found is None:
            self._extend(size)
            found = self._free.take(size)
        start, end = found or (0, 0)
        rest = end - start - size
        if rest >= size or rest >= _MAX_WASTE:
            end = start + size
            self._free.give(end, end + rest)
        self._blocks[self._number] = start, end
        self._pages.write(start, start + num_bytes)
        return self._number

    def free(self, block: int) -> None:
        """Frees a block; its pages stay."""
        start, end = self._blocks.pop(block)
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
