"""Tells whether two pipelines give the same elements, across processes.

A fingerprint counts the source (files by size and time of change, arrays by their
bytes, datasets by their graph), the graph of all that functions do in TensorFlow, with
constants, tables and variables, the code that they run in Python, and the versions of
the libraries. What cannot be seen is named.
"""

import dataclasses
import functools
import hashlib
import os
import re
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._elements import blank

# Hexadecimal digits kept: two of a thousand pipelines agree by chance in 1 of 3e8.
_DIGITS = 12
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, PurePath),
    *(tf.DType, tf.TensorShape, tf.TypeSpec, type(...)),
)
# What the graph of a function holds.
_IN_GRAPHS = (tf.Variable, keras.Variable, keras.layers.Layer, tf.Module)
# What Python keeps for itself in a class.
_NO_MEANING = ("__doc__", "__slotnames__", "__firstlineno__")
# Names that a process gives to what it makes, and notes for profilers.
_NAMES = {"metadata", "shared_name", "debug_name", "container"}
_READER = re.compile("ReadFile|(TextLine|TFRecord|FixedLengthRecord)Dataset")
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
    """Returns the fingerprint of a pipeline up to a place.

    Of its source by the identity, and of the steps, dataclasses whose fields count
    unless they have `compare=False`. Functions and predicates count by their graph too.
    """
    walk = _Walk()
    names = ("tfamp", "tensorflow", "keras", "numpy")
    versions = [f"{name} {_version_of(name)}" for name in names]
    parts: list[Any] = [versions, sys.version_info[:2], identity, steps, version]
    try:
        dataset = _like(element_spec)
        for step in steps:
            for function in _functions_of(step):
                if type(function).__module__.startswith("tfamp."):
                    # A step of tfamp's own, whose fields say what it does.
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


def _functions_of(step: Any) -> list[Callable[..., Any]]:
    """Returns the functions that a step calls on elements."""
    names = ("function", "predicate")
    found = getattr(step, "functions", None) or [getattr(step, n, None) for n in names]
    return [one for one in found if one is not None]


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
    """Yields what a value is made of."""
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
    elif isinstance(value, _IN_GRAPHS) or kind.__module__.startswith(
        ("tensorflow.", "keras.")
    ):
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
        yield from (value.__module__, value.__qualname__)
        yield _version_of(value.__module__)
        if not _is_installed(value.__module__):
            own = {k: v for k, v in vars(value).items() if k not in _NO_MEANING}
            yield from (own, *value.__bases__)
    elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
        yield from (getattr(value, "__self__", None), value.__func__)
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif dataclasses.is_dataclass(value) and kind.__module__.startswith("tfamp."):
        names = [field.name for field in dataclasses.fields(value) if field.compare]
        yield from (kind.__qualname__, {name: getattr(value, name) for name in names})
    else:
        yield from _object_parts(value)


def _function_parts(function: types.FunctionType) -> Iterator[Any]:
    """Yields a function's code and all values that it can reach."""
    home = str(function.__module__)
    yield from (home, function.__qualname__, _version_of(home))
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
    """Yields the names that code, and code inside it, looks up."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def _module_parts(module: types.ModuleType) -> Iterator[Any]:
    """Yields a module, and those that one of the user's takes names from."""
    yield from (module.__name__, _version_of(module.__name__))
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


def _object_parts(value: Any) -> Iterator[Any]:
    """Yields the class of an object, and what `pickle` would write of it."""
    yield type(value)
    try:
        made = value.__reduce_ex__(4)
        made = made if isinstance(made, str) else [*made]
        yield [list(m) if isinstance(m, Iterator) else m for m in made]
    except Exception:  # "cannot pickle", in whatever words its author chose
        yield dict(getattr(value, "__dict__", {}))


