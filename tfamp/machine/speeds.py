"""Devices, and how fast each kind computes in float16 and bfloat16, as a table."""

import dataclasses
import os
from typing import Literal, NamedTuple

from tfamp.records.record import Record


@dataclasses.dataclass(frozen=True)
class Device(Record):
    """A processor that TensorFlow computes on.

    Args:
        kind: "cpu", "gpu" or "tpu".
        name: The maker's name, such as "NVIDIA A100-SXM4-40GB".
        compute_capability: NVIDIA's version of what the GPU can do, such as (8, 0);
            None on other devices and when the driver doesn't tell.
        memory_bytes: The memory of the device itself, None if unknown.
        features: Instruction sets of a CPU, sorted, such as "amx_bf16".
        partition: Whether it is a slice of a larger GPU (MIG).
    """

    kind: Literal["cpu", "gpu", "tpu"]
    name: str
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    features: tuple[str, ...] = ()
    partition: bool = False


@dataclasses.dataclass(frozen=True)
class Recommendation(Record):
    """The policy that suits the devices here.

    Args:
        policy: A Keras policy name, such as "mixed_bfloat16".
        reason: Why, in one sentence.
    """

    policy: str
    reason: str


# Source: NVIDIA, CUDA C++ Programming Guide, tables of compute capabilities.
TENSOR_CORES = (7, 0)
BFLOAT16_CORES = (8, 0)
FLOAT8_CORES = (8, 9)


class Speed(NamedTuple):
    """Whether a device is faster in one dtype than in float32, and why, a sentence."""

    is_fast: bool
    why: str


@dataclasses.dataclass(frozen=True)
class _Row:
    """What one kind of device does; the attributes left out match any device."""

    bfloat16: Speed
    float16: Speed
    kind: str = "cpu"
    # Compute capability that it stays under; (0, 0) counts as unknown.
    below: tuple[int, int] | None = None
    part: str = ""  # of its name
    features: tuple[set[str], ...] = (set(),)  # it has one of these sets
    onednn: bool | None = None

    def matches(self, device: Device, onednn: bool) -> bool:
        """States whether the row speaks of this device."""
        capability = device.compute_capability or (0, 0)
        return (
            device.kind == self.kind
            and (self.below is None or capability < self.below)
            and self.part in device.name
            and any(one.issubset(device.features) for one in self.features)
            and self.onednn in (None, onednn)
        )


def _fast(why: str) -> Speed:
    return Speed(True, why)


def _slow(why: str) -> Speed:
    return Speed(False, why)


