"""What tensors were before they were rounded to half precision.

A tensor that Keras's casting of inputs rounded, or that a layer in float32 gave,
knows its source. Layers in float32, and those that ask for exact inputs, take it; so do
operations of Functional graphs, which have no dtype of their own, that are kept so.

Relies on: `Sequential.build` making an `InputLayer` of its first layer's dtype, but
where there is one of that shape; graphs casting what they are given to the dtypes of
their inputs.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import standardize_shape

from tfamp.keras_hooks import backend, structure
from tfamp.keras_hooks.layers import SOURCE, policy_of
from tfamp.keras_hooks.patches import Function, Patch, like, replaced
from tfamp.keras_hooks.structure import Layer, map_structure
from tfamp.records.formats import HALF

_KEPT = "_tfamp_kept_in_float32"
_NOT_OF_USERS = ("builtins", "numpy", "tensorflow", "keras")
# Of a kept operation: what its outputs are cast to, what decided, and why.
Kept = tuple[str, str, str]


def patches() -> list[Patch]:
    """Returns the patch by which a Sequential model without `Input` takes float32.

    Stock Keras has it take half precision, which rounds the ids it is given, and have
    a SavedModel's clients send it.
    """

    def wrap(original: Function) -> Function:
        # Keras reads its signature; of what bears that of another it would be wrong.
        def build(self: Any, input_shape: Any = None) -> Any:
            first: Any = next(iter(self._layers), None)
            is_open = not isinstance(first, keras.layers.InputLayer | None)
            if is_open and policy_of(self) and first.compute_dtype in HALF:
                # Keras knows what to do with another shape.
                with contextlib.suppress(Exception):
                    shape = standardize_shape(input_shape)
                    made = keras.layers.InputLayer(batch_shape=shape, dtype="float32")
                    self._layers = [made, *self._layers]
            return original(self, input_shape)

        return build

    return [Patch(keras.Sequential, "build", wrap)]


def known_integers(given: Any, dtype: str) -> Any:
    """Rounds integers as a graph would whose inputs are all half precision.

    Files of stock Keras have such graphs. What was rounded knows its source.
    """

    def rounded(x: Any) -> Any:
        if not isinstance(x, tf.Tensor) or not x.dtype.is_integer:
            return x
        y = structure.with_mask_of(x, backend.cast(x, dtype))
        setattr(y, SOURCE, x)
        return y

    return map_structure(rounded, given)


def source_of(x: Any, *, through_cast: bool = False) -> Any:
    """Returns what `x` was rounded from, in float32, or `x` itself.

    `through_cast` looks past a cast to float32, which preprocessing layers make ahead
    of their own call in graphs.
    """
    if not isinstance(x, tf.Tensor):
        return x
    source: Any = getattr(x, SOURCE, None)
    is_wide = through_cast and x.dtype == tf.float32
    made_by: Any = getattr(x, "op", None) if is_wide else None
    if source is None and made_by is not None and made_by.type == "Cast":
        source = getattr(made_by.inputs[0], SOURCE, None)
    if source is None:
        return x
    exact = backend.convert_to_tensor(source)
    if exact.dtype != tf.float32:
        exact = backend.cast(exact, "float32")
    has_own = backend.get_keras_mask(exact) is not None
    if backend.get_keras_mask(x) is None or has_own:
        return exact
    return structure.with_mask_of(x, tf.identity(exact))


def unrounded(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor in float32: what it was rounded from, where that is known."""
    return backend.cast(source_of(x), "float32")


def widened(x: Any) -> Any:
    """Returns a half-precision tensor in float32, unrounded where that is known."""
    is_half = isinstance(x, tf.Tensor) and x.dtype in backend.HALF
    return unrounded(x) if is_half else x


