"""What an exported model takes and gives, and the one way to ask any runtime."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfamp.records.record import Record

Call = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]
# What the Open Inference Protocol calls each dtype.
DATATYPES = {"bool": "BOOL", "bfloat16": "BF16", "object": "BYTES", "string": "BYTES"}
for _kind, _text in (("uint", "UINT"), ("int", "INT"), ("float", "FP")):
    DATATYPES |= {f"{_kind}{bits}": f"{_text}{bits}" for bits in (8, 16, 32, 64)}


@dataclasses.dataclass(frozen=True)
class TensorSpec(Record):
    """An input or output: its name, its shape and NumPy's name of its dtype.

    The batch is first; None where a dimension is free. `tensor` is what the exported
    file calls it, where that has no such names as Keras does; else "".
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    tensor: str = ""

    @property
    def in_file(self) -> str:
        """What the exported file calls it."""
        return self.tensor or self.name

    def fits(self, array: np.ndarray) -> bool:
        """States whether an array has the shape."""
        pairs = zip(self.shape, array.shape, strict=False)
        return array.ndim == len(self.shape) and all(
            n in (None, size) for n, size in pairs
        )


@dataclasses.dataclass(frozen=True)
class Signature(Record):
    """The inputs and outputs of a model, in the order of a list."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class LoadedModel:
    """An exported model that answers in its runtime; safe to ask from many threads.

    `call` takes and gives arrays by their names in the file; `is_by_example` says that
    an answer does not depend on the others of its batch.
    """

    def __init__(
        self,
        runtime: str,
        path: Path | None,
        signature: Signature,
        call: Call,
        *,
        is_by_example: bool = True,
    ) -> None:
        self.runtime, self.path, self.signature = runtime, path, signature
        self.is_by_example, self._call = is_by_example, call

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs by name for one batch of all inputs by name.

        Arrays are taken as they are: of the names, dtypes and ranks of the signature.
        """
        given = {spec.in_file: inputs[spec.name] for spec in self.signature.inputs}
        found = self._call(given)
        return {
            spec.name: np.asarray(found[spec.in_file], dtype_named(spec.dtype))
            for spec in self.signature.outputs
        }

    def predict(self, x: Any) -> Any:
        """Returns what the model answers for one batch.

        Args:
            x: An array for a model of one input; a list or tuple of arrays in the order
                of `signature.inputs`; or a dict of arrays by their names, with the
                batch first. Numbers are cast where none changes by that, or both are
                floats; else there is a TypeError.

        Returns:
            An array where the model has one output, else a dict of arrays by name.
        """
        outputs = self.run(self.prepared(x))
        if len(self.signature.outputs) == 1:
            return outputs[self.signature.outputs[0].name]
        return outputs

    __call__ = predict

    def prepared(self, x: Any) -> dict[str, np.ndarray]:
        """Returns inputs by name as `run` takes them, checked against the signature."""
        return prepared(x, self.signature.inputs)


def prepared(x: Any, specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Returns inputs by name, whichever way they were passed, checked."""
    names = [spec.name for spec in specs]
    if isinstance(x, Mapping):
        if {*x} != {*names}:
            add = [name for name in names if name not in x]
            leave = [name for name in x if name not in names]
            told = f"Inputs are named {list(x)}; expected {names}. "
            raise ValueError(f"{told}Add {add}. Leave out {leave}.")
        values = [x[name] for name in names]
    else:
        # A list of numbers is one input; a list of arrays is one each.
        is_each = isinstance(x, (list, tuple)) and all(hasattr(v, "shape") for v in x)
        values = list(x) if is_each else [x]
        if len(values) != len(names):
            told = f"The model takes {len(names)} inputs, {names}, not {len(values)}. "
            raise ValueError(f"{told}Pass a dict of arrays by these names.")
    arrays = dict(zip(names, map(checked, values, specs), strict=True))
    sizes = {name: len(array) for name, array in arrays.items()}
    if len({*sizes.values()}) > 1:
        raise ValueError(f"Inputs have batches of {sizes}. Pass as many of each.")
    return arrays


def checked(value: Any, spec: TensorSpec) -> np.ndarray:
    """Returns an input as an array of the dtype and rank of its specification."""
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of several lengths
        told = f"Input {spec.name!r} is no array: {error}. Pass rows of one length."
        raise ValueError(told) from error
    wanted = dtype_named(spec.dtype)
    if array.dtype != wanted and not _holds(wanted, array):
        found = f"is of dtype {array.dtype}; expected {spec.dtype}"
        if array.dtype.kind in "iu" and wanted.kind == "f":
            found = f"holds integers that {spec.dtype} rounds; expected others"
        advice = f"Cast it with `.astype({spec.dtype!r})` if that will do."
        raise TypeError(f"Input {spec.name!r} {found}. {advice}")
    if not spec.fits(array):
        is_one = array.ndim == len(spec.shape) - 1
        advice = "One example is a batch of 1: `x[np.newaxis]`." if is_one else ""
        told = f"Input {spec.name!r} is of shape {array.shape}; expected {spec.shape}"
        raise ValueError(f"{told}, batch first. {advice or 'Reshape it.'}")
    return np.ascontiguousarray(array.astype(wanted, copy=False))


def _holds(wanted: np.dtype, array: np.ndarray) -> bool:
    """States whether a dtype holds an array's values; floats may be rounded."""
    kinds = array.dtype.kind + wanted.kind
    if kinds in ("bf", "OO", "SO", "UO") or not array.size:
        return True
    if kinds[0] not in "iubf" or kinds[1] not in "iuf" or kinds in ("fi", "fu"):
        return False
    with np.errstate(invalid="ignore", over="ignore"):  # beyond what it holds
        there = array.astype(wanted)
    if kinds == "ff":
        return bool((np.isfinite(there) | ~np.isfinite(array)).all())
    if kinds[1] == "f":  # NumPy would compare by a float
        there, array = there.astype(np.longdouble), array.astype(np.longdouble)
    return bool((there == array).all())


def dtype_named(name: str) -> np.dtype:
    """Returns NumPy's dtype of a name; texts are objects, bfloat16 is of ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(object if name == "string" else name)
