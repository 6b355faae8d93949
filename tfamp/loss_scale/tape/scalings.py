"""Knows whether the gradients that an optimizer is handed are scaled.

`scale_loss` says that they will be, the tape that they are not; `apply` asks. What is
said holds for one thread and the function being traced there, until the next `apply`.
Where gradients leave a function and are applied outside of it, what was said while it
was traced holds each time.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks.variables import outermost_graph


class _Thread:
    """A thread, which is gone when this is: the identity of one is used again."""


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


_THIS = _ThisThread()


@dataclasses.dataclass
class Scaling:
    """What is known of the gradients that an optimizer has not applied yet.

    Attributes:
        is_scaled: Whether they are multiplied by the loss scale.
        graph: A reference to the function that was being traced, None in eager code.
        thread: A reference to the thread.
        gradients: References to what the tape gave.
    """

    is_scaled: bool
    graph: Any
    thread: Any
    gradients: list[Any] = dataclasses.field(default_factory=list)
    _verdicts: list[Any] = dataclasses.field(default_factory=list)

    @property
    def is_current(self) -> bool:
        """Whether the function in which it was said still exists, or the thread."""
        where = self.thread if self.graph is None else self.graph
        return where() is not None

    def add(self, gradients: Sequence[Any], verdict: tf.Tensor) -> None:
        """Notes what a tape gave, and whether it was finite: a boolean scalar."""
        self.gradients += [weakref.ref(gradient) for gradient in gradients]
        self._verdicts.append(_read_later(verdict))

    def verdict_on(self, gradients: Sequence[Any]) -> tf.Tensor | None:
        """Returns whether all that the tape gave was finite; None if not known.

        Not where `gradients` are what the tape gave: they are judged themselves.
        """
        given = {id(gradient) for gradient in gradients}
        is_same = all(r() is not None and id(r()) in given for r in self.gradients)
        verdicts = [verdict() for verdict in self._verdicts]
        here = [v for v in verdicts if v is not None and _is_usable(v)]
        if is_same or not here:
            return None
        return tf.reduce_all(tf.stack(here))


class Scalings:
    """What was said of each optimizer, in each thread and function being traced."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._said: weakref.WeakKeyDictionary[Any, dict[Any, Scaling]] = (
            weakref.WeakKeyDictionary()
        )
        # Of variables whose optimizer is not built, with references to the variables.
        self._of_variables: list[tuple[Any, _Variables, Scaling]] = []

    def say(self, optimizer: Any, *, is_scaled: bool) -> Scaling:
        """Notes how the next gradients of an optimizer come."""
        key, graph, thread = _here()
        with self._lock:
            said = self._said.setdefault(optimizer, {})
            for other in [k for k, v in said.items() if not v.is_current]:
                del said[other]
            if key not in said or said[key].is_scaled != is_scaled:
                said[key] = Scaling(is_scaled, graph, thread)
            return said[key]

    def say_of_variables(self, variables: Iterable[Any]) -> Scaling:
        """Notes that gradients of variables come unscaled, whoever applies them."""
        key, graph, thread = _here()
        scaling = Scaling(False, graph, thread)
        asked = _Variables(variables)
        ids = asked.living()
        with self._lock:
            kept = [
                (place, known, said)
                for place, known, said in self._of_variables
                if said.is_current
                and known.living()
                and (place != key or known.living() != ids)
            ]
            self._of_variables = [*kept, (key, asked, scaling)]
        return scaling

    def is_scaled(self, optimizer: Any) -> bool:
        """Whether the loss was scaled here since the last `apply`."""
        said = self._said.get(optimizer, {}).get(_here()[0])
        return said is not None and said.is_current and said.is_scaled

    def knows(self, optimizer: Any, ids: Iterable[int]) -> bool:
        """Whether `take` would return what was said of gradients at hand.

        Args:
            optimizer: Who applies them, None for one of whom nothing was said.
            ids: The identities of its variables.
        """
        key, _, _ = _here()
        with self._lock:
            said = {} if optimizer is None else self._said.get(optimizer, {})
            if any(s.is_current and (k == key or s.graph) for k, s in said.items()):
                return True
            return self._found_of_variables(key, frozenset(ids)) is not None

    def take(self, optimizer: Any, ids: Iterable[int]) -> Scaling | None:
        """Returns how the gradients at hand come, and forgets what is used up.

        Args:
            optimizer: Who applies them.
            ids: The identities of its variables.
        """
        key, _, _ = _here()
        with self._lock:
            said = self._said.get(optimizer, {})
            own = said.get(key)
            if own is not None and own.is_current:
                del said[key]
                return own
            entry = self._found_of_variables(key, frozenset(ids))
            if entry is not None:
                if entry[0] == key:
                    self._of_variables.remove(entry)
                return entry[2]
            elsewhere = [s for s in said.values() if s.graph and s.is_current]
            return elsewhere[-1] if elsewhere else None

    def _found_of_variables(
        self, key: Any, ids: frozenset[int]
    ) -> tuple[Any, "_Variables", Scaling] | None:
        """Returns what was said last of any of these variables, here if anything."""
        elsewhere = None
        for entry in reversed(self._of_variables):
            place, known, scaling = entry
            if not scaling.is_current or ids.isdisjoint(known.living()):
                continue
            if place == key:
                return entry
            if scaling.graph is not None and elsewhere is None:
                elsewhere = entry
        return elsewhere


SCALINGS = Scalings()


class _Variables:
    """Variables, as long as they live: the identity of one is used again."""

    def __init__(self, variables: Iterable[Any]) -> None:
        self._references = {id(each): weakref.ref(each) for each in variables}

    def living(self) -> frozenset[int]:
        """Returns the identities of those that are left."""
        pairs = self._references.items()
        return frozenset(key for key, reference in pairs if reference() is not None)


def _here() -> tuple[Any, Any, Any]:
    """Returns a key of this thread and function, and references to both.

    Returns:
        The key, the function being traced or None, and the thread.
    """
    graph, thread = outermost_graph(), _THIS.thread
    reference = None if graph is None else weakref.ref(graph)
    return (id(thread), id(graph)), reference, weakref.ref(thread)


def _read_later(tensor: tf.Tensor) -> Callable[[], tf.Tensor | None]:
    """Returns what gives a tensor again, without keeping the graph that it is of."""
    if not tf.is_symbolic_tensor(tensor):
        return lambda: tensor
    graph, name = weakref.ref(tensor.graph), tensor.name

    def read() -> tf.Tensor | None:
        present = graph()
        return None if present is None else present.get_tensor_by_name(name)

    return read


def _is_usable(tensor: Any) -> bool:
    """Returns whether a tensor can be read here: not from within a branch or loop."""
    if not tf.is_symbolic_tensor(tensor):
        return True
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if graph is tensor.graph:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
