"""Devices, and how fast each kind computes in float16 and bfloat16, as a table."""

import dataclasses
import os
from typing import Literal, NamedTuple

from tfamp.records.record import Record


@dataclasses.dataclass(frozen=True)
class Device(Record):
    """A processor that TensorFlow computes on.

    `compute_capability` is NVIDIA's, such as (8, 0); `features` are a CPU's instruction
    sets, sorted.
    """

    kind: Literal["cpu", "gpu", "tpu"]
    name: str
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    features: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Recommendation(Record):
    """The policy that suits the devices here."""

    policy: str
    reason: str


class Speed(NamedTuple):
    """Whether a device is faster in one dtype than in float32, and why, a sentence."""

    is_fast: bool
    why: str


def speed(dtype: str, device: Device, *, onednn: bool | None = None) -> Speed:
    """Returns how fast a device is in "float16" or "bfloat16", and why.

    Weights and sums are in float32; `onednn` says whether oneDNN's kernels are on, None
    asks the environment.
    """
    if onednn is None:
        given = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1")
        onednn = given.lower() not in ("0", "false")
    if device.kind == "gpu":
        is_fast, why = _of_gpu(dtype, device)
    elif device.kind == "tpu" and dtype == "bfloat16":
        is_fast, why = True, "multiplies in bfloat16, which needs no loss scale"
    elif device.kind == "tpu":
        is_fast, why = False, "has no units for float16, only for bfloat16"
    elif dtype == "float16":
        is_fast, why = False, "computes float16 slower than float32 in TensorFlow"
    else:
        is_fast, why = _of_cpu({*device.features}, onednn)
    return Speed(is_fast, f"{device.name} {why}")


def _of_gpu(dtype: str, device: Device) -> tuple[bool, str]:
    # Source: NVIDIA, CUDA C++ Programming Guide, tables of compute capabilities.
    capability = device.compute_capability
    if capability is None:
        return False, f"tells no compute capability, so nothing says {dtype} is fast"
    version = "compute capability {}.{}".format(*capability)
    if capability >= (8, 0):
        also = ", and bfloat16 needs no loss scale" if dtype == "bfloat16" else ""
        return True, f"({version}) multiplies {dtype} in tensor cores{also}"
    if dtype == "bfloat16":
        return False, f"emulates bfloat16 ({version}, needs 8.0)"
    # They came with 7.0; GTX 16 has none in spite of its 7.5.
    if capability < (7, 0) or "GTX 16" in device.name:
        return False, f"has no tensor cores ({version})"
    what = "has tensor cores for float16 but emulates bfloat16"
    return True, f"{what} ({version}, bfloat16 needs 8.0)"


def _of_cpu(features: set[str], onednn: bool) -> tuple[bool, str]:
    """Returns whether bfloat16 is fast, and why.

    Training over float32 on 2 cores of a Sapphire Rapids Xeon, an MLP and a CNN:
    amx_bf16 2.4 and 2.9; the same chip held to avx512_bf16 0.57 and 0.72; oneDNN off
    0.86 and 0.06. Source for avx512_bf16 alone (Cooper Lake, up to 1.9): TensorFlow
    blog, 2020-06-18.
    """
    if features & {"amx_bf16", "avx512_bf16"} and not onednn:
        return False, (
            "has bfloat16 instructions, but oneDNN, which uses them, is off "
            "(TF_ENABLE_ONEDNN_OPTS=0)"
        )
    if "amx_bf16" in features:
        return True, "multiplies bfloat16 in matrix units (amx_bf16)"
    if "amx_broken" in features:
        return False, (
            "names AMX, but its instructions end the process, as on some virtual "
            "machines, and without them bfloat16 is slower than float32"
        )
    # avx512_fp16 came together with AMX, which is hidden or switched off here.
    if {"avx512_bf16", "avx512_fp16"} <= features:
        return (
            False,
            "has no amx_bf16, without which bfloat16 is slower than float32",
        )
    if "avx512_bf16" in features:
        return True, "has bfloat16 instructions (avx512_bf16)"
    if features & {"bf16", "svebf16"}:
        return False, "has bfloat16 instructions (bf16), but no gain is known from them"
    return False, "has no bfloat16 instructions (amx_bf16 or avx512_bf16)"
