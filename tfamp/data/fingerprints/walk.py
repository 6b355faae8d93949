"""Digests of values of any kind, however deep, and also where they hold themselves.

A kind of value is described by a generator of its parts: the name of the kind, then
values, each of which has parts of its own. The walk keeps its own stack, so nothing
is too deep for it, and digests each value once.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Any

import tensorflow as tf

_BYTES = 16
_LEAVES = (type(None), bool, int, float, complex, str, bytes, type(...))
_LEAF_KINDS = (PurePath, tf.DType, tf.TensorShape, tf.TypeSpec)

Parts = Iterator[Any]


@dataclasses.dataclass(frozen=True)
class Unseen:
    """Something that can only be named.

    Attributes:
        name: What it is, as users are told.
        unless_files: Whether it does not count where files were found by the names
            that constants hold, since it most likely reads those.
    """

    name: str
    unless_files: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Unordered:
    """Values whose order does not count."""

    values: Iterable[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Files:
    """Texts, of which those count as files that name one.

    Attributes:
        identities: Path, bytes and time of the last change of each file.
    """

    identities: tuple[tuple[str, int, int], ...]


@dataclasses.dataclass(eq=False)
class _Frame:
    value: Any
    parts: Parts
    is_ordered: bool = True
    digests: list[bytes] = dataclasses.field(default_factory=list)


class Walk:
    """Digests values, and notes what could not be looked into.

    Attributes:
        unseen: What was met and could only be named.
        num_files: Files that were found by the names that constants hold.
    """

    def __init__(self, parts_of: Callable[[Any], Parts]) -> None:
        self.unseen: list[Unseen] = []
        self.num_files = 0
        self._parts_of = parts_of
        # Digest and value by identity; a value that is kept keeps its identity.
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
                    frames.append(self._opened(part))
                    break
                frame.digests.append(found)
            else:
                frames.pop()
                if not frames:
                    return frame.digests[0]
                order = frame.digests if frame.is_ordered else sorted(frame.digests)
                found = _hash(b"".join(order))
                del depths[id(frame.value)]
                self._known[id(frame.value)] = found, frame.value
                frames[-1].digests.append(found)

    def _opened(self, value: Any) -> _Frame:
        if isinstance(value, Unordered):
            return _Frame(value, iter(value.values), is_ordered=False)
        return _Frame(value, self._parts_of(value))

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
            self.num_files += len(value.identities)
            return _hash(f"files:{value.identities!r}".encode(errors="surrogatepass"))
        if id(value) in self._known:
            return self._known[id(value)][0]
        if id(value) in depths:
            return _hash(f"inside itself:{depths[id(value)]}".encode())
        return None


def _hash(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=_BYTES).digest()
