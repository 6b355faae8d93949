"""Simulated allocators: sums made by hand, and the real C library beside one."""

import json
import platform
import subprocess
import sys

import pytest

from tfamp.memory.heaps import BestFit, Glibc, GlibcSettings

KIB, MIB = 2**10, 2**20


def allocated(heap, *sizes):
    return [heap.allocate(size) for size in sizes]


# TensorFlow's own

HALF_A_MIB, SMALL = MIB // 2, 100 * KIB
# Blocks, those that are freed, further blocks, and the bytes that the heap then shows.
BEST_FIT = {
    "what is freed stays": ([4 * MIB, 4 * MIB], [0, 1], [], 8 * MIB),
    "it is used again": ([4 * MIB, 4 * MIB], [0, 1], [4 * MIB, 4 * MIB], 8 * MIB),
    # The last is as large as the first one, so in its place: of 512 KiB and a byte
    # from the begin of a page on.
    "blocks are multiples of 256 bytes": (
        [256 * KIB + 1, 256 * KIB],
        [0],
        [256 * KIB + 200],
        129 * 4 * KIB,
    ),
    # A region of 4 MiB for each, and one of 8 then.
    "regions do not become one": ([4 * MIB, 4 * MIB], [0, 1], [8 * MIB], 16 * MIB),
    # The first fills a region of 2 MiB; the next has 4.
    "neighbours become one": ([2 * MIB, MIB, MIB], [1, 2], [2 * MIB], 4 * MIB),
    # 1.5 of 2 MiB: the rest is not split off, so the next goes to another region.
    "less than twice is given as a whole": (
        [2 * MIB],
        [0],
        [3 * HALF_A_MIB, HALF_A_MIB],
        5 * HALF_A_MIB,
    ),
    "the smallest that fits is taken": (
        [MIB, HALF_A_MIB, HALF_A_MIB, HALF_A_MIB],
        [0, 2],
        [HALF_A_MIB, MIB],
        5 * HALF_A_MIB,
    ),
    "small blocks are the C library's": ([SMALL] * 10, [], [], 10 * SMALL),
    "they are given back": ([SMALL] * 10, range(10), [], 0),
}


@pytest.mark.parametrize(
    "first, freed, then, expected", BEST_FIT.values(), ids=BEST_FIT
)
def test_blocks_of_the_best_fit_are_those_by_hand(first, freed, then, expected):
    heap = BestFit()
    blocks = allocated(heap, *first)
    for number in freed:
        heap.free(blocks[number])
    allocated(heap, *then)
    assert heap.resident_bytes == expected


# glibc


def test_the_threshold_grows_with_the_blocks_freed_up_to_a_limit():
    heap = Glibc()
    for size in (MIB, 4 * MIB, 2 * MIB, 40 * MIB):
        heap.free(heap.allocate(size))
    # 4 MiB and a page for the header. What is larger than 32 MiB changes nothing.
    assert heap.mmap_threshold == 4 * MIB + 4 * KIB
    assert heap.trim_threshold == 2 * heap.mmap_threshold


def test_a_threshold_that_is_set_stays():
    heap = Glibc(GlibcSettings(64 * KIB, 64 * KIB, is_fixed=True))
    for block in allocated(heap, *[MIB] * 8):
        heap.free(block)
    assert (heap.mmap_threshold, heap.resident_bytes) == (64 * KIB, 0)


def raised(num_arenas=1):
    """A heap that takes blocks below 8 MiB from its arenas."""
    heap = Glibc(num_arenas=num_arenas)
    heap.free(heap.allocate(8 * MIB - 64))
    assert heap.mmap_threshold == 8 * MIB
    return heap


def near(heap, expected):
    """Whether a heap has a size, but for headers and pages that blocks share."""
    return abs(heap.resident_bytes - expected) <= 64 * KIB


def test_free_blocks_below_one_in_use_stay():
    heap = raised()
    blocks = allocated(heap, *[MIB] * 20)
    for block in blocks[:-1]:
        heap.free(block)
    assert near(heap, 20 * MIB)
    # A larger one fits into what they became.
    allocated(heap, 6 * MIB)
    assert near(heap, 20 * MIB)
    heap.free(blocks[-1])
    # Now 14 MiB are the top, less than the 16 at which some is given back.
    assert near(heap, 20 * MIB)


def test_the_top_is_given_back_when_it_is_large():
    heap = raised()
    for block in allocated(heap, *[MIB] * 20):
        heap.free(block)
    # At 16 MiB it was cut down to the 128 KiB of padding; 4 more blocks came after,
    # which were freed before: freed from the front, all went at the last.
    assert heap.resident_bytes <= 16 * MIB


def test_arenas_do_not_share_what_is_free():
    heap = raised(num_arenas=2)
    first = [heap.allocate(MIB, thread=0) for _ in range(8)]
    for block in first:
        heap.free(block)
    for _ in range(8):
        heap.allocate(MIB, thread=1)
    assert near(heap, 16 * MIB)


def test_an_arena_beside_the_main_one_goes_on_in_further_heaps():
    heap = raised(num_arenas=2)
    # 64 MiB a heap: 9 of 7 MiB fit into one.
    blocks = [heap.allocate(7 * MIB, thread=1) for _ in range(20)]
    assert near(heap, 140 * MIB)
    for block in reversed(blocks):
        heap.free(block)
    # The later heaps are gone, of the first less than 16 MiB are left.
    assert heap.resident_bytes <= 16 * MIB


PROGRAM = """
import ctypes, json
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
MIB = 2**20

def resident():
    text = open("/proc/self/status").read()
    return 1024 * int(text.split("VmRSS:")[1].split()[0])

def block(size):
    address = libc.malloc(size)
    libc.memset(address, 1, size)
    return address

resident()
start, found = resident(), []
libc.free(block(8 * MIB))
found.append(resident() - start)
blocks = [block(MIB) for _ in range(40)]
found.append(resident() - start)
for each in blocks[:-1]:
    libc.free(each)
found.append(resident() - start)
large = block(6 * MIB)
found.append(resident() - start)
libc.free(blocks[-1])
found.append(resident() - start)
libc.free(large)
found.append(resident() - start)
print(json.dumps(found))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc",
    reason="the C library is not glibc",
)
def test_the_simulation_shows_what_glibc_does():
    plain = {"PATH": "/usr/bin"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=plain, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    heap, expected = Glibc(), []
    heap.free(heap.allocate(8 * MIB))
    expected.append(heap.resident_bytes)
    blocks = allocated(heap, *[MIB] * 40)
    expected.append(heap.resident_bytes)
    for block in blocks[:-1]:
        heap.free(block)
    expected.append(heap.resident_bytes)
    (large,) = allocated(heap, 6 * MIB)
    expected.append(heap.resident_bytes)
    heap.free(blocks[-1])
    expected.append(heap.resident_bytes)
    heap.free(large)
    expected.append(heap.resident_bytes)
    # The program's own ups and downs.
    assert json.loads(run.stdout) == pytest.approx(expected, abs=MIB)
