"""What an exported model takes and gives, and the one way to ask any runtime."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Call = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]
# What the Open Inference Protocol calls each dtype.
DATATYPES = {
    "bool": "BOOL",
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "object": "BYTES",
    "string": "BYTES",
}


class TensorSpec(NamedTuple):
    """An input or output: its name, its shape and NumPy's name of its dtype.

    The first dimension is the batch; None where a dimension is free. `tensor` is what
    the exported file calls it, where that has no such names as Keras does; else "".
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    tensor: str = ""

    @property
    def in_file(self) -> str:
        """What the exported file calls it."""
        return self.tensor or self.name


class Signature(NamedTuple):
    """The inputs and outputs of a model, in the order of a list."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def to_dict(self) -> dict[str, list[dict[str, Any]]]:
        """Returns what `from_dict` takes, of JSON's types."""
        each = self._asdict().items()
        return {name: [spec._asdict() for spec in specs] for name, specs in each}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Signature":
        """Returns the signature that `to_dict` told."""
        return cls(
            *(
                tuple(
                    TensorSpec(**{**each, "shape": tuple(each["shape"])})
                    for each in record[name]
                )
                for name in cls._fields
            )
        )


class LoadedModel:
    """An exported model that answers in its runtime; safe to ask from many threads.

    Args:
        runtime: "saved_model", "litert", "onnx" or "openvino"; "keras" for a model
            that was not exported.
        path: What it was loaded from; None for a Keras model in memory.
        signature: Its inputs and outputs.
        call: Takes and gives arrays by the names that the file has for them.
        is_by_example: Whether an answer does not depend on the others of its batch;
            it does where integers have one scale for a batch.
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
        self.runtime = runtime
        self.is_by_example = is_by_example
        self.path = path
        self.signature = signature
        self._call = call

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
                of `signature.inputs`; or a dict of arrays by their names. The first
                dimension of each is the batch. Numbers are cast to the dtype of the
                input where none changes by that, or where both are floats.

        Returns:
            An array where the model has one output, else a dict of arrays by name.

        Raises:
            TypeError: An input is of a dtype that does not become that of the model.
            ValueError: An input is missing, unknown, or of a shape that the model does
                not take.
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
        given = dict(x)
        if {*given} != {*names}:
            add = [name for name in names if name not in given]
            leave = [name for name in given if name not in names]
            raise ValueError(
                f"Inputs are named {list(given)}; expected {names}. Add {add}. Leave "
                f"out {leave}."
            )
    else:
        # A list of numbers is one input; a list of arrays is one each.
        is_each = isinstance(x, (list, tuple)) and all(hasattr(v, "shape") for v in x)
        values = list(x) if is_each else [x]
        if len(values) != len(names):
            raise ValueError(
                f"The model takes {len(names)} inputs, {names}, and got {len(values)}. "
                "Pass a dict of arrays by these names."
            )
        given = dict(zip(names, values, strict=True))
    arrays = {spec.name: _checked(given[spec.name], spec) for spec in specs}
    sizes = {name: len(array) for name, array in arrays.items()}
    if len({*sizes.values()}) > 1:
        raise ValueError(
            f"Inputs have batches of {sizes}; expected one number of examples. Pass as "
            "many of each."
        )
    return arrays


def _checked(value: Any, spec: TensorSpec) -> np.ndarray:
    """Returns an input as an array of the dtype and rank of its specification."""
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of several lengths
        raise ValueError(
            f"Input {spec.name!r} is no array: {error}. Pass rows of one length."
        ) from error
    wanted = dtype_named(spec.dtype)
    changed = None if array.dtype == wanted else _changed(array, wanted)
    if changed is not None:
        found = f"is of dtype {array.dtype}; expected {spec.dtype}"
        if array.dtype.kind in "iu" and wanted.kind == "f":
            rounded = int(changed.astype(wanted))
            found = f"holds {changed}, which {spec.dtype} rounds to {rounded}; expected"
            found += " integers that it holds as they are"
        raise TypeError(
            f"Input {spec.name!r} {found}. Cast it with `.astype({spec.dtype!r})` if "
            "that will do, or export a model whose input has that dtype."
        )
    if not has_shape(array, spec.shape):
        is_one = array.ndim == len(spec.shape) - 1
        advice = "One example is a batch of 1: `x[np.newaxis]`." if is_one else ""
        raise ValueError(
            f"Input {spec.name!r} is of shape {array.shape}; expected {spec.shape}, "
            f"where None is free and the first is the batch. {advice or 'Reshape it.'}"
        )
    return np.ascontiguousarray(array.astype(wanted, copy=False))


def _changed(array: np.ndarray, wanted: np.dtype) -> Any:
    """Returns a value that another dtype would change, None where it holds them all."""
    kinds = array.dtype.kind + wanted.kind
    if kinds in ("ff", "bf", "OO", "SO", "UO") or not array.size:
        return None
    if kinds[0] not in "iub" or kinds[1] not in "iuf":
        return array.flat[0]
    with np.errstate(invalid="ignore", over="ignore"):  # beyond what it holds
        there = array.astype(wanted)
        differs = there.astype(array.dtype) != array
        if wanted.kind == "f":  # the largest integers are undefined on the way back
            differs |= there >= float(np.iinfo(array.dtype).max + 1)
    return array[differs][0] if differs.any() else None


def has_shape(array: np.ndarray, shape: Sequence[int | None]) -> bool:
    """Returns whether an array has a shape, where None is any length."""
    return array.ndim == len(shape) and all(
        length in (None, size) for length, size in zip(shape, array.shape, strict=True)
    )


def dtype_named(name: str) -> np.dtype:
    """Returns NumPy's dtype of a name; texts are objects, bfloat16 is of ml_dtypes."""
    if name in ("string", "object"):
        return np.dtype(object)
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
