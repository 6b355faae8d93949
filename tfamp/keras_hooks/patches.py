"""Reversible replacement of attributes on classes and modules."""

import contextlib
import functools
import inspect
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_ABSENT = object()
Function = Callable[..., Any]


class HookError(RuntimeError):
    """A line of Keras that a hook relies on is not where it was."""


class Patch:
    """Replaces one attribute of a class or module and can put the original back.

    `replace` takes what `getattr(owner, name)` gave and returns what shall stand there;
    where the attribute is missing and `optional`, it takes None.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        replace: Callable[[Any], Any],
        *,
        optional: bool = False,
    ) -> None:
        self._owner, self._name = owner, name
        self._replace, self._optional = replace, optional
        self._saved: Any = None
        self._placed: Any = _ABSENT

    @property
    def label(self) -> str:
        """Where the patch acts, as `module.Class.attribute`."""
        owner = self._owner
        if isinstance(owner, types.ModuleType):
            return f"{owner.__name__}.{self._name}"
        return f"{owner.__module__}.{owner.__qualname__}.{self._name}"

    @property
    def is_installed(self) -> bool:
        """Whether the replacement stands."""
        return self._placed is not _ABSENT

    def check(self) -> None:
        """Raises `HookError` where the attribute to replace is missing."""
        if not self._optional and not self._exists():
            raise HookError(
                f"Found no `{self.label}` in this Keras; tfamp relies on it. "
                "Install a version of Keras that tfamp's README names as tested, or "
                "report this one."
            )

    def _exists(self) -> bool:
        # Every class answers to `__init__` and `__call__`: those are of `object`.
        if not isinstance(self._owner, type):
            return hasattr(self._owner, self._name)
        return any(self._name in vars(cls) for cls in self._owner.__mro__[:-1])

    def install(self) -> None:
        """Puts the replacement in place; does nothing where it stands already."""
        if self.is_installed:
            return
        self.check()
        self._saved = vars(self._owner).get(self._name, _ABSENT)
        original = getattr(self._owner, self._name) if self._exists() else None
        setattr(self._owner, self._name, self._replace(original))
        self._placed = vars(self._owner)[self._name]

    def remove(self) -> None:
        """Puts the original back, unless somebody else has replaced the replacement."""
        if not self.is_installed:
            return
        if vars(self._owner).get(self._name) is not self._placed:
            warnings.warn(
                f"`{self.label}` was replaced by other code after tfamp did, so "
                "tfamp leaves it; undo the other replacement first.",
                RuntimeWarning,
                stacklevel=2,
            )
        elif self._saved is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._saved)
        self._saved, self._placed = None, _ABSENT

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

    _cell: Any = None

    def install(self) -> None:
        """Puts the replacement inside; does nothing where it stands already."""
        if self.is_installed:
            return
        self.check()
        found = getattr(self._owner, self._name)
        self._cell = _cell_of(found)
        if self._cell is not None:
            self._saved = self._cell.cell_contents
            self._placed = self._cell.cell_contents = self._replace(self._saved)
        elif isinstance(self._owner, types.ModuleType):
            self._saved, self._placed = found, self._replace(found)
            self._put(self._saved, self._placed)
        else:
            super().install()

    def _put(self, before: Any, after: Any) -> None:
        for module in tuple(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(self._name) is before:
                setattr(module, self._name, after)

    def remove(self) -> None:
        """Puts the original back; does nothing where it stands already."""
        if self._cell is not None:
            self._cell.cell_contents = self._saved
        elif isinstance(self._owner, types.ModuleType) and self.is_installed:
            self._put(self._placed, self._saved)
        else:
            super().remove()
        self._cell, self._saved, self._placed = None, None, _ABSENT


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
    """Replaces attributes of one object inside the block.

    They are written past the object's own `__setattr__`, by which Keras tracks what is
    assigned. What was inherited is inherited again afterwards.
    """
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


def like(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a replacement so that it introspects as `original` does."""

    def decorate(replacement: Callable[..., Any]) -> Any:
        wrapped = functools.wraps(original)(replacement)
        # Keras reads it by `inspect.getfullargspec`, which stops at wrappers without.
        wrapped.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        return wrapped

    return decorate


def wrapper(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function that takes the original first, for a `Patch` to place it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return wrap


def followed_by(note: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Returns a wrapper of a constructor that calls `note(self)` afterwards."""

    @wrapper
    def wrap(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        note(self)

    return wrap
