"""What counts of classes, and of objects that are no function, layer or dataset.

What came with a package counts by the package's version; what is the user's counts by
all that it holds. The parts of a value are the name of its kind and values, among them
those that are described here.
"""

import builtins
import copyreg
import dataclasses
import functools
import hashlib
import importlib.util
import os
import site
import sys
import sysconfig
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

# Places in the code, texts for readers, and what Python notes for itself.
_NO_MEANING = {
    "__abstractmethods__",
    "__annotate__",
    "__annotate_func__",
    "__annotations__",
    "__annotations_cache__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__static_attributes__",
    "__weakref__",
    "_abc_impl",
}
_DESCRIPTORS = (
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
_LOCKS = ("_thread.lock", "_thread.RLock")
_PROTOCOL = 4
_FOLDERS = ("stdlib", "platstdlib", "purelib", "platlib")
# The flag of classes that a program made, as against those written in C.
_MADE = 1 << 9
# Linux allows no longer path; a text beyond it names no file.
_LONGEST_PATH = 4096

Parts = Iterator[Any]


@dataclasses.dataclass(frozen=True)
class Unseen:
    """Something that can only be named, as users read it."""

    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Unordered:
    """Values whose order does not count."""

    values: Iterable[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Names:
    """What code looks up, which also counts in the user's modules that it uses."""

    names: set[str]


@dataclasses.dataclass(frozen=True, eq=False)
class Files:
    """Path, bytes and nanoseconds of the last change of each file that texts name."""

    identities: tuple[tuple[str, int, int], ...]


def files_named(texts: Iterable[str | bytes]) -> Iterator[Files]:
    """Yields the files that texts name, if there are any.

    Texts may be anything; folders are looked up once, so that most texts, which name
    no file, cost little.
    """
    is_folder: dict[str, bool] = {}
    found = {}
    for text in texts:
        path = os.fsdecode(text)
        if not path or len(path) > _LONGEST_PATH or "\0" in path or "\n" in path:
            continue
        folder = os.path.dirname(path)
        if folder not in is_folder:
            is_folder[folder] = os.path.isdir(folder or ".")
        if is_folder[folder] and path not in found and os.path.isfile(path):
            stat = os.stat(path)
            found[path] = (path, stat.st_size, stat.st_mtime_ns)
    if found:
        yield Files(tuple(found.values()))


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module came with a package or with Python, and not from the user.

    tfamp counts as installed, wherever it lies.
    """
    if not module or module == "__main__":
        return False
    package = module.partition(".")[0]
    if package == "tfamp" or package in sys.builtin_module_names:
        return True
    folders = _folders()
    return any(os.path.realpath(place).startswith(folders) for place in _places(module))


@functools.cache
def version(module: str) -> str:
    """Returns the version of the package a module belongs to, "" if it has none.

    It is asked of what is installed, so that it is the same whether or not the
    package has been imported.
    """
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return ""
    for name in (package, *_distributions().get(package, ())):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return str(getattr(sys.modules.get(package), "__version__", ""))


@functools.cache
def own_code() -> str:
    """Returns a digest of tfamp's own code that makes elements.

    A clone that is worked on keeps its version.
    """
    found = hashlib.blake2b(digest_size=8)
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


# Asks every package, so once.
_distributions = functools.cache(metadata.packages_distributions)


@functools.cache
def _folders() -> tuple[str, ...]:
    """Returns where packages are installed, the user's own folder among others."""
    found = {sysconfig.get_path(key) for key in _FOLDERS}
    found.update(site.getsitepackages(), [site.getusersitepackages()])
    return tuple(sorted(os.path.join(os.path.realpath(one), "") for one in found))


def _places(module: str) -> list[str]:
    """Returns the files or folders of a module, without importing it."""
    loaded = sys.modules.get(module)
    package = module.partition(".")[0]
    file = getattr(loaded, "__file__", None)
    if file:
        return [file]
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return []
    if spec.origin in ("built-in", "frozen"):
        return [sysconfig.get_path("stdlib") + os.sep]
    if spec.origin:
        return [spec.origin]
    return [os.path.join(place, "") for place in spec.submodule_search_locations or ()]


def name_of(value: Any) -> str:
    """Returns the module and the name of a function, a class or an object's class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    module = module_of(named) if isinstance(named, type) else named.__module__
    return f"{module}.{named.__qualname__}"


def module_of(kind: type) -> str:
    """Returns the name of a class's module."""
    module = kind.__module__  # a property of the class's own, in some written in C
    return module if isinstance(module, str) else repr(kind).split("'")[1]


def class_parts(value: type) -> Parts:
    """Yields what a class is and, where it is the user's, all that is in it."""
    yield "class"
    yield name_of(value)
    module = module_of(value)
    if is_installed(module) and (is_named(value) or not value.__flags__ & _MADE):
        yield version(module)
        return
    if type(value) is not type:
        yield type(value)
    yield from value.__bases__
    for name, member in sorted(vars(value).items()):
        if name not in _NO_MEANING:
            yield name
            yield member


def object_parts(value: Any) -> Parts:
    """Yields what counts of an object: its class and all that it holds."""
    yield "object"
    if isinstance(value, (staticmethod, classmethod)):
        yield from (type(value).__name__, value.__func__)
    elif isinstance(value, property):
        yield from ("property", value.fget, value.fset, value.fdel)
    elif isinstance(value, _DESCRIPTORS):
        yield from (name_of(value.__objclass__), value.__name__)
    elif isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        yield from _builtin_parts(value)
    elif isinstance(value, weakref.ref):
        yield from ("weak", value())
    elif name_of(type(value)) in _LOCKS:
        yield "lock"
    elif not is_installed(module_of(type(value))):
        yield type(value)
        yield attributes(value)
        yield from _inherited(value)
    elif callable(getattr(value, "get_config", None)):
        yield type(value)
        yield configuration(value)
        yield list(getattr(value, "variables", ()))
    else:
        yield type(value)
        yield from _reduced(value)


def attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, those in slots included."""
    found = {}
    for one in type(value).__mro__:
        for name, member in vars(one).items():
            # Double underscores: offsets in memory, of classes written in C.
            is_slot = isinstance(member, types.MemberDescriptorType)
            if is_slot and name[:2] != "__" and not is_installed(module_of(one)):
                try:
                    found[name] = member.__get__(value)
                except AttributeError:  # not set yet
                    continue
    found.update(getattr(value, "__dict__", {}))
    # TensorFlow's book-keeping of what it tracks.
    return {k: v for k, v in found.items() if not k.startswith("_self_")}


# What a subclass of these holds beside its attributes.
_CONTENTS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (dict, lambda value: Unordered([*dict.items(value)])),
    (list, lambda value: [*list.__iter__(value)]),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (set, lambda value: Unordered([*set.__iter__(value)])),
    (frozenset, lambda value: Unordered([*frozenset.__iter__(value)])),
    (str, str.__repr__),
    (bytes, bytes.__repr__),
    (bytearray, bytes),
    (int, int.__repr__),
    (float, float.__repr__),
    (complex, complex.__repr__),
)


def _inherited(value: Any) -> Iterator[Any]:
    """Yields what an object of a user's class holds by its installed base classes."""
    for base, content in _CONTENTS:
        if isinstance(value, base):
            yield content(value)
            return
    if hasattr(value, "get_config"):
        return
    for base in type(value).__mro__[:-1]:
        # An installed base class says what its objects are made of.
        if {"__reduce__", "__reduce_ex__"} & vars(base).keys():
            if is_installed(module_of(base)):
                yield from _reduced(value)
            return


def configuration(value: Any) -> Any:
    """Returns the configuration of one of Keras's objects."""
    try:
        return value.get_config()
    except Exception:  # the user's code; its attributes count beside it
        return "no configuration"


def _reduced(value: Any) -> Iterator[Any]:
    """Yields what `pickle` would write of an object, or names it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reducer = copyreg.dispatch_table.get(type(value))
            made = reducer(value) if reducer else value.__reduce_ex__(_PROTOCOL)
            if not isinstance(made, str):
                function, arguments, *more = made
                # Items that come by an iterator are taken from it.
                more = [list(m) if isinstance(m, Iterator) else m for m in more]
                made = (function, arguments, *more)
    except Exception:  # "cannot pickle", in whatever words its author chose
        held = attributes(value)
        yield held if held else Unseen(f"a {name_of(type(value))}")
        return
    if isinstance(made, str):  # by name, such as a cached function
        yield made
        yield attributes(value)
    else:
        yield from made


def _builtin_parts(value: Any) -> Iterator[Any]:
    """Yields a function written in C by name, and what it is bound to."""
    module = getattr(value, "__module__", None) or ""
    yield f"{module}.{value.__qualname__} {version(module) if module else ''}"
    owner = getattr(value, "__self__", None)
    if isinstance(owner, types.ModuleType):
        if not is_installed(owner.__name__) and owner is not builtins:
            yield Unseen(f"the code of {module}.{value.__qualname__}")
    else:
        yield owner


def is_named(value: Any) -> bool:
    """Whether a function or class is found in its module by its name."""
    found: Any = sys.modules.get(str(value.__module__))
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value
