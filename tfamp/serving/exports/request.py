"""What one exported file is to be: its format, its dtype, and what stays in float32."""

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

DTYPES = ("float32", "float16", "bfloat16", "int8")
SCHEMES = ("weights", "dynamic", "static")
# Format -> dtype -> the schemes that its quantiser has, the one to take first; (""):
# floats. What is missing cannot be expressed, or no runtime loads it.
POSSIBLE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "saved_model": {"float32": ("",), "float16": ("",), "bfloat16": ("",)},
    "litert": {
        "float32": ("",),
        "float16": ("",),
        "int8": ("dynamic", "weights", "static"),
    },
    "onnx": {"float32": ("",), "float16": ("",), "int8": ("dynamic", "static")},
    "openvino": {"float32": ("",), "float16": ("",), "int8": ("weights", "static")},
}
# Format -> the packages that write it, and integers in it, beside TensorFlow.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "saved_model": (),
    "litert": ("ai_edge_litert", "ai_edge_quantizer"),
    "onnx": ("onnx", "tf2onnx", "onnxruntime"),
    "openvino": ("openvino", "nncf"),
}


class NothingRoundedError(ValueError):
    """A quantiser that left a model as it is, as where all that it rounds is kept."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One file to be written.

    Attributes:
        format: "saved_model", "litert", "onnx" or "openvino".
        dtype: One of `DTYPES`.
        scheme: One of `SCHEMES`, "" for floats.
        calibration: Batches of inputs by name, which "static" needs.
        keep: Path of a layer that stays in float32 -> why.
        products_only: Whether only products of matrices are quantised, as in models
            with attention, whose sums and normalisations lose the answers in int8.
        reduces_range: Whether weights take 7 of 8 bits: without VNNI, sums of pairs of
            products are cut off at 16 bits.
    """

    format: str
    dtype: str
    scheme: str = ""
    calibration: tuple[Mapping[str, np.ndarray], ...] = ()
    keep: Mapping[str, str] = dataclasses.field(default_factory=dict)
    products_only: bool = False
    reduces_range: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns what `export.json` says of it."""
        names = ("format", "dtype", "scheme", "products_only", "reduces_range")
        return {name: getattr(self, name) for name in names}

    @property
    def name(self) -> str:
        """Returns its name in tables, as "onnx int8 dynamic"."""
        return " ".join(filter(None, (self.format, self.dtype, self.scheme)))


def missing(format: str) -> tuple[str, ...]:
    """Returns the packages that a format needs and that are not installed."""
    return tuple(
        name for name in PACKAGES[format] if importlib.util.find_spec(name) is None
    )


def scheme_for(format: str, dtype: str, scheme: str | None) -> str:
    """Returns the scheme to take, "" for floats.

    Example:
        >>> scheme_for("onnx", "int8", None)
        'dynamic'
    """
    schemes = POSSIBLE[format].get(dtype)
    if schemes is None:
        others = [name for name, dtypes in POSSIBLE.items() if dtype in dtypes]
        raise ValueError(
            f"Format {format!r} has no {dtype}, or no runtime that loads it; it has "
            f"{tuple(POSSIBLE[format])}. Pass one of these, or a format that has "
            f"{dtype}: {others}."
        )
    if scheme is not None and scheme not in schemes:
        told = (
            f"has {dtype} as {schemes}" if schemes != ("",) else "is a float, with none"
        )
        raise ValueError(
            f"`scheme` is {scheme!r}, and {format!r} {told}. Pass one of these, or "
            "leave it out."
        )
    return schemes[0] if scheme is None else scheme
