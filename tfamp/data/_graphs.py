"""What counts of a dataset's graph: operations, constants, files they name."""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

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
# Linux allows no longer path; a text beyond it names no file.
_LONGEST_PATH = 4096

Files = list[tuple[str, int, int]]


@dataclasses.dataclass(frozen=True)
class Unseen:
    """Something that can only be named, as users read it."""

    name: str


def files_named(texts: Iterable[str | bytes]) -> Files:
    """Returns path, bytes and time of change of each file that texts name.

    Texts may be anything; folders are looked up once, so that most texts, which name
    no file, cost little.
    """
    is_folder: dict[str, bool] = {}
    found = {}
    for path in map(os.fsdecode, texts):
        if not path or len(path) > _LONGEST_PATH or "\0" in path or "\n" in path:
            continue
        folder = os.path.dirname(path)
        if folder not in is_folder:
            is_folder[folder] = os.path.isdir(folder or ".")
        if is_folder[folder] and path not in found and os.path.isfile(path):
            stat = os.stat(path)
            found[path] = (path, stat.st_size, stat.st_mtime_ns)
    return list(found.values())


def dataset_parts(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields a dataset by its graph, and the files that the graph names."""
    yield from ("dataset", repr(dataset.element_spec), int(dataset.cardinality()))
    try:
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # a state that cannot be written is left out
            strip_device_assignment=True,
        ).numpy()
    except (tf.errors.OpError, ValueError):
        yield Unseen("a dataset that cannot be written as a graph")
        return
    yield from _Graph(tf.compat.v1.GraphDef.FromString(text)).parts()


class _Graph:
    """A graph whose functions are told by the place where they are met first.

    Names of nodes and functions count how many a process has made.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._functions = {one.signature.name: one for one in graph.library.function}
        self._numbers: dict[str, int] = {}
        self._names_files = False

    def parts(self) -> Iterator[Any]:
        """Yields all that counts, and names what its readers may read."""
        yield from self._nodes(self._graph.node)
        nodes = [*self._graph.node]
        nodes += [n for one in self._functions.values() for n in one.node_def]
        readers = [node.op for node in nodes if node.op in _READERS]
        # Of two readers one may read the names for the other.
        by_name = self._names_files and len(readers) == 1
        if not (by_name and not any(_NAMING.search(node.op) for node in nodes)):
            for name in dict.fromkeys(readers):
                yield Unseen(f"files that {name} reads")

    def _nodes(self, nodes: Iterable[Any], given: Sequence[str] = ()) -> Iterator[Any]:
        nodes = list(nodes)
        places = {node.name: str(place) for place, node in enumerate(nodes)}
        places |= {name: f"given {at}" for at, name in enumerate(given)}
        by_name = {node.name: node for node in nodes}
        tables = [node for node in nodes if node.op == "LookupTableImportV2"]
        in_tables = {name for node in tables for name in node.input[1:3]}
        for node in nodes:
            yield [_renamed(name, places) for name in node.input]
            yield from self._called(node.op)
            if node.name in in_tables:
                continue  # in the order in which TensorFlow found them, which changes
            if node.op == "LookupTableImportV2" and in_tables <= by_name.keys():
                keys, values = (_array(by_name[name]) for name in node.input[1:3])
                order = np.argsort(keys, kind="stable")
                yield from (keys[order], values[order])
            for key, attribute in sorted(node.attr.items()):
                yield from self._attribute(key, attribute)

    def _attribute(self, key: str, attribute: Any) -> Iterator[Any]:
        if key == "token":
            yield Unseen("files and states that Python code in the dataset uses")
        elif attribute.HasField("func"):
            yield from self._called(attribute.func.name)
        elif attribute.tensor.dtype == tf.resource.as_datatype_enum:
            handles = attribute.tensor.resource_handle_val
            kinds = [handle.maybe_type_name for handle in handles]
            if not all(any(one in kind for one in _STATELESS) for kind in kinds):
                yield Unseen("a resource that a dataset holds")
        elif key not in _NAMES:
            yield from (key, attribute.SerializeToString(deterministic=True))
            texts = [attribute.s, *attribute.list.s]
            if attribute.tensor.dtype == tf.string.as_datatype_enum:
                # Longer lists are packed, in a form of TensorFlow's.
                packed = attribute.tensor.SerializeToString()
                texts += list(np.ravel(tf.io.parse_tensor(packed, tf.string)))
            found = files_named(texts)
            self._names_files |= bool(found)
            yield found

    def _called(self, name: str) -> Iterator[Any]:
        """Yields an operation by name, or a function by what it does."""
        if name not in self._functions:
            yield name
        elif name in self._numbers:
            yield self._numbers[name]
        else:
            self._numbers[name] = len(self._numbers)
            function = self._functions[name]
            given = [one.name for one in function.signature.input_arg]
            yield from self._nodes(function.node_def, given)
            places = {node.name: str(at) for at, node in enumerate(function.node_def)}
            places |= {name: f"given {at}" for at, name in enumerate(given)}
            for _, output in sorted(function.ret.items()):
                yield _renamed(output, places)


def _renamed(name: str, places: Mapping[str, str]) -> str:
    """Returns the input of a node ("^name", "name:output:0") with its place."""
    mark = "^" if name.startswith("^") else ""
    base, colon, output = name.removeprefix("^").partition(":")
    return f"{mark}{places.get(base, base)}{colon}{output}"


def _array(node: Any) -> np.ndarray:
    """Returns the value of a constant."""
    tensor = node.attr["value"].tensor
    dtype = tf.dtypes.as_dtype(tensor.dtype)
    return np.asarray(tf.io.parse_tensor(tensor.SerializeToString(), dtype))
