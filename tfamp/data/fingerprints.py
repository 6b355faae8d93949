"""Tells whether two pipelines give the same elements, across processes.

A fingerprint counts the source (files by size and time of change, arrays by their
bytes, datasets by their graph), the graph of all that functions do in TensorFlow, with
constants, tables and variables, the code that they run in Python, and the versions of
the libraries. What cannot be seen is named.
"""

import dataclasses
import hashlib
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._elements import blank
from tfamp.records.versions import installed_versions

# Hexadecimal digits kept: two of a thousand pipelines agree by chance in 1 of 3e8.
_DIGITS = 12
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, PurePath),
    *(tf.DType, tf.TensorShape, tf.TypeSpec, type(...)),
)
_IN_GRAPHS = (tf.Variable, keras.Variable, keras.layers.Layer, tf.Module)
_NO_MEANING = ("__doc__", "__slotnames__", "__firstlineno__")
_READER = re.compile("ReadFile|(TextLine|TFRecord|FixedLengthRecord)Dataset")
# What may make a name of another, or find one: beside these a reader may read files
# that no constant names.
_NAMING = re.compile(
    "String|Regex|Substr|Join|Lookup|PyFunc|Unicode|Matching|Parse|Sql|Table|"
    "Decode(CSV|Base64|Compressed|Raw)|Generator"
)
# Resources that hold no data of the user's: the state of shuffles and caches.
_STATELESS = ("SeedGenerator", "MemoryCache")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What tells a pipeline from another one: a digest, and what it only names."""

    digest: str
    unseen: tuple[str, ...] = ()


class _Unseen(str):
    """Something that can only be named, as users read it."""


def fingerprint(
    identity: Any, steps: Sequence[Any], element_spec: Any, version: Any = None
) -> Fingerprint:
    """Returns the fingerprint of a pipeline up to a place."""
    walk = _Walk()
    parts = [list(installed_versions().items()), identity, steps, version]
    try:
        dataset = _like(element_spec)
        for step in steps:
            names = ("function", "predicate")
            one_by_one = [getattr(step, name, None) for name in names]
            for function in getattr(step, "functions", filter(None, one_by_one)):
                if type(function).__module__.startswith("tfamp."):
                    parts.append(list(_dataset_parts(dataset)))
                    dataset = _like(dataset.map(function).element_spec)
                elif step.name == "filter":
                    dataset = dataset.filter(function)
                else:
                    dataset = dataset.map(function)
        parts.append(list(_dataset_parts(dataset)))
    except TypeError:  # nothing can be made up for ragged and sparse elements
        walk.unseen.append("variables and tables of functions on ragged elements")
    digest = walk.digest(parts)
    return Fingerprint(digest.hex()[:_DIGITS], tuple(dict.fromkeys(walk.unseen)))


def _like(element_spec: Any) -> tf.data.Dataset:
    """Returns a dataset of one element of a spec, which holds nothing."""
    return tf.data.Dataset.from_tensors(blank(element_spec, purpose="of a cache"))


class _Walk:
    """Digests values, and notes in `unseen` what could not be looked into."""

    def __init__(self) -> None:
        self.unseen: list[str] = []
        # Digest and value by identity; a value that is held has its identity alone.
        self._known: dict[int, tuple[bytes, Any]] = {}

    def digest(self, value: Any) -> bytes:
        """Returns the digest of a value of any kind."""
        if isinstance(value, _Unseen):
            self.unseen.append(str(value))
        if isinstance(value, _LEAVES):
            text = f"{type(value).__name__}:{value!r}"
            return _hash(text.encode(errors="surrogatepass"))
        if isinstance(value, memoryview):
            return _hash(value)
        if id(value) not in self._known:
            self._known[id(value)] = _hash(b"inside itself"), value
            found = [self.digest(part) for part in _parts(value)]
            if isinstance(value, (Mapping, set, frozenset)):
                found.sort()
            self._known[id(value)] = _hash(b"".join(found)), value
        return self._known[id(value)][0]


def _hash(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _parts(value: Any) -> Iterator[Any]:
    kind = type(value)
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from (len(value), *value)
    elif isinstance(value, (np.ndarray, np.generic)):
        yield from _array_parts(np.asarray(value))
    elif isinstance(value, tf.Tensor) and value.dtype not in (tf.resource, tf.variant):
        yield from _array_parts(np.asarray(value))
    elif isinstance(value, tf.data.Dataset):
        yield from _dataset_parts(value)
    elif hasattr(value, "python_function"):  # of tf.function
        yield value.python_function
    elif isinstance(value, _IN_GRAPHS) or _package(kind) in ("tensorflow", "keras"):
        yield kind.__name__
    elif isinstance(value, types.ModuleType):
        yield from _module_parts(value)
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, types.CodeType):
        yield from (value.co_code, value.co_names, value.co_varnames, value.co_freevars)
        yield from (value.co_argcount, value.co_kwonlyargcount, value.co_flags)
        yield from value.co_consts
    elif isinstance(value, type):
        yield from _of_home(value)
        if not _is_installed(value.__module__):
            own = {k: v for k, v in vars(value).items() if k not in _NO_MEANING}
            yield from (own, *value.__bases__)
    elif isinstance(value, (types.MethodType, staticmethod, classmethod, property)):
        inside = ("__self__", "__func__", "fget", "fset")
        yield from (getattr(value, name, None) for name in inside)
    elif dataclasses.is_dataclass(value) and _package(kind) == "tfamp":
        names = [field.name for field in dataclasses.fields(value) if field.compare]
        yield from (kind.__qualname__, {name: getattr(value, name) for name in names})
    else:  # its class, and what `pickle` would write of it
        yield kind
        try:
            made = value.__reduce_ex__(4)
            made = made if isinstance(made, str) else [*made]
            yield [list(m) if isinstance(m, Iterator) else m for m in made]
        except Exception:  # "cannot pickle", in whatever words its author chose
            yield dict(getattr(value, "__dict__", {}))


def _of_home(value: Any) -> Iterator[Any]:
    """Yields where a class or function is from, and the version of its package."""
    home = sys.modules.get(_package(value))
    version = str(getattr(home, "__version__", ""))
    yield from (value.__module__, value.__qualname__, version)


def _function_parts(function: types.FunctionType) -> Iterator[Any]:
    home = str(function.__module__)
    yield from _of_home(function)
    is_named = getattr(sys.modules.get(home), function.__name__, None) is function
    if _is_installed(home) and is_named:
        return
    yield from (function.__defaults__, function.__kwdefaults__, function.__code__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            yield "empty"
    if not _is_installed(home):
        names = set(_names(function.__code__)) & function.__globals__.keys()
        yield {name: function.__globals__[name] for name in names}


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def _module_parts(module: types.ModuleType) -> Iterator[Any]:
    """Yields a module, and those that one of the user's takes names from."""
    yield from (module.__name__, str(getattr(module, "__version__", "")))
    path = getattr(module, "__file__", None)
    if not path or _is_installed(module.__name__):
        return
    yield Path(path).read_bytes()
    for _, value in sorted(vars(module).items(), key=lambda item: item[0]):
        if isinstance(value, types.ModuleType):
            yield value
        elif isinstance(value, (types.FunctionType, type)):
            yield sys.modules.get(value.__module__)


