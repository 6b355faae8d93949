"""What exporters read: one traced function with named inputs and outputs."""

import dataclasses
import re
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.graph.bodies import has_texts
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.patches import Patch, like
from tfamp.records.checks import first_line
from tfamp.serving.runtimes.signature import Signature, TensorSpec

SIGNATURE = "serving_default"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_]+")
# Stands before the layer's scope in the names of bodies of loops and branches.
_INSIDE = "loop.body"
# What TensorFlow puts before the names of operations of functions that it inlines.
_CALLS = re.compile(r"(?:(?:Stateful)?PartitionedCall(?:_\d+)?/)+")


class Served(tf.Module):
    """Holds a model's raw variables and tables, so that a SavedModel stores each once.

    Keras's own `export` tracks the layers as well and writes every weight twice.
    """

    def __init__(self, held: Sequence[Any], function: Any) -> None:
        super().__init__()
        self.held = list(held)
        self.serve = function


@dataclasses.dataclass(frozen=True)
class Traced:
    """A model as a function of named tensors.

    Attributes:
        module: Holds the function, `module.serve`, and the variables it reads.
        specs: The inputs in the order of `signature`, by their names in files.
        signature: What an exported model takes and gives.
        scopes: What operations' names begin with -> the path of their layer.
        flatten: Turns what the model itself takes into a list of `specs`.
        converted: Format -> what was made of it in float32, from which integers are
            made as well.
    """

    module: Served
    specs: tuple[tf.TensorSpec, ...]
    signature: Signature
    scopes: Mapping[str, str]
    flatten: Callable[[Any], list[Any]]
    converted: dict[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def function(self) -> Any:
        """The concrete function."""
        return self.module.serve.get_concrete_function()

    def elsewhere(self) -> str:
        """Returns which formats a message may advise in place of another one."""
        graph = self.function.graph
        looks_up = any("LookupTable" in each.type for each in graph.get_operations())
        if looks_up or has_texts(graph):
            return "'saved_model', as TensorFlow alone has texts and tables"
        return "'onnx' or 'saved_model'"

    def path_of(self, operation: str) -> str | None:
        """Returns the path of the layer that an operation of a graph belongs to."""
        name = operation.rpartition(f"{_INSIDE}/")[2]  # as a whole without one
        parts = _CALLS.sub("", name.lstrip("/")).split("/")
        for end in range(len(parts), 0, -1):
            if (found := self.scopes.get("/".join(parts[:end]))) is not None:
                return found
        return None

    def is_in(self, layers: Collection[str], operations: Iterable[str]) -> bool:
        """States whether one of some operations is of a layer, or of one inside it."""
        paths = filter(None, map(self.path_of, operations if layers else ()))
        return any(
            f"{path}/".startswith(f"{each}/") for path in paths for each in layers
        )

    def by_name(self, x: Any) -> dict[str, np.ndarray]:
        """Returns inputs as the model takes them, as arrays by name."""
        names = [spec.name for spec in self.signature.inputs]
        return dict(zip(names, map(np.asarray, self.flatten(x)), strict=True))

    def call(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the model's own answers, by name."""
        pairs = zip(self.signature.inputs, self.specs, strict=True)
        tensors = [tf.cast(inputs[told.name], spec.dtype) for told, spec in pairs]
        found = self.module.serve(*tensors)
        return {
            spec.name: found[spec.in_file].numpy() for spec in self.signature.outputs
        }


def trace(model: keras.Model, sample: Any = None) -> Traced:
    """Traces a model's inference, with a free batch."""
    _check_stateless(model)
    wanted = _inputs(model, sample)
    specs, inputs = _specs(wanted)
    names: list[str] = []
    tensors_of: list[str] = []
    placed = [(path, layer) for path, layer, _ in structure.walk(model)][1:]
    scopes = {id(layer): f"{scope_of(path)}/" for path, layer in placed}

    def serve(*tensors: Any) -> dict[str, Any]:
        packed = tf.nest.pack_sequence_as(wanted, tensors)
        graph = tf.compat.v1.get_default_graph()
        patch = Patch(keras.layers.Layer, "__call__", _in_scopes(scopes, graph))
        patch.install()
        try:
            outputs = model(packed, training=False)
        finally:
            patch.remove()
        names[:], values = _outputs(model, outputs)
        tensors_of[:] = _plain(names)
        return {
            name: tf.identity(value, name=name)
            for name, value in zip(tensors_of, values, strict=True)
        }

    function = tf.function(serve, input_signature=specs, autograph=False)
    try:
        concrete = function.get_concrete_function()
    except Exception as error:  # of whatever the model's `call` does
        told = ", ".join(f"{s.name} {tuple(s.shape)} {s.dtype.name}" for s in specs)
        raise ValueError(
            f"Cannot trace model {model.name!r} for inputs {told}: "
            f"{first_line(error)} Pass inputs as it takes them as `calibration=` or "
            "`validation=`, or make its `call` one that `predict` can trace."
        ) from error
    outputs = concrete.structured_outputs
    signature = Signature(
        tuple(map(_record, inputs, specs, [spec.name for spec in specs])),
        tuple(map(_record, names, [outputs[key] for key in tensors_of], tensors_of)),
    )
    held = [*(variable.value for variable in model.variables), *_tables(model)]
    return Traced(
        Served(held, function),
        specs,
        signature,
        {scope_of(path): path for path, _ in placed},
        lambda x: _flattened(x, wanted, inputs),
    )


def _check_stateless(model: keras.Model) -> None:
    stateful = tuple(
        path
        for path, layer, _ in structure.walk(model)
        if isinstance(layer, keras.layers.RNN) and layer.stateful
    )
    if stateful:
        raise ValueError(
            f"Layers {stateful!r} of {model.name!r} have `stateful=True`: they go on "
            "from where the last call ended; expected layers that give the same answer "
            "each time. Build the model with `stateful=False`, hand it the weights by "
            "`set_weights(model.get_weights())`, and export that."
        )


def scope_of(path: str) -> str:
    """Returns a layer's path as TensorFlow takes it in names."""
    return re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", path).lstrip("_") or "layer"


def _in_scopes(scopes: dict[int, str], graph: tf.Graph) -> Callable[..., Any]:
    """Returns a wrapper of `Layer.__call__` that names operations after the layer."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def __call__(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
            scope = scopes.get(id(layer))
            if scope is None or tf.executing_eagerly():
                return original(layer, *args, **kwargs)
            # The body of a loop, such as a recurrent layer's, is a graph of its own.
            # Names in it that are those of the graph around it too make a file of ONNX
            # invalid, where a loop sees both.
            if tf.compat.v1.get_default_graph() is not graph:
                around = tf.get_current_name_scope()
                scope = f"{around}/{_INSIDE}/{scope}".lstrip("/")
            with tf.name_scope(scope):
                return original(layer, *args, **kwargs)

        return __call__

    return wrap


def _inputs(model: keras.Model, sample: Any) -> Any:
    """Returns tensors that tell a model's inputs, in the structure of its call."""
    graph = structure.graph_of(model)
    if graph is not None:
        return tf.nest.map_structure(_spec, structure.inputs_of(graph))
    if sample is not None:
        return tf.nest.map_structure(_free_batch, sample)
    shapes = structure.built_shapes(model)
    if len(shapes) != 1:
        raise ValueError(
            f"Cannot tell the inputs of {model.name!r}: Keras remembers "
            f"{'no shapes' if not shapes else f'shapes of {list(shapes)}'}; expected "
            "those of one argument. Pass inputs as `calibration=` or `validation=`."
        )

    def spec(shape: Sequence[int | None]) -> tf.TensorSpec:
        dtype = tf.as_dtype(model.input_dtype)
        dtype = tf.float32 if dtype.is_floating else dtype
        return tf.TensorSpec([None, *shape[1:]], dtype)

    return structure.map_shapes(spec, next(iter(shapes.values())))


def _spec(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype, name=tensor.name)


def _free_batch(value: Any) -> tf.TensorSpec:
    tensor = tf.convert_to_tensor(value)
    dtype = tf.float32 if tensor.dtype.is_floating else tensor.dtype
    return tf.TensorSpec([None, *tensor.shape[1:]], dtype)


def _specs(wanted: Any) -> tuple[tuple[tf.TensorSpec, ...], list[str]]:
    """Returns the flat inputs, and what Keras calls them: keys of a dict, or names."""
    leaves = tf.nest.flatten(wanted)
    is_dict = isinstance(wanted, dict)
    chosen = [
        path if is_dict else (leaf.name or (path and f"input_{path}") or "input")
        for path, leaf in zip(_paths(wanted), leaves, strict=True)
    ]
    names = _unique(chosen)
    specs = (
        tf.TensorSpec(leaf.shape, leaf.dtype, name=name)
        for leaf, name in zip(leaves, _plain(names), strict=True)
    )
    return tuple(specs), names


def _paths(nested: Any, *above: Any) -> Iterator[str]:
    """Yields where each leaf lies, as "a.0", in the order of `tf.nest`."""
    if isinstance(nested, dict):
        for key in sorted(nested):
            yield from _paths(nested[key], *above, key)
    elif isinstance(nested, (list, tuple)):
        for index, each in enumerate(nested):
            yield from _paths(each, *above, index)
    else:
        yield ".".join(map(str, above))


def _outputs(model: keras.Model, outputs: Any) -> tuple[list[str], list[Any]]:
    """Returns Keras's names and the tensors of what a call gave."""
    values = tf.nest.flatten(outputs)
    names: list[str] = []
    if isinstance(outputs, dict):
        names = list(_paths(outputs))
    elif (graph := structure.graph_of(model)) is not None:
        names = list(graph.output_names)
    if len(names) != len(values):
        names = [f"output_{i}" for i in range(len(values))]
    return _unique(names), [
        tf.cast(x, tf.float32) if x.dtype.is_floating else x for x in values
    ]


def _plain(names: Sequence[str]) -> list[str]:
    """Returns names that graphs and Python take, no two alike."""
    found = []
    for name in names:
        plain = _NOT_IN_NAMES.sub("_", name).strip("_") or "tensor"
        found.append(f"x_{plain}" if plain[0].isdigit() else plain)
    return _unique(found)


def _unique(names: Sequence[str]) -> list[str]:
    """Returns names with numbers behind those that were there already."""
    found: list[str] = []
    for name in names:
        number = 1
        while (chosen := name if number == 1 else f"{name}_{number}") in found:
            number += 1
        found.append(chosen)
    return found


def _record(name: str, tensor: Any, in_file: str) -> TensorSpec:
    shape = (None, *tuple(tensor.shape)[1:])
    dtype = tf.as_dtype(tensor.dtype).name
    return TensorSpec(name, shape, dtype, "" if in_file == name else in_file)


def _tables(model: keras.Model) -> list[Any]:
    """Returns the look-up tables of preprocessing layers."""
    kind = tf.saved_model.experimental.TrackableResource
    held = (
        value
        for _, layer, _ in structure.walk(model)
        for each in vars(layer).values()
        for value in _leaves(each)
    )
    return list({id(each): each for each in held if isinstance(each, kind)}.values())


def _leaves(value: Any) -> Iterator[Any]:
    """Yields what containers hold; `tf.nest` sorts keys, which may be layers."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _flattened(x: Any, wanted: Any, names: Sequence[str]) -> list[Any]:
    """Returns inputs as a flat list, whether structured as the call or by names."""
    if isinstance(x, dict) and not isinstance(wanted, dict):
        if missing := [name for name in names if name not in x]:
            raise ValueError(
                f"Inputs are named {list(x)}; expected {list(names)}. Add {missing}."
            )
        return [x[name] for name in names]
    if isinstance(x, dict):
        x = {name: x[name] for name in wanted if name in x}
    leaves = tf.nest.flatten(tuple(x) if isinstance(x, list) else x)
    if len(leaves) != len(names):
        raise ValueError(
            f"Inputs hold {len(leaves)} arrays; expected {len(names)}, {list(names)}. "
            "Pass them as `predict` takes them."
        )
    return leaves
