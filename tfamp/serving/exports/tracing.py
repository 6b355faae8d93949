"""What exporters read: one traced function with named inputs and outputs."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.patches import Patch, like
from tfamp.records.checks import first_line
from tfamp.serving.runtimes.signature import Signature, TensorSpec

SIGNATURE = "serving_default"
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
    """A model as a function of named tensors."""

    module: Served  # holds the function, `serve`, and the variables it reads
    # The inputs in the order of `signature`, by their names in files.
    specs: tuple[tf.TensorSpec, ...]
    signature: Signature
    # What operations' names begin with -> the path of their layer.
    scopes: Mapping[str, str]
    structure: Any  # of the inputs that the model takes
    looping: tuple[str, ...] = ()  # paths of recurrent layers
    # What was made of it in floats, from which integers are made.
    converted: dict[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def function(self) -> Any:
        """The concrete function."""
        return self.module.serve.get_concrete_function()

    def is_in(self, layers: Collection[str], operations: Iterable[str]) -> bool:
        """States whether one of some operations is of a layer, or of one inside it."""
        paths = filter(None, map(self.path_of, operations if layers else ()))
        return any(
            f"{path}/".startswith(f"{each}/") for path in paths for each in layers
        )

    def path_of(self, operation: str) -> str | None:
        """Returns the path of the layer that an operation of a graph belongs to."""
        name = operation.rpartition(f"{_INSIDE}/")[2]  # as a whole without one
        parts = _CALLS.sub("", name.lstrip("/")).split("/")
        starts = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((self.scopes[each] for each in starts if each in self.scopes), None)

    def by_name(self, x: Any) -> dict[str, np.ndarray]:
        """Returns inputs as the model takes them, as arrays by name."""
        names = [spec.name for spec in self.signature.inputs]
        if isinstance(x, dict) and isinstance(self.structure, dict):
            x = {name: x[name] for name in self.structure if name in x}
        elif isinstance(x, dict):
            x = [x[name] for name in names if name in x]
        leaves = tf.nest.flatten(tuple(x) if isinstance(x, list) else x)
        if len(leaves) != len(names):
            raise ValueError(
                f"Inputs hold {len(leaves)} arrays for the model; expected {names}. "
                "Pass them as `predict` takes them."
            )
        return dict(zip(names, map(np.asarray, leaves), strict=True))

    def call(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the model's own answers, by name."""
        pairs = zip(self.signature.inputs, self.specs, strict=True)
        found = self.module.serve(
            *(tf.cast(inputs[told.name], spec.dtype) for told, spec in pairs)
        )
        return {
            spec.name: found[spec.in_file].numpy() for spec in self.signature.outputs
        }


