"""Errors of memory: which are, what holds the memory, and what to do.

They are judged by the names of their classes and by their text, without TensorFlow.
"""

import contextlib
import os
import re
from collections.abc import Callable, Mapping

from tfamp.machine.limits import MachineMemory
from tfamp.records.units import format_bytes, join_words

# Names of error classes that may mean it; their text decides. Under XLA, in oneDNN and
# in the libraries of a GPU a failed allocation comes as one of these.
_PERHAPS = frozenset(
    {"InternalError", "UnknownError", "AbortedError", "XlaRuntimeError", "RuntimeError"}
)
_SIGNS = re.compile(
    "out[ _]of[ _]memory|resource_?exhausted|failed to allocate|alloc_failed"
    # What oneDNN calls `dnnl_out_of_memory`.
    "|oom when allocating|bad_alloc|memoryerror|exception:status: 1,"
)
# Something else that is exhausted: a disk, a message of the network, open files.
_OTHERS = re.compile(
    "no space left|disk quota|too many open files|message larger than max"
)
_DEVICE = re.compile(r"device:(\w+:\d+)")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory could not be had."""
    if isinstance(error, MemoryError):
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error).lower()
    if "ResourceExhaustedError" in names:
        return not _OTHERS.search(text)
    return bool(names & _PERHAPS and _SIGNS.search(text))


def explain(
    error_text: str,
    *,
    held: Mapping[str, int] | None = None,
    memory: MachineMemory | None = None,
    training: bool = True,
    computes_in: str = "",
    largest_batch: Callable[[int], int] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Returns what the model holds, what memory there is, and what to do, in order.

    `held` is what it holds whatever the batch, by words; `largest_batch` returns how
    many examples fit into some bytes, or raises.
    """
    found = _DEVICE.search(error_text)
    device = found[1] if found else ""
    gpus = () if memory is None else memory.gpus
    # XLA does not name the GPU that ran full, so it is the only one there is.
    full = [gpu for gpu in gpus if device in ("", f"GPU:{gpu.index}")]
    gpu = full[0] if len(full) == 1 else None
    is_gpu = device.startswith("GPU") or gpu is not None
    lines = []
    if held:
        parts = [f"{words} {format_bytes(size)}" for words, size in held.items()]
        lines.append(
            f"The model holds {format_bytes(sum(held.values()))} "
            f"({join_words(parts)}); the rest grows with the batch."
        )
    room = None if gpu is None else gpu.memory_total_bytes
    limit = None if memory is None else memory.limit
    if limit is not None and not is_gpu:
        lines.append(
            f"This process may take {format_bytes(limit.bytes)} ({limit.source}), of "
            f"which {format_bytes(limit.free_bytes)} are free now."
        )
        room = limit.bytes // 2  # a CPU's allocator keeps about as much again
    fits = "A smaller batch; `tfamp.find_batch_size` finds the largest that fits."
    if largest_batch is not None and room is not None:
        with contextlib.suppress(Exception):  # whatever a trace of the model raises
            fits = (
                f"A smaller batch: by its operations the largest step that fits is of "
                f"about {largest_batch(room):,}; `tfamp.find_batch_size` tries it."
            )
    remedies = {
        fits: True,
        "The same update from smaller batches: `tfamp.find_batch_size(..., "
        "target_batch_size=...)` says how many to accumulate.": training,
        "Activations computed again in the backward pass: `tfamp.remat(model)`.": (
            training
        ),
        "Activations of half the size: `tfamp.apply(model, 'mixed_bfloat16')`, or what "
        "`tfamp doctor` recommends here.": computes_in == "float32",
        "Set TF_GPU_ALLOCATOR=cuda_malloc_async before TensorFlow starts, which "
        "lessens fragmentation.": is_gpu
        and environ.get("TF_GPU_ALLOCATOR") != "cuda_malloc_async",
        "End other processes on the GPU, which `nvidia-smi` lists, or set "
        "TF_FORCE_GPU_ALLOW_GROWTH=true for all that share it.": is_gpu,
    }
    lines.append("What to do, in this order:")
    shown = [text for text, helps in remedies.items() if helps]
    lines += [f"{number}. {text}" for number, text in enumerate(shown, start=1)]
    return "\n".join(lines)
