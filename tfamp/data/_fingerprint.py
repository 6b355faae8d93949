"""Tells whether two pipelines give the same elements, across processes.

Python has no equality of functions that lasts longer than a process. So a function
counts by its bytecode, its defaults, what it closes over and the globals it names,
and so on through the user's own functions; installed packages count by version.
"""

import dataclasses
import functools
import hashlib
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._sources import files_identity

# Hexadecimal digits kept: two of a thousand pipelines agree by chance in 1 of 3e8.
_DIGITS = 12
_INSTALLED = tuple(
    {sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")}
)
_PLAIN = (bool, int, float, complex, str, bytes, Path, tf.DType, tf.TensorShape)


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What was put into a digest, part by part.

    Attributes:
        parts: Name and digest of each part: versions, source, every step.
        unseen: What the digest could only name, not look into.
    """

    parts: tuple[tuple[str, str], ...]
    unseen: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """All parts in one word of 12 hexadecimal digits."""
        text = repr(self.parts).encode()
        return hashlib.blake2b(text).hexdigest()[:_DIGITS]


def fingerprint(parts: Mapping[str, Any]) -> Fingerprint:
    """Returns the fingerprint of named parts and of the versions here.

    Args:
        parts: Values of any kind: numbers, arrays, functions, layers, datasets,
            dataclasses, whose fields with `compare=False` do not count.

    Example:
        >>> def scaled(factor):
        ...     return fingerprint({"map": lambda x: x * factor}).digest
        >>> scaled(2) == scaled(2), scaled(2) == scaled(3)
        (True, False)
    """
    versions = {
        "versions": (
            *(f"{name} {_version(name)}" for name in ("tfamp", "tensorflow", "keras")),
            f"Python {sys.version_info.major}.{sys.version_info.minor}",
        )
    }
    found, unseen = [], []
    for name, value in {**versions, **parts}.items():
        digest = _Digest()
        digest.add(value)
        found.append((name, digest.hash.hexdigest()[:_DIGITS]))
        unseen += digest.unseen
    return Fingerprint(tuple(found), tuple(dict.fromkeys(unseen)))


class _Digest:
    """A hash that takes Python values, and notes those it cannot look into."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b()
        self.unseen: list[str] = []
        # Number and value by identity; a value that is kept keeps its identity.
        self._seen: dict[int, tuple[int, Any]] = {}

    def add(self, value: Any) -> None:
        """Adds a value of any kind."""
        if value is None or isinstance(value, _PLAIN):
            self._text(type(value).__name__, repr(value))
        elif isinstance(value, tf.TypeSpec):
            self._text("spec", repr(value))
        elif isinstance(value, (np.ndarray, np.generic)):
            self._array(np.asarray(value))
        elif isinstance(value, (tf.Tensor, tf.Variable, keras.Variable)):
            self._array(np.asarray(value))
        elif id(value) in self._seen:
            self._text("again", str(self._seen[id(value)][0]))
        else:
            self._seen[id(value)] = len(self._seen), value
            self._compound(value)

    def _compound(self, value: Any) -> None:
        """Adds what may hold itself, which `add` has taken note of."""
        if isinstance(value, Mapping):
            self._text("mapping", str(len(value)))
            for key in sorted(value, key=repr):
                self._all(key, value[key])
        elif isinstance(value, (set, frozenset)):
            self._all("set", *sorted(value, key=repr))
        elif isinstance(value, (list, tuple)):
            self._all(type(value).__name__, len(value), *value)
        elif isinstance(value, tf.data.Dataset):
            self._dataset(value)
        elif isinstance(value, keras.layers.Layer):
            # Keras counts layers in their names.
            config = {k: v for k, v in value.get_config().items() if k != "name"}
            self._all(_name(type(value)), repr(config), value.get_weights())
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, types.ModuleType):
            self._text("module", f"{value.__name__} {_version(value.__name__)}")
        elif isinstance(value, types.MethodType):
            self._all("method", value.__self__, value.__func__)
        elif isinstance(value, functools.partial):
            self._all("partial", value.func, value.args, value.keywords)
        elif isinstance(value, type):
            self._class(value)
        elif hasattr(value, "python_function"):  # a tf.function
            self.add(value.python_function)
        elif dataclasses.is_dataclass(value):
            self.add(_name(type(value)))
            for field in dataclasses.fields(value):
                if field.compare:
                    self._all(field.name, getattr(value, field.name))
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        """Adds an object by its class and its attributes, or by name alone."""
        if isinstance(value, types.BuiltinFunctionType) or (
            callable(value) and not hasattr(value, "__dict__")
        ):
            self._text("builtin", _name(value))
            return
        self.add(type(value))
        if hasattr(value, "__dict__"):
            self.add(vars(value))
        else:
            self.unseen.append(_name(type(value)))

    def _all(self, *values: Any) -> None:
        for value in values:
            self.add(value)

    def _text(self, kind: str, text: str) -> None:
        self.hash.update(f"{kind}:{len(text)}:{text};".encode())

    def _array(self, array: np.ndarray) -> None:
        self._text("array", f"{array.dtype} {array.shape}")
        if array.dtype == object:
            self._all(*array.ravel().tolist())
        else:
            self.hash.update(np.ascontiguousarray(array).view(np.uint8).data)

    def _function(self, function: types.FunctionType) -> None:
        if _is_installed(function.__module__):
            self._text("function", f"{_name(function)} {_version(function.__module__)}")
            return
        self._all("function", function.__code__, function.__defaults__)
        self.add(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # a variable that has no value yet
                self.add("empty")
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                self.add(name)
                self._global(function.__globals__[name], function.__code__)

    def _global(self, value: Any, code: types.CodeType) -> None:
        """Adds a global; of the user's own modules, what the code may use of them."""
        self.add(value)
        if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
            for name in sorted(_names(code)):
                if name in vars(value):
                    self._all(name, vars(value)[name])

    def _code(self, code: types.CodeType) -> None:
        self.hash.update(code.co_code)
        self._all(code.co_names, code.co_varnames, code.co_freevars)
        self._all(*code.co_consts)

    def _class(self, value: type) -> None:
        self._text("class", f"{_name(value)} {_version(value.__module__)}")
        if not _is_installed(value.__module__):
            for name, member in sorted(vars(value).items()):
                if isinstance(member, (types.FunctionType, *_PLAIN)):
                    self._all(name, member)

    def _dataset(self, dataset: tf.data.Dataset) -> None:
        """Adds a dataset by its graph, and the files that the graph names."""
        self._all(repr(dataset.element_spec), int(dataset.cardinality()))
        try:
            text = tf.raw_ops.DatasetToGraphV2(
                input_dataset=tf.data.experimental.to_variant(dataset),
                external_state_policy=1,  # a state that cannot be written is left out
                strip_device_assignment=True,
            ).numpy()
        except (tf.errors.OpError, ValueError):
            self.unseen.append("a dataset that cannot be written as a graph")
            return
        graph = tf.compat.v1.GraphDef.FromString(text)
        functions = {one.signature.name: one for one in graph.library.function}
        self._nodes(graph.node, functions, {})

    def _nodes(
        self,
        nodes: Iterable[Any],
        functions: Mapping[str, Any],
        numbers: dict[str, int],
    ) -> None:
        """Adds nodes, and where they name a function its nodes.

        Names of nodes and functions count how many this process has made, so each
        is known by the place where it is met first.
        """
        nodes = list(nodes)
        places = {node.name: str(place) for place, node in enumerate(nodes)}
        for node in nodes:
            self._all(*(_renamed(name, places) for name in node.input))
            self._called(node.op, functions, numbers)
            for key, attribute in sorted(node.attr.items()):
                if key == "token":
                    self.unseen.append("a Python function inside a dataset")
                elif attribute.HasField("func"):
                    self._called(attribute.func.name, functions, numbers)
                elif key != "metadata" and not _is_resource(attribute):
                    self._all(key, attribute.SerializeToString(deterministic=True))
                    if attribute.tensor.dtype == tf.string.as_datatype_enum:
                        self.add(_files_named(attribute.tensor))

    def _called(
        self, name: str, functions: Mapping[str, Any], numbers: dict[str, int]
    ) -> None:
        """Adds an operation by name, or a function by what it does."""
        if name not in functions:
            self.add(name)
        elif name in numbers:
            self._text("function", str(numbers[name]))
        else:
            numbers[name] = len(numbers)
            function = functions[name]
            self._nodes(function.node_def, functions, numbers)
            places = {
                node.name: str(place) for place, node in enumerate(function.node_def)
            }
            for _, name in sorted(function.ret.items()):
                self.add(_renamed(name, places))


def _renamed(name: str, places: Mapping[str, str]) -> str:
    """Returns the input of a node ("^name", "name:output:0") with its place."""
    mark = "^" if name.startswith("^") else ""
    base, colon, output = name.removeprefix("^").partition(":")
    return f"{mark}{places.get(base, base)}{colon}{output}"


def _is_resource(attribute: Any) -> bool:
    """Whether an attribute holds the handle of something that lives in a process."""
    return bool(attribute.tensor.dtype == tf.resource.as_datatype_enum)


def _files_named(tensor: Any) -> Any:
    """Returns the identity of the files whose names a constant holds."""
    values = [value.decode(errors="replace") for value in tensor.string_val]
    return files_identity([value for value in values if Path(value).is_file()])


def _names(code: types.CodeType) -> set[str]:
    """Returns the names that code and the functions made inside it look up."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*(_names(part) for part in inner))


def _name(value: Callable[..., Any] | type) -> str:
    module = getattr(value, "__module__", "")
    return f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Whether a module came with a package or with Python, and not from the user."""
    loaded = sys.modules.get(module or "")
    file = getattr(loaded, "__file__", None)
    if loaded is None or module == "__main__":
        return False
    return file is None or file.startswith(_INSTALLED)


@functools.cache
def _version(module: str) -> str:
    """Returns the version of the package a module belongs to, "" if it has none."""
    package = re.split(r"\W", module, maxsplit=1)[0]
    known = getattr(sys.modules.get(package), "__version__", None)
    if known:
        return str(known)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
