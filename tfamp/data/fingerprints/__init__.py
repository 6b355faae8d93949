"""Tells whether two pipelines give the same elements, across processes.

A fingerprint counts all that Python can see of what makes the elements: values,
functions, classes, layers, graphs and files, for each of which a file here says what
counts. Installed packages count by version. What cannot be seen is named.

A kind of value is described by a generator of its parts: the name of the kind, then
values, each of which has parts of its own. The walk keeps its own stack, so nothing
is too deep for it, and digests each value once, also where it holds itself.
"""

import collections
import dataclasses
import hashlib
import sys
import types
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data.fingerprints import functions, objects, tensorflow
from tfamp.data.fingerprints.objects import (
    Files,
    Names,
    Parts,
    Unordered,
    Unseen,
    files_named,
)

# Hexadecimal digits kept: two of a thousand pipelines agree by chance in 1 of 3e8.
_DIGITS = 12
_CONTAINERS = (list, tuple, collections.deque)
_SETS = (set, frozenset)
_ARRAYS = (np.ndarray, np.memmap)
_DIGEST_BYTES = 16
_LEAVES = (type(None), bool, int, float, complex, str, bytes, type(...))
_LEAF_KINDS = (PurePath, tf.DType, tf.TensorShape, tf.TypeSpec)


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What tells a pipeline from another one.

    Attributes:
        digest: 12 hexadecimal digits.
        unseen: What the digest could only name, not look into.
    """

    digest: str
    unseen: tuple[str, ...] = ()


def fingerprint(value: Any) -> Fingerprint:
    """Returns the fingerprint of a value and of the versions here.

    Values are of any kind: numbers, arrays, functions, layers, datasets, containers of
    these, dataclasses of tfamp, whose fields with `compare=False` do not count.

    Example:
        >>> def scaled(factor):
        ...     return fingerprint(lambda x: x * factor).digest
        >>> scaled(2) == scaled(2), scaled(2) == scaled(3)
        (True, False)
    """
    names = ("tfamp", "tensorflow", "keras", "numpy")
    versions = (
        *(f"{name} {objects.version(name)}" for name in names),
        f"tfamp's code {objects.own_code()}",
        f"Python {sys.version_info.major}.{sys.version_info.minor}",
    )
    walk = _Walk()
    digest = walk.digest_of_all((versions, value)).hex()[:_DIGITS]
    return Fingerprint(digest, tuple(dict.fromkeys(one.name for one in walk.unseen)))


@dataclasses.dataclass(eq=False)
class _Frame:
    value: Any
    parts: Parts
    digests: list[bytes] = dataclasses.field(default_factory=list)


class _Walk:
    """Digests values, and notes what could not be looked into.

    Attributes:
        unseen: What was met and could only be named.
    """

    def __init__(self) -> None:
        self.unseen: list[Unseen] = []
        # Of the user's: modules by identity, and what code that was met looks up.
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
                if not functions.is_environment(part):
                    found += [name.encode(), self.digest(part)]

    def digest(self, value: Any) -> bytes:
        """Returns the digest of a value of any kind."""
        frames = [_Frame(None, iter((value,)))]
        depths: dict[int, int] = {}
        while True:
            frame = frames[-1]
            for part in frame.parts:
                found = self._quickly(part, depths)
                if found is None:
                    depths[id(part)] = len(frames)
                    is_set = isinstance(part, Unordered)
                    parts = iter(part.values) if is_set else _parts_of(part)
                    frames.append(_Frame(part, parts))
                    break
                frame.digests.append(found)
            else:
                frames.pop()
                if not frames:
                    return frame.digests[0]
                if isinstance(frame.value, Unordered):
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
            self.unseen.append(value)
            return _hash(f"unseen:{value.name}".encode())
        if kind is Names:
            self._names |= value.names
            return b""
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if kind is Files:
            return _hash(f"files:{value.identities!r}".encode(errors="surrogatepass"))
        if id(value) in self._known:
            return self._known[id(value)][0]
        if id(value) in depths:
            return _hash(f"inside itself:{depths[id(value)]}".encode())
        return None

    def _module(self, module: types.ModuleType) -> bytes:
        """Returns the digest of a module's name, and notes one of the user's."""
        name = module.__name__
        if objects.is_installed(name):
            return _hash(f"module:{name} {objects.version(name)}".encode())
        if str(getattr(module, "__file__", "")).endswith((".so", ".pyd")):
            self.unseen.append(Unseen(f"the code of {name}"))
        self._modules[id(module)] = module
        return _hash(f"module:{name}".encode())


def _hash(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _parts_of(value: Any) -> Parts:
    """Returns the parts of a value, the name of its kind first."""
    kind = type(value)
    if isinstance(value, types.FunctionType):
        return functions.function_parts(value)
    if isinstance(value, types.CodeType):
        return functions.code_parts(value)
    if isinstance(value, types.MethodType):
        return iter(("method", value.__self__, value.__func__))
    if isinstance(value, type):
        return objects.class_parts(value)
    if kind in _ARRAYS or isinstance(value, np.generic):
        return _array_parts(np.asarray(value))
    if isinstance(value, tf.data.Dataset):
        return tensorflow.dataset_parts(value)
    if isinstance(value, (tf.Tensor, *tensorflow.VARIABLES)):
        return _tensor_parts(value)
    if isinstance(value, tf.__internal__.CompositeTensor):  # ragged or sparse
        components = tf.nest.flatten(value, expand_composites=True)
        return iter(("tensors", tf.type_spec_from_value(value), components))
    if isinstance(value, tensorflow.TABLES):
        return tensorflow.table_parts(value)
    if isinstance(value, keras.layers.Layer):
        return tensorflow.layer_parts(value)
    if hasattr(value, "python_function"):
        signature = getattr(value, "input_signature", None)
        return iter(("tf.function", value.python_function, signature))
    if hasattr(value, "captured_inputs") and hasattr(value, "graph"):
        return tensorflow.concrete_parts(value)
    if objects.is_installed(objects.module_of(kind)):
        return _installed_parts(value)
    return objects.object_parts(value)


def _installed_parts(value: Any) -> Parts:
    """Returns the parts of an object whose class is not the user's."""
    kind = type(value)
    if isinstance(value, np.ufunc):
        made = f"the function that np.frompyfunc made {value.__name__!r} of"
        is_made = value.__name__.endswith("(vectorized)")
        return iter(("ufunc", value.__name__, *([Unseen(made)] if is_made else [])))
    if isinstance(value, Mapping):
        items = [(key, value[key]) for key in list(value)]
        factory = getattr(value, "default_factory", None)
        return iter(("mapping", factory, Unordered(items)))
    if isinstance(value, _SETS):
        return iter(("set", Unordered(list(value))))
    if isinstance(value, _CONTAINERS):
        # TensorFlow and Keras put lists of their own in the place of plain ones.
        name = next(one.__name__ for one in _CONTAINERS if isinstance(value, one))
        return iter((name, len(value), *value))
    if objects.module_of(kind).startswith("tfamp.") and dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.compare]
        held = {name: getattr(value, name) for name in fields}
        return iter(("record", objects.name_of(kind), held))
    return objects.object_parts(value)


def _array_parts(array: np.ndarray) -> Parts:
    yield "array"
    yield f"{array.dtype} {array.shape}"
    if array.dtype.hasobject:
        items = array.ravel().tolist()
        yield from items
        texts = [item for item in items if isinstance(item, (str, bytes))]
    else:
        yield np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
        texts = array.ravel().tolist() if array.dtype.kind in "SU" else []
    yield from files_named(texts)


def _tensor_parts(value: Any) -> Parts:
    yield "tensor"
    dtype = getattr(value, "dtype", None)
    if dtype in (tf.resource, tf.variant):
        yield Unseen(f"a tensor of {dtype.name}")
        return
    try:
        array = np.asarray(value)
    except (NotImplementedError, TypeError, ValueError, tf.errors.OpError):
        yield Unseen("a tensor without a value")
        return
    yield array
