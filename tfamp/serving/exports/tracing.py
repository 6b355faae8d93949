"""What exporters read: a float32 copy, traced, with named inputs to try it by."""

import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import backend, structure, trainer
from tfamp.keras_hooks.patches import Patch, wrapper
from tfamp.models import apply
from tfamp.records import checks
from tfamp.records.checks import first_line
from tfamp.records.formats import HALF
from tfamp.serving.runtimes import signature as signatures
from tfamp.serving.runtimes.signature import LoadedModel, Signature, TensorSpec
from tfamp.stepping.unchanged import copied

SIGNATURE = "serving_default"
_RNN = keras.layers.RNN
_INSIDE = "loop.body"  # stands before the layer's scope in bodies of loops
# What TensorFlow puts before the names of operations of functions that it inlines.
_CALLS = re.compile(r"(?:(?:Stateful)?PartitionedCall(?:_\d+)?/)+")

_MAX_CALIBRATION_EXAMPLES = 512  # more tell next to nothing about ranges
_MIN_DIFFERENT = 4  # fewer are a mistake: one again and again, or a sample
_NUM_TRIED = 5
_MAX_UNROLLED = 256  # steps of a recurrent layer
_FREE = 8  # where a dimension is free and nobody says what it is


@dataclasses.dataclass(frozen=True)
class Traced:
    """A model as a function of named tensors."""

    module: Any  # holds the function, `serve`, and the variables it reads
    function: Any  # the concrete one
    # The inputs in the order of `signature`, by their names in files.
    specs: tuple[tf.TensorSpec, ...]
    signature: Signature
    structure: Any  # of the inputs that the model takes
    looping: tuple[str, ...] = ()  # paths of recurrent layers
    # What was made of it in floats, from which integers are made.
    converted: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def by_name(self, x: Any) -> dict[str, np.ndarray]:
        """Returns inputs as `predict` takes them, as arrays by name, checked."""
        if isinstance(self.structure, dict) or not isinstance(x, dict):
            names = [spec.name for spec in self.signature.inputs]
            leaves = tf.nest.flatten(tuple(x) if isinstance(x, list) else x)
            is_whole = len(leaves) == len(names)
            x = dict(zip(names, leaves, strict=True)) if is_whole else x
        return signatures.prepared(x, self.signature.inputs)


def trace(model: keras.Model, sample: Any = None) -> Traced:
    """Traces a model's inference, with a free batch."""
    placed = [(path, layer) for path, layer, _ in structure.walk(model)][1:]
    recurrent = [each for each in placed if isinstance(each[1], _RNN)]
    stateful = tuple(path for path, layer in recurrent if layer.stateful)
    if stateful:
        raise ValueError(
            f"Layers {stateful!r} have `stateful=True` and go on from where the last "
            "call ended. Build the model with `stateful=False`, hand it the weights by "
            "`set_weights(model.get_weights())`, and export that."
        )
    wanted = _inputs(model, sample)
    leaves = tf.nest.flatten(wanted)
    inputs = _paths(wanted)
    if not isinstance(wanted, dict):
        pairs = zip(leaves, inputs, strict=True)
        inputs = [x.name or (path and f"input_{path}") or "input" for x, path in pairs]
    inputs = _unique(inputs)
    found = zip(leaves, _plain(inputs), strict=True)
    specs = tuple(tf.TensorSpec(x.shape, x.dtype, name) for x, name in found)
    names: list[str] = []
    scopes = {id(layer): f"{scope_of(path)}/" for path, layer in placed}

    def serve(*tensors: Any) -> dict[str, Any]:
        packed = tf.nest.pack_sequence_as(wanted, tensors)
        patch = Patch(keras.layers.Layer, "__call__", _in_scopes(scopes))
        patch.install()
        try:
            outputs = model(packed, training=False)
        finally:
            patch.remove()
        flat = tf.nest.flatten(outputs)
        graph = structure.graph_of(model)
        told = list(graph.output_names) if graph is not None else []
        told = _paths(outputs) if isinstance(outputs, dict) else told
        is_whole = len(told) == len(flat)
        names[:] = told if is_whole else map("output_{}".format, range(len(flat)))
        names[:] = _unique(names)
        flat = [tf.cast(x, tf.float32) if x.dtype.is_floating else x for x in flat]
        pairs = zip(_plain(names), flat, strict=True)
        return {name: tf.identity(x, name) for name, x in pairs}

    function = tf.function(serve, input_signature=specs, autograph=False)
    try:
        concrete = function.get_concrete_function()
    except Exception as error:  # of whatever the model's `call` does
        told = ", ".join(f"{s.name} {tuple(s.shape)} {s.dtype.name}" for s in specs)
        raise ValueError(
            f"Cannot trace model {model.name!r} for inputs {told}: {first_line(error)} "
            "Pass inputs as it takes them as `validation=`."
        ) from error

    def record(name: str, in_file: str, tensor: Any) -> TensorSpec:
        shape, dtype = (None, *tensor.shape[1:]), tf.as_dtype(tensor.dtype).name
        return TensorSpec(name, shape, dtype, "" if in_file == name else in_file)

    in_file = _plain(names)
    outputs = [concrete.structured_outputs[key] for key in in_file]
    signature = Signature(
        tuple(map(record, inputs, [spec.name for spec in specs], specs)),
        tuple(map(record, names, in_file, outputs)),
    )
    table = tf.saved_model.experimental.TrackableResource  # of preprocessing layers
    parts = (x for _, layer in placed for x in vars(layer).values())
    tables = [each for each in parts if isinstance(each, table)]
    held = [x.value for x in model.variables] + tables
    module: Any = tf.Module()  # where Keras's `export` tracks layers, weights are twice
    module.held, module.serve = held, function
    looping = tuple(path for path, layer in recurrent if not layer.unroll)
    return Traced(module, concrete, specs, signature, wanted, looping)


