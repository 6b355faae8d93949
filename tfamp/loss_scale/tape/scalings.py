"""Knows whether the gradients that an optimizer is handed are scaled.

`scale_loss` says that they will be, the tape that they are not; `apply` asks. What is
noted holds for one thread and the function being traced there, until the next `apply`.
Where gradients leave a function and are applied outside of it, what was noted while it
was traced holds each time.
"""

import dataclasses
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layers import CALLS, record_of
from tfamp.keras_hooks.variables import outermost_graph
from tfamp.records import pages

# Gradients may have been scaled by hand, as in a test of an optimizer; a loop that
# goes on like this has forgotten it.
_EAGER_STEPS = 10
_LIBRARIES = ("tfamp", "tensorflow", "keras", "contextlib", "threading")

_met: weakref.WeakSet[Any] = weakref.WeakSet()
_warned: weakref.WeakSet[Any] = weakref.WeakSet()
_applies: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def warn_of_unscaled_loss(optimizer: Any) -> None:
    """Warns once where gradients of unknown origin are taken for scaled ones."""
    has_no_scale = not optimizer.dynamic and optimizer.initial_scale == 1
    if optimizer.has_scaled_loss or has_no_scale:
        return
    count = _applies.get(optimizer, 0) + 1
    _applies[optimizer] = count
    is_sure = not tf.executing_eagerly() or count == _EAGER_STEPS
    if count > _EAGER_STEPS or not is_sure:
        return
    _applies[optimizer] = _EAGER_STEPS
    warnings.warn(
        f"Optimizer {optimizer.name!r} divides gradients by its loss scale, but they "
        "come from no `tf.GradientTape`, and no loss was multiplied by it: updates are "
        "too small by that factor. Compute them by a tape, or put `loss = "
        "optimizer.scale_loss(loss)` before they are computed. "
        f"{pages.see('failures/tiny-updates')}",
        UserWarning,
        stacklevel=_level_of_user(),
    )


def float16_layer_of(sources: Sequence[Any]) -> Any:
    """Returns the layer called last here of which weights in float16 are asked for."""
    # A variable of TensorFlow has a method of the name by which Keras's hold theirs.
    values = [getattr(source, "value", source) for source in sources]
    pairs = zip(values, sources, strict=True)
    asked = {id(source if callable(value) else value) for value, source in pairs}
    for reference in reversed(CALLS.float16_layers):
        layer = reference()
        if layer is not None and record_of(layer) is not None:
            low = [
                weight
                for _, part, _ in structure.walk(layer)
                if part.compute_dtype == "float16"
                for weight in structure.own_weights(part)
            ]
            if not asked.isdisjoint(id(weight.value) for weight in low):
                return layer
    return None


def warn_of_no_scale(layer: Any) -> None:
    """Warns once that a float16 layer's gradients are computed with no loss scale.

    Not of the first eager step, by which an optimizer made ahead of tfamp is found.
    """
    if layer in _warned:
        return
    if tf.executing_eagerly() and layer not in _met:
        _met.add(layer)
        return
    _warned.add(layer)
    warnings.warn(
        f"{type(layer).__name__} {layer.name!r} computes in float16, and its gradients "
        "are computed with no loss scale: those below 6e-8 are 0. Make the optimizer "
        "after `tfamp.enable`, or apply them by `tfamp.LossScaleOptimizer(optimizer)`, "
        f"made ahead of the first step. {pages.see('lint#unscaled-float16')}",
        UserWarning,
        stacklevel=_level_of_user(),
    )


