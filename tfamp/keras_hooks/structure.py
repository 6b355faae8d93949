"""Reads how layers contain one another and how a Functional graph is wired.

Relies on: `Layer._layers` holding the sublayers a layer tracks; a Sequential
model keeping its graph in `_functional`; `KerasTensor._keras_history` and
`Operation._inbound_nodes` describing the graph.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src import tree
from keras.src.models.functional import Functional
from keras.src.utils.naming import to_snake_case

from tfamp.keras_hooks import backend

Layer: TypeAlias = keras.layers.Layer
flatten, map_structure = tree.flatten, tree.map_structure
map_shapes = tree.map_shape_structure


def children(layer: Layer) -> list[Layer]:
    """Returns the sublayers that `layer` tracks.

    Input layers are left out, and what keeps the range of an input.
    """
    tracked = list(layer.layers) if isinstance(layer, keras.Model) else []
    if not (tracked or layer._layers):
        return []  # as most, which a walk asks
    inner = vars(layer).get("_functional")
    return [
        child
        for child in {id(each): each for each in [*tracked, *layer._layers]}.values()
        if not isinstance(child, keras.layers.InputLayer)
        and child is not inner
        and not getattr(child, "is_no_part", False)
    ]


def automatic_name(class_name: str) -> str:
    """Returns what Keras names the first layer of a class; others get a number."""
    return str(to_snake_case(class_name))


def walk(root: Layer) -> Iterator[tuple[str, Layer, Layer | None]]:
    """Yields (path, layer, parent) for `root` and all layers below it, once each.

    The path joins names with "/" from below the root, whose own path is its name.
    """
    yield root.name, root, None
    seen = {id(root)}

    def below(layer: Layer, prefix: str) -> Iterator[Any]:
        for child in children(layer):
            if id(child) not in seen:
                seen.add(id(child))
                yield f"{prefix}{child.name}", child, layer
                yield from below(child, f"{prefix}{child.name}/")

    yield from below(root, "")


def layers_of(root: Layer) -> list[Layer]:
    """Returns `root` and all layers below it, in the order of `walk`."""
    return [layer for _, layer, _ in walk(root)]


def compute_dtypes(model: Layer) -> set[str]:
    """Returns the dtypes that a model and the layers inside it compute in."""
    # A graph of layers computes nothing itself.
    own = layers_of(model)[graph_of(model) is not None :]
    return {layer.compute_dtype for layer in own}


def graph_of(model: Layer) -> Functional | None:
    """Returns the Functional graph of a model, None where it has none (yet)."""
    found = model if isinstance(model, Functional) else vars(model).get("_functional")
    return found if isinstance(found, Functional) else None


def graph_key(model: Layer) -> Any:
    """Returns what stands for a model's graph, another one as layers are added."""
    graph = graph_of(model)
    return None if graph is None else weakref.ref(graph)


def inputs_of(graph: Functional) -> Any:
    """Returns the input tensors of a Functional graph, in the structure of its call."""
    return graph._inputs_struct


def operations_of(layer: Layer) -> list[Any]:
    """Returns the operations in a layer's own Functional graph that are no layers."""
    graph = graph_of(layer)
    found = [] if graph is None else graph.operations
    return [each for each in found if not isinstance(each, keras.layers.Layer)]


def only_calls_others(layer: Layer) -> bool:
    """States whether a layer's call is that of a graph of layers, with none its own."""
    return type(layer).call in (Functional.call, keras.Sequential.call)


def constructor_makes_graph(model: Layer) -> bool:
    """States whether a model's own constructor wired its Functional graph."""
    return isinstance(model, Functional) and type(model) is not Functional


def producer(
    tensor: keras.KerasTensor,
) -> tuple[Any, list[keras.KerasTensor], int] | None:
    """Returns (operation, its input tensors, output index) that made `tensor`."""
    history = getattr(tensor, "_keras_history", None)
    if history is None:
        return None
    node = history.operation._inbound_nodes[history.node_index]
    return history.operation, list(node.input_tensors), history.tensor_index


def tensors_of(operation: Any) -> tuple[list[Any], list[Any]]:
    """Returns the tensors that an operation takes and gives, wherever it is called."""
    nodes = operation._inbound_nodes
    inputs = [x for node in nodes for x in node.input_tensors]
    return inputs, [x for node in nodes for x in node.output_tensors]


def users_of(operation: Any) -> list[Any]:
    """Returns the operations and layers that take what an operation gives."""
    return [node.operation for node in operation._outbound_nodes]


def own_losses(layer: Layer) -> list[Any]:
    """Returns the losses that a layer, not those inside it, has added since a step."""
    return layer._losses


def set_tensor_dtype(tensor: keras.KerasTensor, dtype: str) -> None:
    """Makes a graph tensor tell the dtype its layer now computes."""
    if backend.is_float_dtype(tensor.dtype):
        tensor._dtype = dtype


def widen_inputs(graph: Functional) -> None:
    """Makes a graph take its inputs in float32, which it casts to their dtypes."""
    for tensor in getattr(graph, "_inputs", ()):  # none while it is being made
        layer = tensor._keras_history.operation
        for each in (tensor, layer):  # a Sequential asks the layer, a graph the tensor
            if each.dtype in ("float16", "bfloat16"):
                each._dtype = "float32"


def own_weights(layer: Layer) -> list[Any]:
    """Returns the weights a layer holds itself, not through sublayers."""
    return list(layer._trainable_variables) + list(layer._non_trainable_variables)


def num_bytes(value: Any) -> int:
    """Returns the bytes of a variable, or of what a spec describes."""
    dtype = tf.as_dtype(getattr(value.dtype, "name", value.dtype))
    return math.prod(value.shape) * int(dtype.size)


def bytes_of(variables: Iterable[Any]) -> int:
    """Returns the bytes of variables, each counted once."""
    return sum(map(num_bytes, {id(each): each for each in variables}.values()))


def with_mask_of(source: Any, tensor: Any) -> Any:
    """Returns a tensor that now bears the mask of another, if that has one."""
    mask = backend.get_keras_mask(source)
    if mask is not None:
        backend.set_keras_mask(tensor, mask)
    return tensor


def built_shapes(layer: Layer) -> dict[str, Any]:
    """Returns the shapes that a layer was built with, by argument; empty if unknown."""
    return dict(getattr(layer, "_build_shapes_dict", None) or {})


def trace_call(layer: Layer, args: Any, kwargs: Any) -> Any:
    """Traces `layer(*args, **kwargs)` for its shapes; weights may be made by it."""

    def specification(x: Any) -> Any:
        if hasattr(x, "shape") and hasattr(x, "dtype") and not hasattr(x, "assign"):
            dtype = backend.standardize_dtype(x.dtype)
            # With a name, as later models number theirs.
            return keras.KerasTensor(x.shape, dtype, name="keras_tensor")
        return x

    args, kwargs = tree.map_structure(specification, (args, kwargs))
    return keras_backend.compute_output_spec(layer, *args, **kwargs)


def refresh_normalization(layer: keras.layers.Normalization) -> None:
    """Makes a built layer take its statistics in its present compute dtype."""
    mean = getattr(layer, "mean", None)
    if mean is None or backend.standardize_dtype(mean.dtype) == layer.compute_dtype:
        return
    with tf.init_scope():  # a trace may be under way
        if layer.input_mean is None:
            layer.finalize_state()
        else:
            layer.build(layer._build_input_shape)


def replace_call(layer: Any, call: Callable[..., Any] | None) -> None:
    """Makes a layer's `call` another one, or its own again where it is None."""
    vars(layer).pop("call", None)
    if call is not None:
        vars(layer)["call"] = call
