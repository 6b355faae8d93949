"""The most floating-point operations a second that a GPU's maker promises.

Of dense products in tensor cores where the GPU has them for the dtype: the doubled
figures for structured sparsity are left out.
"""

import re

_TERA = 1e12


def _row(**teraflops: float) -> dict[str, float]:
    return {dtype: _TERA * value for dtype, value in teraflops.items()}


# By a pattern in the device's name; the first that matches counts, so narrower ones
# stand first. Where a datasheet prints figures "with sparsity", they are halved here.
# Source: NVIDIA, datasheets of V100 (Jan. 2020), T4 (Mar. 2019), A10 (Mar. 2021), A100
# (June 2021), L4 (2023), L40S (2023), H100 (2024) and H200 (2024).
_PEAKS = (
    (r"\bV100S\b", _row(float16=130, float32=16.4)),
    (r"\bV100-PCIE\b|\bV100 PCIe\b", _row(float16=112, float32=14)),
    (r"\bV100\b", _row(float16=125, float32=15.7)),
    (r"\bT4\b", _row(float16=65, float32=8.1)),
    (r"\bA10\b", _row(float16=125, bfloat16=125, tfloat32=62.5, float32=31.2)),
    (r"\bA100\b", _row(float16=312, bfloat16=312, tfloat32=156, float32=19.5)),
    (r"\bL4\b", _row(float16=121, bfloat16=121, tfloat32=60, float32=30.3)),
    (r"\bL40S\b", _row(float16=362, bfloat16=362, tfloat32=183, float32=91.6)),
    (r"\bH100 PCIe\b", _row(float16=756, bfloat16=756, tfloat32=378, float32=51)),
    (
        r"\bH[12]00 NVL\b",
        _row(float16=835.5, bfloat16=835.5, tfloat32=417.5, float32=60),
    ),
    (
        r"\bH[12]00\b",
        _row(float16=989.5, bfloat16=989.5, tfloat32=494.5, float32=67),
    ),
)
# Compute of a MIG slice, in parts of the GPU. Source: NVIDIA, MIG User Guide, tables
# "GPU Instance Profiles" of A100 and H100, column "Fraction of SMs"; the GPUs above
# that can be cut have seven parts.
_MIG = re.compile(r"\bMIG (\d)(?:c\.\d)?g\.")
_MIG_PARTS = 7


def peak_flops(name: str, dtype: str) -> float | None:
    """Returns a GPU's peak of dense products in one dtype, None where not known.

    A slice by MIG has its share of the whole GPU.

    Args:
        name: The device's name, as the driver gives it.
        dtype: "float16", "bfloat16", "tfloat32" or "float32", the last without tensor
            cores.

    Returns:
        FLOPs a second, a multiply-add counted as two.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-40GB", "bfloat16")
        312000000000000.0
        >>> peak_flops("Tesla V100-SXM2-16GB", "bfloat16") is None
        True
    """
    for pattern, peaks in _PEAKS:
        if re.search(pattern, name):
            peak = peaks.get(dtype)
            return None if peak is None else peak * _share(name)
    return None


def _share(name: str) -> float:
    """Returns the part of the GPU that a MIG slice computes with, 1 for a whole one."""
    found = _MIG.search(name)
    return int(found.group(1)) / _MIG_PARTS if found else 1.0
