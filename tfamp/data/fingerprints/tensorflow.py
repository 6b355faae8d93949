"""What counts of datasets, traced functions, Keras layers and lookup tables.

Graphs count with the files that they name, layers and tables with all their state.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data.fingerprints.objects import (
    Files,
    Parts,
    Unordered,
    Unseen,
    attributes,
    configuration,
    files_named,
    is_installed,
)

# Names that a process gives to what it makes, and notes for profilers.
_NAMES = {"metadata", "shared_name", "debug_name", "container"}
_READERS = {"ReadFile", "TextLineDataset", "TFRecordDataset", "TFRecordDatasetV2"}
_READERS |= {"FixedLengthRecordDatasetV2", "TextLineDatasetV2"}
# What may make a name of another, or find one: beside these a reader may read files
# that no constant names.
_NAMING = re.compile(
    "String|Regex|Substr|Join|Lookup|PyFunc|Unicode|Matching|Parse|Sql|Table|"
    "Decode(CSV|Base64|Compressed|Raw)|Generator"
)
# Resources that hold no data of the user's: the state of shuffles and caches.
_STATELESS = ("SeedGenerator", "MemoryCache")
_EXPORTED = (tf.lookup.StaticHashTable, tf.lookup.experimental.MutableHashTable)
TABLES = (
    *_EXPORTED,
    tf.lookup.StaticVocabularyTable,
    tf.lookup.experimental.DenseHashTable,
)
VARIABLES = (tf.Variable, keras.Variable)
_STATE = (*VARIABLES, *TABLES, keras.layers.Layer, np.ndarray, tf.Tensor)


def dataset_parts(dataset: tf.data.Dataset) -> Parts:
    """Yields a dataset by its graph, and the files that the graph names."""
    yield "dataset"
    yield repr(dataset.element_spec)
    yield int(dataset.cardinality())
    try:
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # a state that cannot be written is left out
            strip_device_assignment=True,
        ).numpy()
    except (tf.errors.OpError, ValueError):
        yield Unseen("a dataset that cannot be written as a graph")
        return
    yield from _graph_parts(tf.compat.v1.GraphDef.FromString(text))


def concrete_parts(function: Any) -> Parts:
    """Yields a traced function by its graph, and what it captured."""
    yield "traced function"
    yield from _graph_parts(function.graph.as_graph_def())
    handles = {id(variable.handle) for variable in function.variables}
    yield list(function.variables)
    for captured in function.captured_inputs:
        if captured.dtype != tf.resource:
            yield captured
        elif id(captured) not in handles:
            yield Unseen("a resource that a traced function holds")


def _graph_parts(graph: Any) -> Iterator[Any]:
    functions = {one.signature.name: one for one in graph.library.function}
    files = False
    for part in _nodes(graph.node, functions, {}):
        files |= isinstance(part, Files)
        yield part
    nodes = [*graph.node, *(n for one in functions.values() for n in one.node_def)]
    readers = [node.op for node in nodes if node.op in _READERS]
    # Of two readers one may read the names for the other.
    by_name = files and len(readers) == 1
    if readers and not (by_name and not any(_NAMING.search(n.op) for n in nodes)):
        for name in dict.fromkeys(readers):
            yield Unseen(f"files that {name} reads")


def _nodes(
    nodes: Iterable[Any], functions: Mapping[str, Any], numbers: dict[str, int]
) -> Iterator[Any]:
    """Yields nodes, and where they name a function its nodes.

    Names of nodes and functions count how many this process has made, so each is
    known by the place where it is met first.
    """
    nodes = list(nodes)
    places = {node.name: str(place) for place, node in enumerate(nodes)}
    by_name = {node.name: node for node in nodes}
    tables = [node for node in nodes if node.op == "LookupTableImportV2"]
    in_tables = {name for node in tables for name in node.input[1:3]}
    for node in nodes:
        yield [_renamed(name, places) for name in node.input]
        yield from _called(node.op, functions, numbers)
        if node.name in in_tables:
            continue  # in the order in which TensorFlow found them, which changes
        if node.op == "LookupTableImportV2" and in_tables <= by_name.keys():
            yield pairs(*(_array(by_name[name]) for name in node.input[1:3]))
        for key, attribute in sorted(node.attr.items()):
            if key == "token":
                yield Unseen("a Python function inside a dataset")
            elif attribute.HasField("func"):
                yield from _called(attribute.func.name, functions, numbers)
            elif attribute.tensor.dtype == tf.resource.as_datatype_enum:
                yield from _resource(attribute.tensor)
            elif key not in _NAMES:
                yield key
                yield attribute.SerializeToString(deterministic=True)
                yield from _files(attribute)


def _called(
    name: str, functions: Mapping[str, Any], numbers: dict[str, int]
) -> Iterator[Any]:
    """Yields an operation by name, or a function by what it does."""
    if name not in functions:
        yield name
    elif name in numbers:
        yield numbers[name]
    else:
        numbers[name] = len(numbers)
        function = functions[name]
        yield from _nodes(function.node_def, functions, numbers)
        places = {node.name: str(at) for at, node in enumerate(function.node_def)}
        for _, name in sorted(function.ret.items()):
            yield _renamed(name, places)


def _renamed(name: str, places: Mapping[str, str]) -> str:
    """Returns the input of a node ("^name", "name:output:0") with its place."""
    mark = "^" if name.startswith("^") else ""
    base, colon, output = name.removeprefix("^").partition(":")
    return f"{mark}{places.get(base, base)}{colon}{output}"


def _resource(tensor: Any) -> Iterator[Any]:
    """Names the handle of something that lives in a process, if it may hold data."""
    kinds = [handle.maybe_type_name for handle in tensor.resource_handle_val]
    if not all(any(one in kind for one in _STATELESS) for kind in kinds):
        yield Unseen("a resource that a dataset holds")


def _array(node: Any) -> np.ndarray:
    """Returns the value of a constant."""
    tensor = node.attr["value"].tensor
    dtype = tf.dtypes.as_dtype(tensor.dtype)
    return np.asarray(tf.io.parse_tensor(tensor.SerializeToString(), dtype))


def _files(attribute: Any) -> Iterator[Any]:
    """Yields the files whose names an attribute holds, alone, listed or packed."""
    texts = [attribute.s, *attribute.list.s]
    tensor = attribute.tensor
    if tensor.dtype == tf.string.as_datatype_enum:
        # Longer lists are packed into `tensor_content`, in a form of TensorFlow's.
        found = tf.io.parse_tensor(tensor.SerializeToString(), tf.string)
        texts += list(np.ravel(found))
    yield from files_named(texts)


def layer_parts(layer: keras.layers.Layer) -> Parts:
    """Yields a layer's class, configuration, weights and whatever else it holds."""
    yield "layer"
    yield type(layer)
    yield _without_numbers(configuration(layer))
    yield [np.asarray(weight) for weight in layer.weights]
    own = {
        name: value
        for name, value in attributes(layer).items()
        if name not in _kept_by_keras(isinstance(layer, keras.Model))
    }
    own["layers"] = list(getattr(layer, "layers", ()))
    if is_installed(type(layer).__module__):
        # Its configuration says the rest.
        own = {name: list(_state(value)) for name, value in own.items()}
    containers = (list, tuple, dict)
    yield {n: v for n, v in own.items() if not isinstance(v, containers) or v}