def _level_of_user() -> int:
    """Returns the stack level of the first frame outside the libraries."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "").split(".")[0]
        if module not in _LIBRARIES:
            return level
        frame, level = frame.f_back, level + 1
    return 2


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
        is_taken: A variable that holds whether an optimizer has applied the gradients
            of a trace; None where the optimizer was known from the start.
    """

    is_scaled: bool
    graph: Any
    thread: Any
    gradients: list[Any] = dataclasses.field(default_factory=list)
    is_taken: Any = None
    _verdicts: list[Any] = dataclasses.field(default_factory=list)

    @property
    def is_current(self) -> bool:
        """Whether the function in which it was noted still exists, or the thread."""
        where = self.thread if self.graph is None else self.graph
        return where() is not None

    def wait_for_optimizer(self, device: str) -> Any:
        """Returns a variable that says, when a trace runs, whether it has an optimizer.

        The gradients come ahead of the optimizer that applies them.
        """

        def make() -> None:
            with tf.device(device):
                self.is_taken = tf.Variable(False, trainable=False)

        # In a thread of its own neither `tf.function` nor a strategy takes hold of it.
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return self.is_taken

    def note_taken(self) -> None:
        """Notes that an optimizer applies the gradients."""
        if self.is_taken is not None:
            with tf.init_scope():
                self.is_taken.assign(True)

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
    """What was noted of each optimizer, in each thread and function being traced."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._noted: weakref.WeakKeyDictionary[Any, dict[Any, Scaling]] = (
            weakref.WeakKeyDictionary()
        )
        # Of variables whose optimizer is not built, with references to the variables.
        self._of_variables: list[tuple[Any, _Variables, Scaling]] = []

    def note(self, optimizer: Any, *, is_scaled: bool) -> Scaling:
        """Notes how the next gradients of an optimizer come."""
        key, graph, thread = _here()
        with self._lock:
            noted = self._noted.setdefault(optimizer, {})
            for other in [k for k, v in noted.items() if not v.is_current]:
                del noted[other]
            if key not in noted or noted[key].is_scaled != is_scaled:
                noted[key] = Scaling(is_scaled, graph, thread)
            return noted[key]

    def note_variables(self, variables: Iterable[Any]) -> Scaling:
        """Notes that gradients of variables come unscaled, whoever applies them."""
        key, graph, thread = _here()
        scaling = Scaling(False, graph, thread)
        asked = _Variables(variables)
        ids = asked.living()
        with self._lock:
            kept = [
                (place, known, noted)
                for place, known, noted in self._of_variables
                if noted.is_current
                and known.living()
                and (place != key or known.living() != ids)
            ]
            self._of_variables = [*kept, (key, asked, scaling)]
        return scaling

    def is_scaled(self, optimizer: Any) -> bool:
        """Whether the loss was scaled here since the last `apply`."""
        noted = self._noted.get(optimizer, {}).get(_here()[0])
        return noted is not None and noted.is_current and noted.is_scaled

    def knows(self, optimizer: Any, ids: Iterable[int]) -> bool:
        """Whether `take` would return what was noted of gradients at hand.

        The optimizer is None where nothing was noted of the one who applies them.
        """
        key, _, _ = _here()
        with self._lock:
            noted = {} if optimizer is None else self._noted.get(optimizer, {})
            if any(s.is_current and (k == key or s.graph) for k, s in noted.items()):
                return True
            return self._found_of_variables(key, frozenset(ids)) is not None

    def take(self, optimizer: Any, ids: Iterable[int]) -> Scaling | None:
        """Returns how the gradients at hand come, and forgets what is used up.

        `ids` are the identities of the variables of the optimizer that applies them.
        """
        key, _, _ = _here()
        with self._lock:
            noted = self._noted.get(optimizer, {})
            own = noted.get(key)
            if own is not None and own.is_current:
                del noted[key]
                return own
            entry = self._found_of_variables(key, frozenset(ids))
            if entry is not None:
                if entry[0] == key:
                    self._of_variables.remove(entry)
                entry[2].note_taken()
                return entry[2]
            elsewhere = [s for s in noted.values() if s.graph and s.is_current]
            return elsewhere[-1] if elsewhere else None

    def _found_of_variables(
        self, key: Any, ids: frozenset[int]
    ) -> tuple[Any, "_Variables", Scaling] | None:
        """Returns what was noted last of any of these variables, here if anything."""
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
    """Returns a key of this thread and traced function, and references to both."""
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
