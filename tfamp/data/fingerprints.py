"""Tells whether two pipelines give the same elements, across processes.

A fingerprint counts what Python can see of what makes the elements: values, code with
its constants, closures and globals, classes, layers, graphs, and files by size and time
of change. Installed packages count by version. What cannot be seen is named.

`_parts` describes a value by the name of its kind and by other values. The walk keeps
its own stack, and digests each value once, also where it holds itself.
"""

import copyreg
import dataclasses
import dis
import functools
import hashlib
import importlib.util
import os
import re
import site
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._graphs import (
    Unseen,
    dataset_parts,
    files_named,
    traced_parts,
)

# Hexadecimal digits kept: two of a thousand pipelines agree by chance in 1 of 3e8.
_DIGITS = 12
_LEAVES = (type(None), bool, int, float, complex, str, bytes, type(...))
_LEAF_KINDS = (PurePath, tf.DType, tf.TensorShape, tf.TypeSpec)
# TensorFlow and Keras put lists and dicts of their own in the place of plain ones.
_CONTAINERS = (list, tuple, deque)
# Places in the code, texts for readers, what Python and TensorFlow note for themselves.
_NO_MEANING = re.compile(
    "__(abstractmethods|annotate|annotate_func|annotations|annotations_cache|dict|doc|"
    "firstlineno|module|slotnames|static_attributes|weakref|signature|"
    "original_wrapped)__|"
    "_abc_impl|_tf_decorator|ag_dnc_wrapper__|ag_module|autograph_info__|_self_.*"
)
# What reads files by names that only a run knows.
_READERS = {
    *("open", "read_text", "read_bytes", "GFile", "urlopen", "urlretrieve"),
    *("fromfile", "genfromtxt", "imread", "loadmat", "loadtxt", "memmap"),
    *("read_csv", "read_excel", "read_feather", "read_json", "read_parquet"),
    *("read_pickle", "read_table", "load_img", "dcmread", "read_file"),
    *("TextLineDataset", "TFRecordDataset", "FixedLengthRecordDataset"),
}
_EVALUATORS = {"eval", "exec", "__import__", "import_module"}
_ENVIRONMENT = {"environ", "environb", "getenv"}
_VARIABLES = (tf.Variable, keras.Variable)
_EXPORTED = (tf.lookup.StaticHashTable, tf.lookup.experimental.MutableHashTable)
_TABLES = (
    *_EXPORTED,
    tf.lookup.StaticVocabularyTable,
    tf.lookup.experimental.DenseHashTable,
)
_STATE = (*_VARIABLES, *_TABLES, keras.layers.Layer, np.ndarray, tf.Tensor)


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What tells a pipeline from another one: a digest, and what it only names."""

    digest: str
    unseen: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class _Unordered:
    values: Iterable[Any]


def fingerprint(value: Any) -> Fingerprint:
    """Returns the fingerprint of a value of any kind and of the versions here.

    Fields of tfamp's dataclasses with `compare=False` do not count.

    Example:
        >>> def scaled(factor):
        ...     return fingerprint(lambda x: x * factor).digest
        >>> scaled(2) == scaled(2), scaled(2) == scaled(3)
        (True, False)
    """
    names = ("tfamp", "tensorflow", "keras", "numpy")
    versions = [f"{name} {version(name)}" for name in names]
    walk = _Walk()
    digest = walk.digest_of_all((versions, _own_code(), sys.version_info[:2], value))
    return Fingerprint(digest.hex()[:_DIGITS], tuple(dict.fromkeys(walk.unseen)))


@dataclasses.dataclass(eq=False)
class _Frame:
    value: Any
    parts: Iterator[Any]
    digests: list[bytes] = dataclasses.field(default_factory=list)


class _Walk:
    """Digests values, and notes in `unseen` what could not be looked into."""

    def __init__(self) -> None:
        self.unseen: list[str] = []
        # The user's modules that were met, and the names that code looks up.
        self._modules: dict[int, types.ModuleType] = {}
        self._names: set[str] = set()
        # Digest and value by identity; a value that is held has its identity alone.
        self._known: dict[int, tuple[bytes, Any]] = {}

    def digest_of_all(self, value: Any) -> bytes:
        """Returns the digest of a value, and of what its code finds in modules."""
        found, met = [self.digest(value)], set()
        while True:
            new = [
                (key, name)
                for key, module in self._modules.items()
                for name in sorted(self._names & vars(module).keys())
                if (key, name) not in met and not name.startswith("__")
            ]
            if not new:
                return _hash(b"".join(found))
            met.update(new)
            for key, name in new:
                part = vars(self._modules[key])[name]
                if not _is_environment(part):
                    found += [name.encode(), self.digest(part)]

    def digest(self, value: Any) -> bytes:
        """Returns the digest of a value of any kind, however deep it is."""
        frames: list[_Frame] = [_Frame(None, iter((value,)))]
        depths: dict[int, int] = {}  # of what is being looked into
        while True:
            frame = frames[-1]
            for part in frame.parts:
                found = self._quickly(part, depths)
                if found is None:
                    depths[id(part)] = len(frames)
                    is_set = isinstance(part, _Unordered)
                    parts = iter(part.values) if is_set else self._parts(part)
                    frames.append(_Frame(part, parts))
                    break
                frame.digests.append(found)
            else:
                frames.pop()
                if not frames:
                    return frame.digests[0]
                if isinstance(frame.value, _Unordered):
                    frame.digests.sort()
                found = _hash(b"".join(frame.digests))
                del depths[id(frame.value)]
                self._known[id(frame.value)] = found, frame.value
                frames[-1].digests.append(found)

    def _quickly(self, value: Any, depths: dict[int, int]) -> bytes | None:
        """Returns the digest of what has no parts, or is known or begun already."""
        kind = type(value)
        if kind in _LEAVES or isinstance(value, _LEAF_KINDS):
            text = hex(value) if kind is int else repr(value)
            return _hash(f"{kind.__name__}:{text}".encode(errors="surrogatepass"))
        if kind is memoryview:
            return _hash(value)
        if kind is Unseen:
            self.unseen.append(value.name)
            return _hash(f"unseen:{value.name}".encode())
        if id(value) in self._known:
            return self._known[id(value)][0]
        if id(value) in depths:
            return _hash(f"inside itself:{depths[id(value)]}".encode())
        return None

    def _parts(self, value: Any) -> Iterator[Any]:
        """Yields the name of a value's kind, and what it is made of."""
        if isinstance(value, types.ModuleType):
            yield from self._module_parts(value)
        elif isinstance(value, types.FunctionType):
            yield from self._function_parts(value)
        elif isinstance(value, types.CodeType):
            yield from ("code", value.co_code, getattr(value, "co_exceptiontable", b""))
            yield from (value.co_names, value.co_varnames, value.co_freevars)
            yield from (value.co_argcount, value.co_kwonlyargcount, value.co_flags)
            yield from (value.co_posonlyargcount, value.co_cellvars, value.co_consts)
        elif isinstance(value, types.MethodType):
            yield from ("method", value.__self__, value.__func__)
        elif isinstance(value, type):
            yield from _class_parts(value)
        elif type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic):
            yield from _array_parts(np.asarray(value))
        elif isinstance(value, tf.data.Dataset):
            yield from dataset_parts(value)
        elif isinstance(value, (tf.Tensor, *_VARIABLES)):
            yield from _tensor_parts(value)
        elif isinstance(value, tf.__internal__.CompositeTensor):  # ragged or sparse
            components = tf.nest.flatten(value, expand_composites=True)
            yield from ("tensors", tf.type_spec_from_value(value), components)
        elif isinstance(value, _TABLES):
            yield from _table_parts(value)
        elif isinstance(value, keras.layers.Layer):
            yield from _layer_parts(value)
        elif hasattr(value, "python_function"):
            signature = getattr(value, "input_signature", None)
            yield from ("tf.function", value.python_function, signature)
        elif hasattr(value, "captured_inputs") and hasattr(value, "graph"):
            yield from traced_parts(value)
        else:
            yield from _object_parts(value)

    def _module_parts(self, module: types.ModuleType) -> Iterator[Any]:
        """Yields a module's name; of one of the user's, names count that code uses."""
        yield from ("module", module.__name__)
        if is_installed(module.__name__):
            yield version(module.__name__)
            return
        if str(getattr(module, "__file__", "")).endswith((".so", ".pyd")):
            yield Unseen(f"the code of {module.__name__}")
        self._modules[id(module)] = module

    def _function_parts(self, function: types.FunctionType) -> Iterator[Any]:
        """Yields a function's code and all values that it can reach."""
        home = str(function.__globals__.get("__name__", ""))
        yield from ("function", function.__code__.co_name)
        if is_installed(home):
            yield f"{_name_of(function)} {version(home)}"
            if function.__name__ in _READERS:  # by another name, or handed over itself
                yield Unseen(f"what `{function.__name__}` reads")
            if _is_named(function):
                return
        yield from (function.__defaults__, function.__kwdefaults__)
        yield _meaningful(vars(function))
        code, values = function.__code__, {}
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            try:
                values[name] = cell.cell_contents
            except ValueError:  # a variable that has no value yet
                values[name] = "empty"
        if is_installed(home):
            yield values
            return
        yield code
        names = {name for part in _codes(code) for name in part.co_names}
        self._names |= names
        for name in sorted(names & function.__globals__.keys() - values.keys()):
            values[name] = function.__globals__[name]
        yield {name: one for name, one in values.items() if not _is_environment(one)}
        yield from _unseen_of(function, names)