def _array_parts(array: np.ndarray) -> Iterator[Any]:
    yield f"array {array.dtype} {array.shape}"
    texts = array.ravel().tolist() if array.dtype.kind in "OSU" else []
    if array.dtype.hasobject:
        yield texts
    else:
        yield np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
    yield _files_named(text for text in texts if isinstance(text, (str, bytes)))


def _dataset_parts(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields TensorFlow's own fingerprint of a dataset, constants and files."""
    yield from ("dataset", repr(dataset.element_spec), int(dataset.cardinality()))
    try:
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # a state that cannot be written is left out
            strip_device_assignment=True,
        ).numpy()
        graph = tf.compat.v1.GraphDef.FromString(text)
        yield from _graph_parts(graph)  # which takes the numbers of Python's calls out
        again = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
        yield int(tf.raw_ops.DatasetFingerprint(input_dataset=again))
    except (tf.errors.OpError, ValueError):
        yield _Unseen("a dataset that cannot be written as a graph")


def _graph_parts(graph: Any) -> Iterator[Any]:
    """Yields the constants of a graph, and names what its readers may read."""
    nodes = [*graph.node]
    nodes += [node for one in graph.library.function for node in one.node_def]
    tables = [node for node in nodes if node.op == "LookupTableImportV2"]
    in_tables = [name for node in tables for name in node.input[1:3]]
    found: list[bytes] = []  # of the graph itself, in its order
    inside: list[bytes] = []  # of functions, which come in any
    files: list[Any] = []
    tabled: dict[str, np.ndarray] = {}
    for at, node in enumerate(nodes):
        tensor = node.attr["value"].tensor if node.op == "Const" else None
        if "token" in node.attr:
            node.attr["token"].s = b""
            yield _Unseen("files and states that Python code in the dataset uses")
        elif tensor is None:
            continue
        elif tensor.dtype == tf.resource.as_datatype_enum:
            kinds = [one.maybe_type_name for one in tensor.resource_handle_val]
            if not all(any(one in kind for one in _STATELESS) for kind in kinds):
                yield _Unseen("a resource that a dataset holds")
        else:
            dtype = tf.dtypes.as_dtype(tensor.dtype)  # the tensor may be packed
            value = np.asarray(tf.io.parse_tensor(tensor.SerializeToString(), dtype))
            if value.dtype.hasobject:
                files += _files_named(value.ravel().tolist())
            if node.name in in_tables:
                tabled[node.name] = value
            else:
                own = found if at < len(graph.node) else inside
                own.append(_Walk().digest(value))
    for node in tables:
        keys, values = (tabled.get(name, np.zeros(0)) for name in node.input[1:3])
        order = np.argsort(keys, kind="stable")  # TensorFlow's own changes
        found.append(_Walk().digest([keys[order], values[order]]))
    yield from (found, sorted(inside), files)
    readers = [node.op for node in nodes if _READER.match(node.op)]
    # Of two readers one may read the names for the other.
    is_known = files and len(readers) == 1
    if not is_known or any(_NAMING.search(node.op) for node in nodes):
        for name in dict.fromkeys(readers):
            yield _Unseen(f"files that {name} reads")


def _files_named(texts: Iterable[str | bytes]) -> list[tuple[str, int, int]]:
    """Returns path, bytes and time of change of each file that texts name."""
    is_folder: dict[str, bool] = {}  # so that most texts, which name none, cost little
    found = {}
    for path in map(os.fsdecode, texts):
        if not path or len(path) > 4096 or "\0" in path or "\n" in path:
            continue
        folder = os.path.dirname(path)
        if folder not in is_folder:
            is_folder[folder] = os.path.isdir(folder or ".")
        if is_folder[folder] and path not in found and os.path.isfile(path):
            stat = os.stat(path)
            found[path] = (path, stat.st_size, stat.st_mtime_ns)
    return list(found.values())


def _package(value: Any) -> str:
    return str(value.__module__).partition(".")[0]


def _is_installed(name: str) -> bool:
    package = name.partition(".")[0]
    if package in ("tfamp", "builtins") or package in sys.stdlib_module_names:
        return package != "__main__"
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)