def unrolled(model: keras.Model, sample: Any) -> Traced:
    """Traces a model for runtimes without loops: recurrent steps one by one."""
    found = [(p, x) for p, x, _ in structure.walk(model) if isinstance(x, _RNN)]
    layers = [(path, layer) for path, layer in found if not layer.unroll]
    for path, layer in layers:
        shape = next(iter(structure.built_shapes(layer).values()), (None, None))
        if not (steps := shape[1]) or steps > _MAX_UNROLLED:
            raise ValueError(
                f"Layer {path!r} loops over {steps or 'an unknown number of'} steps; "
                f"expected at most {_MAX_UNROLLED} for a runtime without loops. Export "
                "to 'onnx', or give `keras.Input` the number of steps."
            )
    try:
        for _, layer in layers:
            layer.unroll = True
        return trace(model, sample)
    finally:
        for _, layer in layers:
            layer.unroll = False


def scope_of(path: str) -> str:
    """Returns a layer's path as TensorFlow takes it in names."""
    return re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", path).lstrip("_") or "layer"


def is_in(layers: Iterable[str], operations: Iterable[str]) -> bool:
    """States whether one of some operations is of a layer, or of one inside it."""
    starts = tuple(f"{scope_of(path)}/" for path in layers)
    names = (each.rpartition(f"{_INSIDE}/")[2].lstrip("/") for each in operations)
    return any(f"{_CALLS.sub('', name)}/".startswith(starts) for name in names)


def _in_scopes(scopes: dict[int, str]) -> Callable[..., Any]:
    """Returns a wrapper of `Layer.__call__` that names operations after the layer."""
    graph = tf.compat.v1.get_default_graph()

    @wrapper
    def call(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        scope = scopes.get(id(layer))
        if scope is None or tf.executing_eagerly():
            return original(layer, *args, **kwargs)
        # The body of a loop, such as a recurrent layer's, is a graph of its own. Names
        # in it that are those of the graph around it too make a file of ONNX invalid,
        # where a loop sees both.
        if tf.compat.v1.get_default_graph() is not graph:
            around = tf.get_current_name_scope()
            scope = f"{around}/{_INSIDE}/{scope}".lstrip("/")
        with tf.name_scope(scope):
            return original(layer, *args, **kwargs)

    return call


def _inputs(model: keras.Model, sample: Any) -> Any:
    """Returns specs that tell a model's inputs, in the structure of its call."""

    def spec(shape: Sequence[int | None], dtype: Any) -> Any:
        dtype = tf.float32 if tf.as_dtype(dtype).is_floating else dtype
        return tf.TensorSpec([None, *shape[1:]], dtype)

    graph = structure.graph_of(model)
    if graph is not None:
        inputs = structure.inputs_of(graph)
        return tf.nest.map_structure(
            lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype, x.name), inputs
        )
    if sample is not None:
        tensors = tf.nest.map_structure(tf.convert_to_tensor, sample)
        return tf.nest.map_structure(lambda x: spec(x.shape, x.dtype), tensors)
    shapes = [*structure.built_shapes(model).values()]
    if len(shapes) != 1:
        told = f"Cannot tell the inputs of {model.name!r} from {len(shapes)} shapes; "
        raise ValueError(f"{told}expected one. Pass inputs as `validation=`.")
    return structure.map_shapes(lambda x: spec(x, model.input_dtype), shapes[0])