def _hash(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields code and all code inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _unseen_of(function: types.FunctionType, names: set[str]) -> Iterator[Any]:
    """Yields what only a run of a function can tell."""
    where, known = _name_of(function), function.__globals__
    own = {
        name
        for name in names & known.keys()
        if isinstance(known[name], types.FunctionType)
        and not is_installed(known[name].__module__)
    }
    readers = names & _READERS - own
    modules = [known[name] for name in names & known.keys()]
    modules = [one for one in modules if isinstance(one, types.ModuleType)]
    if "numpy" in {*names, *(one.__name__ for one in modules)}:
        readers |= names & {"load"} - own
    yield from (Unseen(f"what `{name}` reads in {where}") for name in sorted(readers))
    does = sorted(names & _EVALUATORS - own)
    yield from (Unseen(f"what `{name}` does in {where}") for name in does)
    for code in _codes(function.__code__):
        steps = [s for s in dis.get_instructions(code) if s.opname == "IMPORT_NAME"]
        for name in [step.argval for step in steps]:
            if is_installed(name):
                yield f"{name} {version(name)}"
            else:
                yield Unseen(f"what `import {name}` brings in {where}")
    if names & _ENVIRONMENT:
        texts = [t for code in _codes(function.__code__) for t in code.co_consts]
        keys = [os.fsdecode(t) for t in texts if isinstance(t, (str, bytes))]
        keys = [key for key in keys if key.isidentifier()]
        yield {key: os.environ.get(key) for key in keys}
        if not keys:
            yield Unseen(f"`os.environ` in {where}")


def _is_environment(value: Any) -> bool:
    """Whether a value is the environment as a whole, of which single names count."""
    whole = (os.environ, getattr(os, "environb", None), os.getenv)
    return value is not None and any(value is one for one in whole)


def _meaningful(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in attributes.items() if not _NO_MEANING.fullmatch(k)}


def _array_parts(array: np.ndarray) -> Iterator[Any]:
    yield f"array {array.dtype} {array.shape}"
    if array.dtype.hasobject:
        texts = array.ravel().tolist()
        yield from texts
    else:
        yield np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
        texts = array.ravel().tolist() if array.dtype.kind in "SU" else []
    yield files_named(text for text in texts if isinstance(text, (str, bytes)))


def _tensor_parts(value: Any) -> Iterator[Any]:
    yield "tensor"
    try:
        if value.dtype in (tf.resource, tf.variant):
            raise TypeError
        yield np.asarray(value)
    except (NotImplementedError, TypeError, ValueError, tf.errors.OpError):
        yield Unseen("a tensor without a value")


def _table_parts(table: Any) -> Iterator[Any]:
    yield from ("table", type(table))
    if isinstance(table, tf.lookup.StaticVocabularyTable):
        held = ("_table", "_num_oov_buckets", "_hasher_spec")
        yield [getattr(table, name, None) for name in held]
        return
    try:
        if not isinstance(table, _EXPORTED):
            raise AttributeError
        keys, values = (part.numpy() for part in table.export())
    except (tf.errors.OpError, AttributeError):
        yield Unseen(f"a {type(table).__name__}")
        return
    yield getattr(table, "_default_value", None)
    yield _Unordered(list(zip(keys.tolist(), values.tolist(), strict=True)))


def _layer_parts(layer: keras.layers.Layer) -> Iterator[Any]:
    """Yields a layer's class, configuration, weights and whatever else it holds."""
    config = _configuration(layer)
    yield from ("layer", type(layer), _renamed(config, dict(_names_in(config))))
    yield [np.asarray(weight) for weight in layer.weights]
    plain = _kept_by_keras(isinstance(layer, keras.Model))
    own = {k: v for k, v in _meaningful(vars(layer)).items() if k not in plain}
    own["layers"] = list(getattr(layer, "layers", ()))
    if is_installed(type(layer).__module__):  # its configuration says the rest
        own = {name: list(_state(value)) for name, value in own.items()}
    empty = (list, tuple, dict)
    yield {k: v for k, v in own.items() if not isinstance(v, empty) or v}


@functools.cache
def _kept_by_keras(is_model: bool) -> frozenset[str]:
    """Returns the attributes that any layer has, which Keras keeps books in."""
    kind = keras.Model if is_model else keras.layers.Layer
    return frozenset({*vars(kind(name="fingerprint")), "built", "_name"})


def _state(value: Any) -> Iterator[Any]:
    """Yields the layers, tables and arrays in an attribute."""
    if isinstance(value, _STATE):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        inner = value.values() if isinstance(value, Mapping) else value
        for one in list(inner):
            yield from _state(one)


def _names_in(config: Any) -> Iterator[tuple[str, str]]:
    """Yields the names of layers in a configuration, which count them, without that."""
    if isinstance(config, Mapping):
        name = config.get("name")
        if isinstance(name, str) and "trainable" in config:
            yield name, re.sub(r"_\d+$", "", name)
        for value in config.values():
            yield from _names_in(value)
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from _names_in(value)


def _renamed(config: Any, names: Mapping[str, str]) -> Any:
    if isinstance(config, str):
        return f"layer {list(names).index(config)}" if config in names else config
    if isinstance(config, Mapping):
        return {key: _renamed(value, names) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [_renamed(value, names) for value in config]
    return config


def _configuration(value: Any) -> Any:
    try:
        return value.get_config()
    except Exception:  # the user's code; its attributes count beside it
        return "no configuration"


def _class_parts(value: type) -> Iterator[Any]:
    """Yields what a class is and, where it is the user's, all that is in it."""
    yield from ("class", _name_of(value))
    module = _module_of(value)
    is_made = bool(value.__flags__ & 1 << 9)  # by a program, not written in C
    if is_installed(module) and (_is_named(value) or not is_made):
        yield version(module)
        return
    yield type(value) if type(value) is not type else None
    yield from value.__bases__
    yield _meaningful(vars(value))


def _object_parts(value: Any) -> Iterator[Any]:
    """Yields what counts of an object that is none of the kinds above."""
    kind = type(value)
    is_own = not is_installed(_module_of(kind))
    if isinstance(value, np.ufunc):
        yield f"ufunc {value.__name__}"
        if value.__name__.endswith("(vectorized)"):
            yield Unseen(f"the function that np.frompyfunc made {value.__name__!r} of")
    elif isinstance(value, Mapping) and not is_own:
        items = [(key, value[key]) for key in list(value)]
        factory = getattr(value, "default_factory", None)
        yield from ("mapping", factory, _Unordered(items))
    elif isinstance(value, (set, frozenset)) and not is_own:
        yield from ("set", _Unordered(list(value)))
    elif isinstance(value, _CONTAINERS) and not is_own:
        name = next(one.__name__ for one in _CONTAINERS if isinstance(value, one))
        yield from (name, len(value), *value)
    elif _module_of(kind).startswith("tfamp.") and dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.compare]
        yield from ("record", _name_of(kind))
        yield {name: getattr(value, name) for name in names}
    elif isinstance(value, (staticmethod, classmethod)):
        yield from (kind.__name__, value.__func__)
    elif isinstance(value, property):
        yield from ("property", value.fget, value.fset, value.fdel)
    elif isinstance(value, types.GetSetDescriptorType):
        yield from ("descriptor", _name_of(value.__objclass__), value.__name__)
    elif isinstance(value, weakref.ref):
        yield from ("weak", value())
    elif _name_of(kind) in ("_thread.lock", "_thread.RLock"):
        yield "lock"
    elif callable(getattr(value, "get_config", None)) and not is_own:
        yield from (kind, _configuration(value), list(getattr(value, "variables", ())))
    else:
        yield from ("object", kind, *_reduced(value))
        if is_own or not getattr(value, "__module__", None):
            return
        module = str(value.__module__)
        yield version(module)
        if isinstance(value, types.BuiltinFunctionType) and not is_installed(module):
            yield Unseen(f"the code of {module}.{value.__name__}")


def _reduced(value: Any) -> Iterator[Any]:
    """Yields what `pickle` would write of an object and its attributes, or names it."""
    held = _meaningful(getattr(value, "__dict__", {}))
    yield held
    try:
        reducer = copyreg.dispatch_table.get(type(value))
        made = reducer(value) if reducer else value.__reduce_ex__(4)
        # Items that come by an iterator are taken from it.
        made = made if isinstance(made, str) else [*made]
        yield [list(m) if isinstance(m, Iterator) else m for m in made]
    except Exception:  # "cannot pickle", in whatever words its author chose
        if not held:
            yield Unseen(f"a {_name_of(type(value))}")


def _name_of(value: Any) -> str:
    """Returns the module and the name of a function, a class or an object's class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    module = _module_of(named) if isinstance(named, type) else named.__module__
    return f"{module}.{named.__qualname__}"


def _module_of(kind: type) -> str:
    module = kind.__module__  # a property of the class's own, in some written in C
    return module if isinstance(module, str) else repr(kind).split("'")[1]


def _is_named(value: Any) -> bool:
    """Whether a function or class is found in its module by its name."""
    found: Any = sys.modules.get(str(value.__module__))
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module came with a package or with Python, and not from the user.

    tfamp counts as installed, wherever it lies.
    """
    package = (module or "__main__").partition(".")[0]
    if package == "__main__":
        return False
    if package == "tfamp" or package in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    places = [file] if file else []
    if not places:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            spec = None
        if spec is not None:
            places = [spec.origin] if spec.origin else []
            places += spec.submodule_search_locations or ()
    folders = {sysconfig.get_path(key) for key in ("purelib", "platlib")}
    folders.update(site.getsitepackages(), [site.getusersitepackages()])
    found = tuple(os.path.join(os.path.realpath(one), "") for one in folders)
    return any(os.path.realpath(place).startswith(found) for place in places)


@functools.cache
def version(module: str) -> str:
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


@functools.cache
def _own_code() -> str:
    """Returns a digest of tfamp's own code that makes elements, which may be edited."""
    found = hashlib.blake2b(digest_size=8)
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()
