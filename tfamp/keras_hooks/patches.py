"""Reversible replacement of attributes on classes and modules."""

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_ABSENT = object()
Function = Callable[..., Any]


class HookError(RuntimeError):
    """A line of Keras that a hook relies on is not where it was."""


@dataclasses.dataclass(eq=False)
class Patch:
    """Replaces one attribute of a class or module and can put the original back.

    `replace` takes what `getattr(owner, name)` gave, None where an `optional` attribute
    is missing, and returns what shall stand there.
    """

    owner: Any
    name: str
    replace: Callable[[Any], Any]
    _: dataclasses.KW_ONLY
    optional: bool = False
    _put_back: Callable[[], None] | None = None

    @property
    def label(self) -> str:
        """Where the patch acts, as `module.Class.attribute`."""
        class_name = getattr(self.owner, "__qualname__", None)
        module = getattr(self.owner, "__module__", self.owner.__name__)
        return ".".join(filter(None, (module, class_name, self.name)))

    @property
    def is_installed(self) -> bool:
        """Whether the replacement stands."""
        return self._put_back is not None

    def check(self) -> None:
        """Raises `HookError` where the attribute to replace is missing."""
        if not self.optional and not self._exists():
            raise HookError(
                f"Found no `{self.label}` in this Keras; tfamp relies on it. "
                "Install a version of Keras that tfamp's README names as tested, or "
                "report this one."
            )

    def _exists(self) -> bool:
        # Every class answers to `__init__` and `__call__`: those are of `object`.
        if not isinstance(self.owner, type):
            return hasattr(self.owner, self.name)
        return any(self.name in vars(cls) for cls in self.owner.__mro__[:-1])

    def install(self) -> None:
        """Puts the replacement in place; does nothing where it stands already."""
        if not self.is_installed:
            self.check()
            self._put_back = self._put()

    def _put(self) -> Callable[[], None]:
        """Replaces the attribute; returns what puts it back."""
        saved = vars(self.owner).get(self.name, _ABSENT)
        original = getattr(self.owner, self.name) if self._exists() else None
        setattr(self.owner, self.name, self.replace(original))
        if saved is _ABSENT:
            return functools.partial(delattr, self.owner, self.name)
        return functools.partial(setattr, self.owner, self.name, saved)

    def remove(self) -> None:
        """Puts the original back; does nothing where it stands already."""
        if self._put_back is not None:
            self._put_back()
            self._put_back = None

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Puts the replacement in place inside the block."""
        self.install()
        try:
            yield
        finally:
            self.remove()


class InnerPatch(Patch):
    """Replaces the function inside of what decorators made, where that is found.

    What was looked up or imported before then ends in the replacement, too. Elsewhere
    the attribute itself is replaced, a function in every module that has it: an
    `import` of `tensorflow.math` makes a second one.
    """

    def _put(self) -> Callable[[], None]:
        found = getattr(self.owner, self.name)
        cell = _cell_of(found)
        if cell is not None:
            saved = cell.cell_contents
            cell.cell_contents = self.replace(saved)
            return functools.partial(setattr, cell, "cell_contents", saved)
        if isinstance(self.owner, types.ModuleType):
            placed = self.replace(found)
            self._exchange(found, placed)
            return functools.partial(self._exchange, placed, found)
        return super()._put()

    def _exchange(self, before: Any, after: Any) -> None:
        for module in tuple(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(self.name) is before:
                setattr(module, self.name, after)


def _cell_of(function: Any) -> Any:
    """Returns where decorators hold the function that they call, None without any."""
    function = getattr(function, "__func__", function)
    inside = inspect.unwrap(function)
    around = [function] if inside is not function else []
    for each in around:
        for cell in getattr(each, "__closure__", None) or ():
            content = cell.cell_contents
            if content is inside:
                return cell
            if inspect.isfunction(content) and content not in around:
                around.append(content)
    return None


class PatchSet:
    """Several patches that are installed in order, and removed backwards."""

    known: "list[PatchSet]" = []  # all that there are, in the order they were made

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._patches = tuple(patches)
        self._lock = threading.RLock()
        self.known.append(self)

    @property
    def installed(self) -> tuple[str, ...]:
        """The labels of the patches that stand now."""
        return tuple(patch.label for patch in self._patches if patch.is_installed)

    def install(self) -> None:
        """Installs all, or none where one is missing: then it raises HookError."""
        with self._lock:
            for patch in self._patches:
                if not patch.is_installed:
                    patch.check()
            for patch in self._patches:
                patch.install()

    def remove(self) -> None:
        """Removes all."""
        for patch in reversed(self._patches):
            patch.remove()


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replaces attributes of one object inside the block, past its `__setattr__`."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


def like(original: Function) -> Callable[[Function], Any]:
    """Decorates a replacement so that it introspects as `original` does."""

    def decorate(replacement: Function) -> Any:
        wrapped = functools.wraps(original)(replacement)
        # Keras reads it by `inspect.getfullargspec`, which stops at wrappers without.
        wrapped.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        return wrapped

    return decorate


def wrapper(function: Function) -> Callable[[Function], Any]:
    """Decorates a function that takes the original first, for a `Patch` to place it."""

    def wrap(original: Function) -> Function:
        @like(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return wrap


def followed_by(note: Function) -> Callable[[Function], Any]:
    """Returns a wrapper of a constructor that calls `note(self)` afterwards."""

    @wrapper
    def wrap(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        note(self)

    return wrap