def _paths(nested: Any) -> list[str]:
    """Returns where each leaf lies, as "a.0", in the order of `tf.nest`."""
    found = keras.tree.flatten_with_path(nested)
    return [".".join(map(str, path)) for path, _ in found]


def _plain(names: Sequence[str]) -> list[str]:
    """Returns names that graphs and Python take, no two alike."""
    plain = (re.sub(r"\W+", "_", each, flags=re.A).strip("_") for each in names)
    return _unique(x if x and not x[0].isdigit() else f"x_{x}" for x in plain)


def _unique(names: Iterable[str]) -> list[str]:
    """Returns names with numbers behind those that were there already."""
    found: list[str] = []
    for name in names:
        ends = itertools.chain([""], (f"_{n}" for n in itertools.count(2)))
        found.append(next(name + end for end in ends if name + end not in found))
    return found


def float32_copy(model: keras.Model) -> keras.Model:
    """Returns a copy that stores and computes everything in float32, not compiled.

    Exporters fail on casts to bfloat16, and write files that no runtime loads.
    """
    copy = copied(model, instead="export a model whose classes have one")
    if {id(x) for x in model.weights} & {id(x) for x in copy.weights}:
        told = f"Cannot copy {model.name!r}: the copy holds its weights. Give its "
        raise ValueError(f"{told}classes a `get_config` that returns their arguments.")
    if structure.compute_dtypes(copy) & {*HALF}:
        apply(copy, "float32")
    trainer.forget_training(copy)
    with copy.distribute_strategy.scope():
        for weight in copy.weights:
            if weight.dtype in HALF:
                backend.store_in(weight, "float32")
    graph = structure.graph_of(copy)
    if graph is not None:
        structure.widen_inputs(graph)
    trainer.drop_traced_functions(copy)
    return copy


def tried_inputs(
    model: LoadedModel, traced: Traced, sample: Any
) -> dict[str, np.ndarray]:
    """Returns a few inputs by name with which exports are tried, and the model was."""
    random = np.random.default_rng(0)
    found = {} if sample is None else traced.by_name(sample)
    for spec in traced.signature.inputs if sample is None else ():
        shape = (_NUM_TRIED, *(_FREE if n is None else n for n in spec.shape[1:]))
        values: Any = random.normal(size=shape)
        dtype = signatures.dtype_named(spec.dtype)
        if dtype.kind in "iub":
            values = values > 0
        values = np.full(shape, "a") if dtype.kind == "O" else values
        found[spec.name] = values.astype(dtype)
    found = {name: x[:_NUM_TRIED] for name, x in found.items()}
    for size in (1, _NUM_TRIED):
        try:
            model.run({name: x[np.arange(size) % len(x)] for name, x in found.items()})
        except Exception as error:  # of whatever operation
            raise ValueError(
                f"The model does not answer a batch of {size}: {first_line(error)}; "
                "expected any number. Give inputs `shape=` in place of `batch_shape=`, "
                "take the batch from `keras.ops.shape(x)[0]`, or pass `validation=`."
            ) from error
    return found


def calibration_batches(
    data: Iterable[Any], traced: Traced
) -> tuple[dict[str, np.ndarray], ...]:
    """Returns some hundreds of inputs by their names in files, in batches, checked."""
    found: list[dict[str, np.ndarray]] = []
    rows: list[bytes] = []
    for batch in data:
        arrays = traced.by_name(batch[0] if isinstance(batch, tuple) else batch)
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                told = f"{int((~np.isfinite(array)).sum())} numbers that are not finite"
                advice = f"in {name!r}; expected none. Take these examples out."
                raise ValueError(f"`calibration` has {told} {advice}")
        specs = traced.signature.inputs
        found.append({spec.in_file: arrays[spec.name] for spec in specs})
        values = zip(*arrays.values(), strict=True)
        rows += [b"".join(np.asarray(x).tobytes() for x in row) for row in values]
        if len(rows) >= _MAX_CALIBRATION_EXAMPLES:
            break
    number = len({*rows})
    if not number:
        raise ValueError("`calibration` holds no examples. Pass some tens of training.")
    if number < _MIN_DIFFERENT:
        warnings.warn(
            f"`calibration` holds {number} different example{'s' * (number > 1)} among "
            f"{len(rows)}: the ranges that integers get from so few cut off what lies "
            "outside in others. Pass some tens of different training examples.",
            stacklevel=checks.level_of_user(),
        )
    return tuple(found)
