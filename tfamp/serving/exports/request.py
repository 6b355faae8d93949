"""What one exported file is to be: its format, its dtype, and what stays in float32."""

import dataclasses
import importlib.util
from collections.abc import Mapping

import numpy as np

DTYPES = ("float32", "float16", "bfloat16", "int8")
SCHEMES = ("dynamic", "static")
# Format -> dtype -> the schemes that its quantiser has, the one to take first; (""):
# floats. What is missing cannot be expressed, or no runtime loads it.
POSSIBLE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "saved_model": {"float32": ("",), "float16": ("",), "bfloat16": ("",)},
    "litert": {"float32": ("",), "float16": ("",), "int8": ("dynamic", "static")},
    "onnx": {"float32": ("",), "float16": ("",), "int8": ("dynamic", "static")},
    "openvino": {"float32": ("",), "float16": ("",), "int8": ("static",)},
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
    """One file to be written."""

    format: str
    dtype: str
    scheme: str = ""  # "" for floats
    # Batches of inputs by name, for "static".
    calibration: tuple[Mapping[str, np.ndarray], ...] = ()
    # Path of a layer that stays in float32 -> why.
    keep: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Whether only products of matrices are quantised, as in models with attention.
    products_only: bool = False

    @property
    def name(self) -> str:
        """Returns its name in tables, as "onnx int8 dynamic"."""
        return " ".join(filter(None, (self.format, self.dtype, self.scheme)))


def missing(format: str) -> tuple[str, ...]:
    """Returns the packages that a format needs and that are not installed."""
    return tuple(
        name for name in PACKAGES[format] if importlib.util.find_spec(name) is None
    )


def check_possible(format: str, dtype: str, scheme: str | None) -> None:
    """Raises `ValueError` where a format has no such dtype or scheme."""
    schemes = POSSIBLE[format].get(dtype)
    if schemes is None:
        others = [name for name, dtypes in POSSIBLE.items() if dtype in dtypes]
        raise ValueError(
            f"Format {format!r} has no {dtype}, or no runtime that loads it; it has "
            f"{tuple(POSSIBLE[format])}. Pass one of these, or a format that has "
            f"{dtype}: {others}."
        )
    if scheme not in (None, *schemes):
        has = f"has {dtype} as {schemes}" if schemes != ("",) else "is a float"
        raise ValueError(
            f"`scheme` is {scheme!r}, and {format!r} {has}. Pass one of these, or "
            "leave it out."
        )
