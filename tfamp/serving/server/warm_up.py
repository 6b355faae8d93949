"""The first runs of a loaded model: it answers, and each example for itself."""

from typing import NamedTuple

import numpy as np

from tfamp.serving.runtimes.signature import LoadedModel, TensorSpec, dtype_named

# Lengths that are tried for dimensions that the signature leaves open.
_LENGTHS = (16, 32, 64, 1, 224)
# How much larger the other example of a batch is, and the part of the largest output
# that an answer may move by. Sums in another order move it by far less, one scale of
# int8 for both examples by far more.
_LARGER = 100.0
_MAX_CHANGE = 0.02
# Examples of a batch, where nobody says.
DEFAULT_BATCH_SIZE = 64


class WarmUp(NamedTuple):
    """What the first runs showed.

    Args:
        inputs: One example that the model answered; None where none was found, as
            dimensions are open.
        joins: Whether an answer is the same beside other examples.
        why: What speaks against it, "" if nothing does.
    """

    inputs: dict[str, np.ndarray] | None
    joins: bool
    why: str


def warm_up(model: LoadedModel) -> WarmUp:
    """Runs a model and finds out whether requests may share a run.

    Raises:
        Exception: What the model raised for an example of its own signature.
    """
    specs = model.signature.inputs
    is_open = any(None in spec.shape[1:] for spec in specs)
    inputs, failure = None, None
    for length in _LENGTHS if is_open else (1,):
        try:
            example = {spec.name: _example(spec, length, 0) for spec in specs}
            alone = model.run(example)
        except Exception as error:
            failure = error
            continue
        inputs = example
        break
    if inputs is None:
        if failure is not None and not is_open:
            raise failure
        return WarmUp(None, False, "no example was found that it answers")
    if any(not spec.shape or spec.shape[0] is not None for spec in specs):
        return WarmUp(inputs, False, "its number of examples is fixed")
    try:
        both = model.run(
            {
                spec.name: np.concatenate(
                    [inputs[spec.name], _example(spec, length, 1)]
                )
                for spec in specs
            }
        )
    except Exception as error:
        return WarmUp(inputs, False, f"two examples fail together: {error}")
    for name, array in alone.items():
        if both[name].shape[:1] != (2,) or array.shape[:1] != (1,):
            return WarmUp(inputs, False, f"output {name!r} has no row for each example")
        if _change(array[:1], both[name][:1]) > _MAX_CHANGE:
            return WarmUp(
                inputs,
                False,
                f"output {name!r} of an example changes with the others of its batch, "
                "as where int8 has one scale for a whole batch",
            )
    return WarmUp(inputs, True, "")


def _example(spec: TensorSpec, length: int, number: int) -> np.ndarray:
    """Returns one example of an input: the first small, the second large."""
    shape = [length if size is None else size for size in spec.shape]
    if shape and spec.shape[0] is None:
        shape[0] = 1
    dtype = dtype_named(spec.dtype)
    if dtype.kind == "O":
        return np.full(shape, f"text {number}", dtype=object)
    if dtype.kind in "iub":
        return np.full(shape, number).astype(dtype)
    # Not of NumPy's generators: importing them takes 10 ms and 2 MB of a server.
    waves = np.cos(1.7 * np.arange(number, number + np.prod(shape, dtype=int)))
    return (waves.reshape(shape) * _LARGER**number).astype(dtype)


def _change(alone: np.ndarray, beside: np.ndarray) -> float:
    """Returns the largest difference over the largest output."""
    if alone.dtype.kind in "OSU":
        return float(not np.array_equal(alone, beside))
    one, other = alone.astype(np.float64), beside.astype(np.float64)
    if not np.isfinite(one).all():
        return float(not np.array_equal(one, other, equal_nan=True))
    largest = np.abs(one).max(initial=0.0)
    change = np.abs(one - other).max(initial=0.0)
    return float(change / largest) if largest > 0 else float(change > 0)