def trace(model: keras.Model, sample: Any = None) -> Traced:
    """Traces a model's inference, with a free batch."""
    placed = [(path, layer) for path, layer, _ in structure.walk(model)][1:]
    recurrent = [each for each in placed if isinstance(each[1], keras.layers.RNN)]
    stateful = tuple(path for path, layer in recurrent if layer.stateful)
    if stateful:
        raise ValueError(
            f"Layers {stateful!r} of {model.name!r} have `stateful=True`: they go on "
            "from where the last call ended; expected layers that give the same answer "
            "each time. Build the model with `stateful=False`, hand it the weights by "
            "`set_weights(model.get_weights())`, and export that."
        )
    wanted = _inputs(model, sample)
    leaves = tf.nest.flatten(wanted)
    is_dict = isinstance(wanted, dict)
    inputs = _unique(
        path if is_dict else (leaf.name or (path and f"input_{path}") or "input")
        for path, leaf in zip(_paths(wanted), leaves, strict=True)
    )
    specs = tuple(
        tf.TensorSpec(leaf.shape, leaf.dtype, name=name)
        for leaf, name in zip(leaves, _plain(inputs), strict=True)
    )
    names: list[str] = []
    tensors_of: list[str] = []
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
        names[:] = _output_names(model, outputs)
        tensors_of[:] = _plain(names)
        values = [
            tf.cast(x, tf.float32) if x.dtype.is_floating else x
            for x in tf.nest.flatten(outputs)
        ]
        return {
            name: tf.identity(value, name=name)
            for name, value in zip(tensors_of, values, strict=True)
        }

    function = tf.function(serve, input_signature=specs, autograph=False)
    try:
        outputs = function.get_concrete_function().structured_outputs
    except Exception as error:  # of whatever the model's `call` does
        told = ", ".join(f"{s.name} {tuple(s.shape)} {s.dtype.name}" for s in specs)
        raise ValueError(
            f"Cannot trace model {model.name!r} for inputs {told}: "
            f"{first_line(error)} Pass inputs as it takes them as `calibration=` or "
            "`validation=`, or make its `call` one that `predict` can trace."
        ) from error
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
        wanted,
        tuple(path for path, layer in recurrent if not layer.unroll),
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
    """Returns specs that tell a model's inputs, in the structure of its call."""

    def spec(shape: Sequence[int | None], dtype: Any, name: Any = None) -> Any:
        return tf.TensorSpec([None, *shape[1:]], dtype, name)

    def widened(dtype: Any) -> Any:
        return tf.float32 if tf.as_dtype(dtype).is_floating else dtype

    graph = structure.graph_of(model)
    if graph is not None:
        inputs = structure.inputs_of(graph)
        return tf.nest.map_structure(lambda x: spec(x.shape, x.dtype, x.name), inputs)
    if sample is not None:
        tensors = tf.nest.map_structure(tf.convert_to_tensor, sample)
        return tf.nest.map_structure(lambda x: spec(x.shape, widened(x.dtype)), tensors)
    shapes = structure.built_shapes(model)
    if len(shapes) != 1:
        raise ValueError(
            f"Cannot tell the inputs of {model.name!r}: Keras remembers shapes of "
            f"{list(shapes)}; expected those of one argument. Pass inputs as "
            "`calibration=` or `validation=`."
        )
    (shape,) = shapes.values()
    return structure.map_shapes(lambda x: spec(x, widened(model.input_dtype)), shape)


def _paths(nested: Any) -> list[str]:
    """Returns where each leaf lies, as "a.0", in the order of `tf.nest`."""
    found = keras.tree.flatten_with_path(nested)
    return [".".join(map(str, path)) for path, _ in found]


def _output_names(model: keras.Model, outputs: Any) -> list[str]:
    """Returns Keras's names of what a call gave."""
    number = len(tf.nest.flatten(outputs))
    graph = structure.graph_of(model)
    names = list(graph.output_names) if graph is not None else []
    if isinstance(outputs, dict):
        names = _paths(outputs)
    if len(names) != number:
        names = [f"output_{i}" for i in range(number)]
    return _unique(names)


def _plain(names: Sequence[str]) -> list[str]:
    """Returns names that graphs and Python take, no two alike."""
    plain = (re.sub(r"\W+", "_", each, flags=re.A).strip("_") for each in names)
    return _unique(x if x and not x[0].isdigit() else f"x_{x}" for x in plain)


def _unique(names: Iterable[str]) -> list[str]:
    """Returns names with numbers behind those that were there already."""
    found: list[str] = []
    for name in names:
        number, chosen = 1, name
        while chosen in found:
            number += 1
            chosen = f"{name}_{number}"
        found.append(chosen)
    return found


def _record(name: str, tensor: Any, in_file: str) -> TensorSpec:
    shape = (None, *tuple(tensor.shape)[1:])
    dtype = tf.as_dtype(tensor.dtype).name
    return TensorSpec(name, shape, dtype, "" if in_file == name else in_file)


def _tables(model: keras.Model) -> list[Any]:
    """Returns the look-up tables of preprocessing layers."""

    def leaves(value: Any) -> Iterator[Any]:  # `tf.nest` sorts keys, maybe layers
        if isinstance(value, dict):
            value = list(value.values())
        for each in value if isinstance(value, (list, tuple)) else ():
            yield from leaves(each)
        yield value

    kind = tf.saved_model.experimental.TrackableResource
    held = (x for _, layer, _ in structure.walk(model) for x in leaves(vars(layer)))
    return list({id(each): each for each in held if isinstance(each, kind)}.values())
