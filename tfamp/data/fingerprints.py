"""Tells whether two pipelines give the same elements, across processes.

A fingerprint counts what makes the elements: the source (files by size and time of
change, arrays by their bytes, datasets by their graph), the graph of all that functions
do in TensorFlow, with constants, tables and variables, the code that they run in
Python, and the versions of the libraries. What cannot be seen is named.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import os
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._elements import blank
from tfamp.data._graphs import Unseen, dataset_parts, files_named

# Hexadecimal digits kept: two of a thousand pipelines agree by chance in 1 of 3e8.
_DIGITS = 12
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, PurePath),
    *(tf.DType, tf.TensorShape, tf.TypeSpec, type(...)),
)
# What the graph of a function holds.
_IN_GRAPHS = (tf.Variable, keras.Variable, keras.layers.Layer, tf.Module)
_FRAMEWORKS = ("tensorflow.", "keras.")
# Notes for readers, and what Python and TensorFlow keep for themselves.
_NO_MEANING = ("__doc__", "__module__", "__dict__", "__weakref__", "__slotnames__")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What tells a pipeline from another one: a digest, and what it only names."""

    digest: str
    unseen: tuple[str, ...] = ()


def fingerprint(
    identity: Any, steps: Sequence[Any], element_spec: Any, version: Any = None
) -> Fingerprint:
    """Returns the fingerprint of a pipeline up to a place.

    Args:
        identity: What tells its source from another one.
        steps: What is done to its elements, dataclasses whose fields count unless they
            have `compare=False`. A step with a `function` or a `predicate` of the
            user's counts by its graph too.
        element_spec: Of the elements that the source gives.
        version: What the user tells caches apart by.
    """
    walk = _Walk()
    names = ("tfamp", "tensorflow", "keras", "numpy")
    versions = [f"{name} {version_of(name)}" for name in names]
    parts: list[Any] = [versions, sys.version_info[:2], identity, steps, version]
    try:
        dataset = _like(element_spec)
        for step in steps:
            for function in functions_of(step):
                if type(function).__module__.startswith("tfamp."):
                    # A step of tfamp's own, whose fields say what it does.
                    parts.append(list(dataset_parts(dataset)))
                    dataset = _like(dataset.map(function).element_spec)
                elif step.name == "filter":
                    dataset = dataset.filter(function)
                else:
                    dataset = dataset.map(function)
        parts.append(list(dataset_parts(dataset)))
    except TypeError:  # nothing can be made up for ragged and sparse elements
        walk.unseen.append("variables and tables of functions on ragged elements")
    digest = walk.digest(parts)
    return Fingerprint(digest.hex()[:_DIGITS], tuple(dict.fromkeys(walk.unseen)))


def _like(element_spec: Any) -> tf.data.Dataset:
    """Returns a dataset of one element of a spec, which holds nothing."""
    return tf.data.Dataset.from_tensors(blank(element_spec, purpose="of a cache"))


def functions_of(step: Any) -> tuple[Callable[..., Any], ...]:
    """Returns the functions that a step calls on elements."""
    found = getattr(step, "functions", None)
    if found is None:
        found = [getattr(step, name, None) for name in ("function", "predicate")]
    return tuple(one for one in found if one is not None)


class _Walk:
    """Digests values, and notes in `unseen` what could not be looked into."""

    def __init__(self) -> None:
        self.unseen: list[str] = []
        # Digest and value by identity; a value that is held has its identity alone.
        self._known: dict[int, tuple[bytes, Any]] = {}

    def digest(self, value: Any) -> bytes:
        """Returns the digest of a value of any kind."""
        if isinstance(value, _LEAVES):
            text = f"{type(value).__name__}:{value!r}"
            return _hash(text.encode(errors="surrogatepass"))
        if isinstance(value, memoryview):
            return _hash(value)
        if isinstance(value, Unseen):
            self.unseen.append(value.name)
            return _hash(f"unseen:{value.name}".encode())
        if id(value) not in self._known:
            self._known[id(value)] = _hash(b"inside itself"), value
            found = [self.digest(part) for part in _parts(value)]
            if isinstance(value, (Mapping, set, frozenset)):
                found.sort()
            self._known[id(value)] = _hash(b"".join(found)), value
        return self._known[id(value)][0]


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
        yield from dataset_parts(value)
    elif hasattr(value, "python_function"):  # of tf.function
        yield value.python_function
    elif isinstance(value, _IN_GRAPHS) or kind.__module__.startswith(_FRAMEWORKS):
        yield kind.__name__
    elif isinstance(value, types.ModuleType):
        yield from (value.__name__, version_of(value.__name__))
        path = getattr(value, "__file__", None)
        if path and not is_installed(value.__name__):
            yield Path(path).read_bytes()
            yield from _modules_of(value)
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, types.CodeType):
        yield from (value.co_code, value.co_names, value.co_varnames, value.co_freevars)
        yield from (value.co_argcount, value.co_kwonlyargcount, value.co_flags)
        yield from value.co_consts
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, type):
        yield from (value.__module__, value.__qualname__, version_of(value.__module__))
        if not is_installed(value.__module__):
            own = {k: v for k, v in vars(value).items() if k not in _NO_MEANING}
            yield from (own, *value.__bases__)
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
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
    yield from (home, function.__qualname__, version_of(home))
    is_named = getattr(sys.modules.get(home), function.__name__, None) is function
    if is_installed(home) and is_named:
        return
    yield from (function.__defaults__, function.__kwdefaults__, function.__code__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            yield "empty"
    if not is_installed(home):
        names = set(_names(function.__code__)) & function.__globals__.keys()
        yield {name: function.__globals__[name] for name in names}


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names that code, and code inside it, looks up."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def _modules_of(module: types.ModuleType) -> Iterator[Any]:
    """Yields the modules that a module of the user's takes names from."""
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
    yield files_named(text for text in texts if isinstance(text, (str, bytes)))


def _object_parts(value: Any) -> Iterator[Any]:
    """Yields the class of an object, and what `pickle` would write of it."""
    yield type(value)
    try:
        made = value.__reduce_ex__(4)
        made = made if isinstance(made, str) else [*made]
        yield [list(m) if isinstance(m, Iterator) else m for m in made]
    except Exception:  # "cannot pickle", in whatever words its author chose
        yield dict(getattr(value, "__dict__", {}))


def _hash(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module came with a package or with Python, and not from the user.

    tfamp counts as installed, wherever it lies.
    """
    package = (module or "__main__").partition(".")[0]
    if package == "__main__":
        return False
    if package in ("tfamp", "builtins") or package in sys.stdlib_module_names:
        return True
    places = [getattr(sys.modules.get(module or ""), "__file__", None)]
    if places == [None]:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            spec = None
        places = [] if spec is None else [spec.origin]
        places += (spec.submodule_search_locations or ()) if spec else ()
    folders = {sysconfig.get_path(key) for key in ("purelib", "platlib")}
    folders.update(site.getsitepackages(), [site.getusersitepackages()])
    found = tuple(os.path.join(os.path.realpath(one), "") for one in folders)
    return any(os.path.realpath(one).startswith(found) for one in places if one)


@functools.cache
def version_of(module: str) -> str:
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
