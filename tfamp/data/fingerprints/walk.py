"""Digests of values of any kind, however deep, and also where they hold themselves.

A kind of value is described by a generator of its parts: the name of the kind, then
values, each of which has parts of its own. The walk keeps its own stack, so nothing
is too deep for it, and digests each value once.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Any

import tensorflow as tf

_BYTES = 16
_LEAVES = (type(None), bool, int, float, complex, str, bytes, type(...))
_LEAF_KINDS = (PurePath, tf.DType, tf.TensorShape, tf.TypeSpec)
# Linux allows no longer path; a text beyond it names no file.
_LONGEST_PATH = 4096

Parts = Iterator[Any]


@dataclasses.dataclass(frozen=True)
class Unseen:
    """Something that can only be named, as users read it.

    With `unless_files` it does not count where files were found by the names that
    constants hold, since it most likely reads those.
    """

    name: str
    unless_files: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Unordered:
    """Values whose order does not count."""

    values: Iterable[Any]


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


@dataclasses.dataclass(eq=False)
class _Frame:
    value: Any
    parts: Parts
    digests: list[bytes] = dataclasses.field(default_factory=list)


class Walk:
    """Digests values, and notes what could not be looked into.

    Attributes:
        unseen: What was met and could only be named.
        has_files: Whether files were found by the names that constants hold.
    """

    def __init__(self, parts_of: Callable[[Any], Parts]) -> None:
        self.unseen: list[Unseen] = []
        self.has_files = False
        self._parts_of = parts_of
        # Digest and value by identity; a value that is held has its identity alone.
        self._known: dict[int, tuple[bytes, Any]] = {}

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
                    parts = iter(part.values) if is_set else self._parts_of(part)
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
        if kind is Files:
            self.has_files = True
            return _hash(f"files:{value.identities!r}".encode(errors="surrogatepass"))
        if id(value) in self._known:
            return self._known[id(value)][0]
        if id(value) in depths:
            return _hash(f"inside itself:{depths[id(value)]}".encode())
        return None


def _hash(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=_BYTES).digest()