def _dataset_parts(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields a dataset by its graph, and the files that the graph names."""
    yield from ("dataset", repr(dataset.element_spec), int(dataset.cardinality()))
    try:
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # a state that cannot be written is left out
            strip_device_assignment=True,
        ).numpy()
    except (tf.errors.OpError, ValueError):
        yield _Unseen("a dataset that cannot be written as a graph")
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
        functions = self._functions.values()
        names = [node.op for node in self._graph.node]
        names += [node.op for one in functions for node in one.node_def]
        readers = [name for name in names if _READER.match(name)]
        # Of two readers one may read the names for the other.
        is_known = self._names_files and len(readers) == 1
        if not is_known or any(map(_NAMING.search, names)):
            for name in dict.fromkeys(readers):
                yield _Unseen(f"files that {name} reads")

    def _nodes(
        self, nodes: Sequence[Any], given: Sequence[str] = (), ends: Sequence[str] = ()
    ) -> Iterator[Any]:
        """Yields nodes, whose inputs are named by their places, and then the ends."""
        places = {node.name: str(place) for place, node in enumerate(nodes)}
        places |= {name: f"given {at}" for at, name in enumerate(given)}

        def renamed(name: str) -> str:  # of "^name" or "name:output:0"
            mark = "^" if name.startswith("^") else ""
            base, colon, output = name.removeprefix("^").partition(":")
            return f"{mark}{places.get(base, base)}{colon}{output}"

        by_name = {node.name: node for node in nodes}
        tables = [node for node in nodes if node.op == "LookupTableImportV2"]
        in_tables = {name for node in tables for name in node.input[1:3]}
        for node in nodes:
            yield [renamed(name) for name in node.input]
            yield from self._called(node.op)
            if node.name in in_tables:
                continue  # in the order in which TensorFlow found them, which changes
            if node.op == "LookupTableImportV2" and in_tables <= by_name.keys():
                keys, values = (
                    _constant(by_name[name].attr["value"].tensor)
                    for name in node.input[1:3]
                )
                order = np.argsort(keys, kind="stable")
                yield from (keys[order], values[order])
            for key, attribute in sorted(node.attr.items()):
                yield from self._attribute(key, attribute)
        yield [renamed(name) for name in ends]

    def _attribute(self, key: str, attribute: Any) -> Iterator[Any]:
        if key == "token":
            yield _Unseen("files and states that Python code in the dataset uses")
        elif attribute.HasField("func"):
            yield from self._called(attribute.func.name)
        elif attribute.tensor.dtype == tf.resource.as_datatype_enum:
            handles = attribute.tensor.resource_handle_val
            kinds = [handle.maybe_type_name for handle in handles]
            if not all(any(one in kind for one in _STATELESS) for kind in kinds):
                yield _Unseen("a resource that a dataset holds")
        elif key not in _NAMES:
            yield from (key, attribute.SerializeToString(deterministic=True))
            texts = [attribute.s, *attribute.list.s]
            if attribute.tensor.dtype == tf.string.as_datatype_enum:
                texts += list(np.ravel(_constant(attribute.tensor)))
            found = _files_named(texts)
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
            ends = [output for _, output in sorted(function.ret.items())]
            yield from self._nodes(function.node_def, given, ends)


def _constant(tensor: Any) -> np.ndarray:
    """Returns the value of a tensor of a graph, which may be packed."""
    dtype = tf.dtypes.as_dtype(tensor.dtype)
    return np.asarray(tf.io.parse_tensor(tensor.SerializeToString(), dtype))


def _files_named(texts: Iterable[str | bytes]) -> list[tuple[str, int, int]]:
    """Returns path, bytes and time of change of each file that texts name."""
    is_folder: dict[str, bool] = {}  # so that most texts, which name none, cost little
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


@functools.cache
def _is_installed(name: str) -> bool:
    """Whether a module came with a package or with Python, and not from the user.

    tfamp counts as installed, wherever it lies.
    """
    package = name.partition(".")[0]
    if package in ("tfamp", "builtins") or package in sys.stdlib_module_names:
        return package != "__main__"
    path = getattr(sys.modules.get(name), "__file__", None)
    folders = {sysconfig.get_path(key) for key in ("purelib", "platlib")}
    folders.update(site.getsitepackages(), [site.getusersitepackages()])
    found = tuple(os.path.join(os.path.realpath(one), "") for one in folders)
    return path is not None and os.path.realpath(path).startswith(found)


@functools.cache
def _version_of(module: str) -> str:
    """Returns the version of the installed package of a module, "" if it has none."""
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return ""
    for name in (package, *_distributions().get(package, ())):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return str(getattr(sys.modules.get(package), "__version__", ""))


# Asks every package, so once.
_distributions = functools.cache(metadata.packages_distributions)