def cast_outputs(outputs: Any, dtype: str) -> Any:
    """Casts every floating-point tensor of a nested structure to `dtype`.

    The mask and the logits that Keras hangs on a tensor stay with it. Of an object of
    the user's that holds tensors, such as a distribution, float32 gets a copy.
    """

    def cast(x: Any) -> Any:
        if isinstance(x, keras.KerasTensor):
            if not backend.is_float_dtype(x.dtype) or x.dtype == dtype:
                return x
            kind = {"sparse": x.sparse, "ragged": x.ragged}
            return keras.KerasTensor(x.shape, dtype=dtype, **kind)
        is_variable = isinstance(x, keras.Variable)  # its dtype is a text
        if not (is_variable or tf.is_tensor(x)) and dtype == "float32":
            return _with_wide_parts(x)
        if is_variable or not tf.is_tensor(x) or not x.dtype.is_floating:
            return x
        y = x if x.dtype == dtype else backend.cast(x, dtype)
        if y is not x and hasattr(x, "_keras_mask"):
            y._keras_mask = x._keras_mask
        if y.dtype in backend.HALF and x.dtype not in backend.HALF:
            # Another layer in float32 takes it as it was: it may be beyond range.
            setattr(y, SOURCE, x)
        if hasattr(x, "_keras_logits"):  # a loss takes them in the output's place
            y._keras_logits = backend.cast(x._keras_logits, dtype)
        return y

    return map_structure(cast, outputs)


def _with_wide_parts(x: Any) -> Any:
    """Returns an object with its half-precision tensors, if any, in float32."""
    if type(x).__module__.partition(".")[0] in _NOT_OF_USERS:
        return x
    parts = getattr(x, "__dict__", {})
    wide = {name: widened(part) for name, part in parts.items()}
    if all(wide[name] is part for name, part in parts.items()):
        return x
    y = copy.copy(x)
    vars(y).update(wide)
    return y


def operations_in(model: Layer) -> Iterator[tuple[str, Any]]:
    """Yields path and operation of all graphs in a model, each once, in their order."""
    seen: set[int] = set()
    for path, layer, _ in structure.walk(model):
        prefix = "" if layer is model else f"{path}/"
        for operation in structure.operations_of(layer):
            if id(operation) not in seen:
                seen.add(id(operation))
                yield f"{prefix}{operation.name}", operation


def kept(operation: Any) -> Kept | None:
    """Returns how an operation is kept in float32, None where it is not."""
    return vars(operation).get(_KEPT)


def keep(operation: Any, output_dtype: str, rule: str = "", reason: str = "") -> bool:
    """Has an operation compute in float32 from now on; returns whether it did not.

    It has no dtype to be set, so its call is replaced on the instance.
    """
    if kept(operation) is not None:
        return False
    vars(operation)["call"] = _call_in_float32(operation, output_dtype)
    vars(operation)[_KEPT] = output_dtype, rule, reason
    return True


def kept_in(model: Layer) -> dict[int, Kept]:
    """Returns the operations kept in float32, by their place in `operations_in`."""
    known = enumerate(operations_in(model))
    return {place: how for place, (_, each) in known if (how := kept(each))}


def keep_only(model: Layer, wanted: Mapping[int, Kept]) -> None:
    """Keeps these operations in float32, by their place, and no others."""
    for place, (_, operation) in enumerate(operations_in(model)):
        if vars(operation).pop(_KEPT, None) is not None:
            del vars(operation)["call"]
        if place in wanted:
            keep(operation, *wanted[place])


def _call_in_float32(layer: Any, dtype: str) -> Callable[..., Any]:
    original = layer.call

    @like(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_structure(widened, (args, kwargs))
        return cast_outputs(original(*args, **kwargs), dtype)

    return call


@contextlib.contextmanager
def in_float32(layer: Any, dtype: str) -> Iterator[None]:
    """Has a float32 layer take inputs as exact as they are known, and give `dtype`."""
    # Without autocasting the layer is given the very tensors that others returned,
    # which know what they were rounded from. Operations have no such setting.
    uncast = {"autocast": False} if "autocast" in vars(layer) else {}
    with replaced(layer, call=_call_in_float32(layer, dtype), **uncast):
        yield