def table_parts(table: Any) -> Parts:
    """Yields what a lookup table holds."""
    yield "table"
    yield type(table)
    if isinstance(table, tf.lookup.StaticVocabularyTable):
        for name in ("_table", "_num_oov_buckets", "_hasher_spec"):
            yield getattr(table, name, None)
        return
    if not isinstance(table, _EXPORTED):
        yield Unseen(f"a {type(table).__name__}")
        return
    try:
        keys, values = (part.numpy() for part in table.export())
    except (tf.errors.OpError, AttributeError):
        yield Unseen(f"a {type(table).__name__} that is not ready")
        return
    yield getattr(table, "_default_value", None)
    yield pairs(keys, values)


def pairs(keys: np.ndarray, values: np.ndarray) -> Any:
    """Returns what a table maps to what, in no order: TensorFlow's changes."""
    if keys.ndim != 1:
        return Unordered(list(zip(keys, values, strict=True)))
    order = np.argsort(keys, kind="stable")
    return keys[order], values[order]


@functools.cache
def _kept_by_keras(is_model: bool) -> frozenset[str]:
    """Returns the attributes that any layer has, which Keras keeps books in."""
    kind = keras.Model if is_model else keras.layers.Layer
    return frozenset({*vars(kind(name="fingerprint")), "built", "_name"})


def _state(value: Any) -> Iterator[Any]:
    """Yields the layers, tables and arrays in an attribute."""
    if isinstance(value, _STATE):
        yield value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _state(value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _state(one)


def _without_numbers(config: Any) -> Any:
    """Returns a configuration whose names do not count layers, as Keras's do."""
    places: dict[str, str] = {}
    for name in _values_of_names(config):
        places.setdefault(name, f"layer {len(places)}")
    return _with_places(config, places)


def _values_of_names(config: Any) -> Iterable[str]:
    """Yields the names of layers in a configuration, in its own order."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key == "name" and isinstance(value, str) and "trainable" in config:
                yield value
            else:
                yield from _values_of_names(value)
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from _values_of_names(value)


def _with_places(config: Any, places: Mapping[str, str]) -> Any:
    if isinstance(config, str):
        return places.get(config, config)
    if isinstance(config, Mapping):
        return {key: _with_places(value, places) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [_with_places(value, places) for value in config]
    return config
