"""Errors of memory: which are, what was asked for and where, what holds the rest.

They are judged by the names of their classes and by their text, so that it can be done
where TensorFlow is not loaded, and for what other libraries raise.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping

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
_TENSOR = re.compile(
    r"OOM when allocating tensor with shape\s*\[([\d,\s]*)\] and type (\w+)"
)
# XLA, the driver, and the allocator of GPUs; the last rounds what was asked for up.
_BYTES = re.compile(
    r"(?:out of memory (?:while )?(?:trying to )?allocat(?:e|ing) "
    r"|failed to allocate (?:request for )?)(\d+) ?b(?:ytes)?\b"
    r"|trying to allocate [\d.]+ ?\w+ \(rounded to (\d+)"
)
# What TensorFlow calls them in errors; others have their name.
_DTYPES = {"half": "float16", "float": "float32", "double": "float64", "bool": "bool8"}
_DEVICE = re.compile(r"device:(\w+:\d+)")
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_CALLED = re.compile(r"Exception encountered when calling (\w+)\.call")
_NUMBER = re.compile(r"_\d+$")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory could not be had."""
    if isinstance(error, MemoryError):
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error).lower()
    if "ResourceExhaustedError" in names:
        return not _OTHERS.search(text)
    return bool(names & _PERHAPS and _SIGNS.search(text))


@dataclasses.dataclass(frozen=True)
class Request:
    """What could not be had, as far as an error tells: "" and None for unknown."""

    bytes: int | None = None
    what: str = ""  # a tensor, such as "float32 (8, 4096)"
    device: str = ""  # such as "GPU:0"
    node: str = ""  # of the graph
    layer_class: str = ""  # of the layer that was called eagerly


def requested(error_text: str) -> Request:
    """Returns what an error says was asked for."""
    size: int | None = None
    what = ""
    if tensor := _TENSOR.search(error_text):
        shape = tuple(int(n) for n in tensor[1].split(",") if n.strip())
        dtype = _DTYPES.get(tensor[2], tensor[2])
        bits = re.search(r"\d+", dtype)
        what = f"{dtype} {shape}"
        size = math.prod(shape) * int(bits[0]) // 8 if bits else None
    elif found := _BYTES.search(error_text.lower()):
        size = int(found[1] or found[2])
    named = (each.search(error_text) for each in (_DEVICE, _NODE, _CALLED))
    return Request(size, what, *(match[1] if match else "" for match in named))


def layer_of(node: str, layers: Iterable[str]) -> str | None:
    """Returns the path of the layer whose operation it is, None where none is."""
    exact = f"/{node}/"
    bare = "/".join(["", *(_NUMBER.sub("", part) for part in node.split("/")), ""])
    fitting = [p for p in layers if f"/{p}/" in exact or f"/{p}/" in bare]
    return max(
        fitting, key=lambda p: (p.count("/"), f"/{p}/" in exact, len(p)), default=None
    )


def explain(
    error_text: str,
    *,
    layers: Iterable[str] = (),
    held: Mapping[str, int] | None = None,
    memory: MachineMemory | None = None,
    training: bool = True,
    computes_in: str = "",
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Returns what ran out of memory, what holds it, and what to do, in order.

    Args:
        error_text: The error's text.
        layers: Paths of the model's layers.
        held: What the model holds whatever the batch: words -> bytes.
        memory: What `machine_memory` returned; None says nothing of others.
        training: Whether it happened in training.
        computes_in: The dtype of the model's layers, "" if they differ.
        environ: The environment variables.

    Example:
        >>> text = "Out of memory while trying to allocate 2147483648 bytes."
        >>> print(explain(text, held={"weights": 2**20}, training=False, environ={}))
        Out of memory: 2.0 GiB could not be had.
        The model holds 1.0 MiB (weights 1.0 MiB); the rest grows with the batch.
        What to do, in this order:
        1. A smaller batch; `tfamp.find_batch_size` finds the largest that fits.
    """
    asked = requested(error_text)
    gpus = () if memory is None else memory.gpus
    # XLA does not name the GPU that ran full, so it is the only one there is.
    full = [gpu for gpu in gpus if asked.device in ("", f"GPU:{gpu.index}")]
    gpu = full[0] if len(full) == 1 else None
    is_gpu = asked.device.startswith("GPU") or gpu is not None
    name = asked.device if gpu is None else f"GPU:{gpu.index}"
    lines = [_what_happened(asked, layers)]
    if held:
        parts = [f"{words} {format_bytes(size)}" for words, size in held.items()]
        lines.append(
            f"The model holds {format_bytes(sum(held.values()))} "
            f"({join_words(parts)}); the rest grows with the batch."
        )
    # Where this process cannot be told from others, neither can theirs.
    if gpu is not None and gpu.total_bytes and len(gpu.others) < len(gpu.holders):
        lines += map(gpu.held_by, (each for each in gpu.others if each.bytes))
    limit = None if memory is None else memory.limit
    if limit is not None and not is_gpu:
        lines.append(
            f"This process may take {format_bytes(limit.bytes)} ({limit.source}), of "
            f"which {format_bytes(limit.free_bytes)} are free now."
        )
    remedies = {
        "A smaller batch; `tfamp.find_batch_size` finds the largest that fits.": True,
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
        f"End the other processes on {name}, or set "
        "TF_FORCE_GPU_ALLOW_GROWTH=true for all that share it.": (
            gpu is not None and bool(gpu.others)
        ),
    }
    lines.append("What to do, in this order:")
    shown = [text for text, helps in remedies.items() if helps]
    lines += [f"{number}. {text}" for number, text in enumerate(shown, start=1)]
    return "\n".join(lines)


def _what_happened(asked: Request, layers: Iterable[str]) -> str:
    what = asked.what or "memory"
    if asked.bytes is not None:
        what = format_bytes(asked.bytes) + (f" for {asked.what}" if asked.what else "")
    text = f"Out of memory: {what} could not be had"
    if asked.device:
        text += f" on {asked.device}"
    if path := layer_of(asked.node, layers):
        text += f", in layer {path!r}"
    elif asked.layer_class:
        text += f", in a layer of class {asked.layer_class}"
    if "gradient_tape" in asked.node:
        text += ", in the backward pass"
    return f"{text}."
