"""How large a process will be on a CPU, by the allocator in force.

What a step takes and frees goes through a simulation of that allocator. Beside it
stand what the process holds by now and what TensorFlow takes to run a graph.
"""

import ctypes
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.graph.liveness import Change, changes
from tfamp.graph.schedules import Schedule, Step
from tfamp.keras_hooks.optimizers import optimizers_of
from tfamp.keras_hooks.structure import num_bytes
from tfamp.machine import memory as process_memory
from tfamp.machine.memory import (
    GLIBC,
    TENSORFLOW,
    host_allocator,
    host_bytes,
)
from tfamp.memory.heaps import BestFit, Glibc, GlibcSettings

# Enough for the blocks to find their places: later steps add less than 1 %.
_STEPS = 2
_KIB, _MIB = 2**10, 2**20
# What running a graph takes beside its tensors: code and threads, its functions and
# kernels, and what oneDNN compiles for a convolution and its gradients. Fitted to the
# models of benchmarks/memory.py at a batch of 8, where tensors are few.
_RUNTIME_BYTES = 60 * _MIB
_BYTES_PER_OPERATION = 6 * _KIB
_BYTES_PER_CONVOLUTION = 1500 * _KIB
_CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2dNative")


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a prediction starts from.

    Args:
        process_bytes: Resident size of the process now; None where it is not told.
        reusable_bytes: What of it is free for tensors.
    """

    allocator: str
    process_bytes: int | None = None
    reusable_bytes: int = 0
    num_threads: int = 1
    settings: GlibcSettings = dataclasses.field(default_factory=GlibcSettings)


def surroundings(*, in_xla: bool = False) -> Surroundings:
    """Looks at this process."""
    if tf.config.get_visible_devices("GPU"):
        return Surroundings("none: the model computes on a GPU")
    if in_xla:
        return Surroundings("none: what XLA takes to compile is not known")
    allocator = host_allocator()
    if allocator not in (TENSORFLOW, GLIBC):
        return Surroundings(f"none: what {allocator} keeps is not known")
    try:
        now = process_memory.process_bytes()
    except ImportError:
        return Surroundings("none: psutil, which tells sizes here, is not installed")
    if allocator == TENSORFLOW:
        current, peak = host_bytes()
        reusable = peak - current
    else:
        reusable = _free_in_glibc()
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    return Surroundings(
        allocator,
        now,
        reusable,
        threads or os.cpu_count() or 1,
        glibc_settings(os.environ),
    )


def glibc_settings(environ: Mapping[str, str]) -> GlibcSettings:
    """Returns the thresholds that environment variables set.

    Any of them switches off that thresholds grow. Source: man 3 mallopt, 2026-11-23.
    """
    tunables = dict(
        each.partition("=")[::2]
        for each in environ.get("GLIBC_TUNABLES", "").split(":")
    )
    found = {}
    for name in ("mmap_threshold", "trim_threshold", "top_pad"):
        text = tunables.get(f"glibc.malloc.{name}")
        text = text or environ.get(f"MALLOC_{name.upper()}_", "")
        try:
            found[name] = int(text, 0)
        except ValueError:
            continue  # glibc ignores it too
    return GlibcSettings(**found, is_fixed=bool(found))


def resident_curve(
    model: keras.Model,
    around: Surroundings,
    schedules: Mapping[int, Schedule],
    input_bytes: float,
    *,
    training: bool,
    emulated: frozenset[str],
) -> tuple[tuple[int, int], ...]:
    """Returns the largest resident size in a run of steps, by batch size.

    Small batches fit into what is free in the process: the size is the same for all of
    them, and grows evenly from some batch on, which is in the curve. `schedules` are of
    steps by batch size, `input_bytes` those of one example.
    """
    held = [*model.variables]
    held += [v for o in optimizers_of(model) for v in o.variables] * training
    standing = [num_bytes(variable) for variable in held]

    def more(size: int) -> int:
        """Returns what tensors take beyond what is free; below 0 where some is left."""
        # Threads that run operations, beside the main one, which made the variables.
        heap = (
            BestFit()
            if around.allocator == TENSORFLOW
            else Glibc(around.settings, num_arenas=1 + around.num_threads)
        )
        step = changes(schedules[size], emulated=emulated)
        # The batch, and the one that is read meanwhile.
        inputs = 2 * round(size * input_bytes)
        return growth(heap, standing, [step] * _STEPS) + inputs - around.reusable_bytes

    sizes = sorted(schedules)
    points = [(size, more(size)) for size in sizes]
    if len(points) > 1 and points[-2][1] < 0:
        (low, small), (high, large) = points[-2:]
        slope = (large - small) / (high - low)
        if slope > 0:
            full = max(high, math.ceil(high - large / slope))
            points += [(full, 0)] * (full > high)
            points += [(2 * full, round(large + slope * (2 * full - high)))]
    # A step that has run has its graph and kernels already.
    has_run = (model.train_function if training else model.predict_function) is not None
    base = around.process_bytes or 0
    base += 0 if has_run else runtime_bytes(schedules[sizes[-1]])
    return tuple((size, base + max(0, grown)) for size, grown in points)


def growth(
    heap: Any, standing: Iterable[int], steps: Sequence[Sequence[Change]]
) -> int:
    """Returns by how many bytes steps make a heap larger than what stands in it."""
    for size in standing:
        heap.allocate(size)
    before = most = heap.resident_bytes
    for step in steps:
        blocks: dict[int, Any] = {}
        for change in step:
            if not change.num_bytes:
                heap.free(blocks.pop(change.block))
                continue
            # Operations go to the threads in turns.
            blocks[change.block] = heap.allocate(change.num_bytes, 1 + change.step)
            most = max(most, heap.resident_bytes)
    return most - before


def runtime_bytes(schedule: Schedule) -> int:
    """Returns what TensorFlow takes to run a graph, beside its tensors."""
    steps = list(_all_steps(schedule))
    # With their gradients.
    convolutions = sum(step.op.startswith(_CONVOLUTIONS) for step in steps)
    return (
        _RUNTIME_BYTES
        + _BYTES_PER_OPERATION * len(steps)
        + _BYTES_PER_CONVOLUTION * convolutions
    )


def _all_steps(schedule: Schedule) -> Iterator[Step]:
    for step in schedule.steps:
        yield step
        for inner in step.inner:
            yield from _all_steps(inner)


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks "
        "fordblks keepcost".split()
    )


def _free_in_glibc() -> int:
    """Returns the bytes of free blocks that glibc keeps."""
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0  # before glibc 2.33
    library.mallinfo2.restype = _Mallinfo2
    return int(library.mallinfo2().fordblks)