_UNKNOWN = "{name} tells no compute capability, so nothing says %s is fast"
_EMULATES = "{name} emulates bfloat16 (compute capability {version}, needs 8.0)"
_CPU_FLOAT16 = _slow(
    "{name} computes float16 slower than float32, since TensorFlow's CPU kernels for "
    "it are slow with and without float16 instructions"
)
# The first row that matches counts. Training over float32, measured with TensorFlow
# 2.21 and Keras 3.15.1 on 2 cores of a Sapphire Rapids Xeon, a 4-layer MLP 1024 wide
# and a small CNN: amx_bf16 2.4 and 2.9; the same chip held to avx512_bf16 0.57 and
# 0.72; oneDNN off 0.86 and 0.06. float16 there, with avx512_fp16: 1/470 and 1/230,
# since fused MatMul and the filter gradient of Conv2D take a reference kernel; with
# oneDNN off 0.83 and 0.17.
# Source for avx512_bf16 alone (Cooper Lake, up to 1.9): TensorFlow blog, 2020-06-18.
_TABLE = (
    _Row(
        _fast("{name} multiplies in bfloat16, which needs no loss scale"),
        _slow("{name} has no units for float16, only for bfloat16"),
        kind="tpu",
    ),
    _Row(
        _slow(_UNKNOWN % "bfloat16"),
        _slow(_UNKNOWN % "float16"),
        kind="gpu",
        below=(1, 0),
    ),
    _Row(
        _slow(_EMULATES),
        _slow("{name} has no tensor cores (compute capability {version}, needs 7.0)"),
        kind="gpu",
        below=TENSOR_CORES,
    ),
    _Row(
        # Turing without tensor cores: the capability alone says otherwise.
        _slow(_EMULATES),
        _slow("{name} has no tensor cores, unlike others of its compute capability"),
        kind="gpu",
        part="GTX 16",
    ),
    _Row(
        _slow(_EMULATES),
        _fast(
            "{name} has tensor cores for float16 but emulates bfloat16 "
            "(compute capability {version}, bfloat16 needs 8.0)"
        ),
        kind="gpu",
        below=BFLOAT16_CORES,
    ),
    _Row(
        _fast(
            "{name} (compute capability {version}) multiplies bfloat16 as fast as "
            "float16, and bfloat16 needs no loss scale"
        ),
        _fast("{name} has tensor cores for float16 (compute capability {version})"),
        kind="gpu",
    ),
    _Row(
        _slow(
            "{name} has bfloat16 instructions, but oneDNN is off "
            "(TF_ENABLE_ONEDNN_OPTS=0) and TensorFlow computes bfloat16 slower than "
            "float32 without it"
        ),
        _CPU_FLOAT16,
        features=({"amx_bf16"}, {"avx512_bf16"}),
        onednn=False,
    ),
    _Row(
        _fast("{name} multiplies bfloat16 in matrix units (amx_bf16)"),
        _CPU_FLOAT16,
        features=({"amx_bf16"},),
    ),
    _Row(
        _slow(
            "{name} names AMX, but its instructions end the process, as on some "
            "virtual machines, so oneDNN is held to "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, where bfloat16 is slower than float32"
        ),
        _CPU_FLOAT16,
        features=({"amx_broken"},),
    ),
    _Row(
        # avx512_fp16 came together with AMX, which is hidden or switched off here.
        _slow(
            "{name} has avx512_bf16 but not amx_bf16, and on chips of its generation "
            "bfloat16 without amx_bf16 is slower than float32"
        ),
        _CPU_FLOAT16,
        features=({"avx512_bf16", "avx512_fp16"},),
    ),
    _Row(
        _fast("{name} has bfloat16 instructions (avx512_bf16)"),
        _CPU_FLOAT16,
        features=({"avx512_bf16"},),
    ),
    _Row(
        _slow(
            "{name} has bfloat16 instructions (bf16) that TensorFlow uses for float32 "
            "models with ONEDNN_DEFAULT_FPMATH_MODE=BF16, and for mixed_bfloat16 no "
            "gain is known"
        ),
        _CPU_FLOAT16,
        features=({"bf16"}, {"svebf16"}),
    ),
    _Row(
        _slow("{name} has no bfloat16 instructions (amx_bf16 or avx512_bf16)"),
        _CPU_FLOAT16,
    ),
)


def speed(dtype: str, device: Device, *, onednn: bool | None = None) -> Speed:
    """Returns how fast a device is in "float16" or "bfloat16", and why.

    Weights and sums are in float32; `onednn` says whether oneDNN's kernels are on, None
    asks the environment variable TF_ENABLE_ONEDNN_OPTS, where they are on by default.

    Example:
        >>> speed("float16", Device("gpu", "P100", (6, 0)), onednn=True).why
        'P100 has no tensor cores (compute capability 6.0, needs 7.0)'
    """
    if onednn is None:
        given = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1")
        onednn = given.lower() not in ("0", "false")
    row = next(row for row in _TABLE if row.matches(device, onednn))
    found = row.bfloat16 if dtype == "bfloat16" else row.float16
    version = ".".join(map(str, device.compute_capability or (0, 0)))
    why = found.why.replace("{name}", device.name).replace("{version}", version)
    return Speed(found.is_fast, why)
