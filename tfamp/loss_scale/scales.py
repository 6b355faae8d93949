"""What gradients are scaled by, and how they came: kept at the variables themselves.

A variable knows the optimizers that have trained it, whose scales a tape takes. Before
there is one, a function that is traced takes a scale that is yet to be given. A tape
notes how it gave gradients, whoever applies them; what it noted holds for one
thread and the function being traced there, until they are applied. Where gradients
leave a function, it holds each time. They are true, or scaled where the code scaled its
loss by `scale_loss`.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks.optimizers import is_recording
from tfamp.keras_hooks.variables import outermost_graph, stored

_NAME = "_tfamp_gradients"
_BY_HAND = "_tfamp_scale"
_LOCK = threading.RLock()
# Calls of a tape whose gradients an update adds up.
_MAX_NOTES = 256


class _Thread:
    """A thread, which is gone when this is: the identity of one is used again."""


class Here(threading.local):
    """What this thread is doing."""

    def __init__(self) -> None:
        self.thread = _Thread()
        self.optimizers: tuple[Any, ...] = ()  # of the model whose `train_step` runs
        self.weight: Any = None  # of the batch that it trains on: its examples
        self.call: TapeCall | None = None  # of a tape that computes gradients
        self.latest: Note | None = None
        self.is_updating = False  # an inner optimizer makes its update
        self.entry = "apply"  # by what gradients come in: "apply", "pairs" or "inner"


HERE = Here()


@dataclasses.dataclass
class TapeCall:
    """One call of a tape, while it computes gradients."""

    is_scaled: bool  # whether its target is multiplied by a scale
    by_hand: list[Any] = dataclasses.field(default_factory=list)  # scales, of losses


def scaled_by_hand(loss: tf.Tensor, scale: Any, *, is_ours: bool) -> tf.Tensor:
    """Returns a loss times a scale, as `scale_loss` does.

    A tape that scales by itself sees the loss as it was, and hears of it. A function
    that is called under a tape has its gradient made ahead, when nobody can know: then
    `is_ours` says whether the tape will scale.
    """

    @tf.custom_gradient
    def multiply(loss: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            call = HERE.call
            if call is not None:
                call.by_hand.append(scale)
            will_scale = is_ours and is_recording()
            if will_scale if call is None else call.is_scaled:
                return upstream
            return upstream * tf.cast(scale, upstream.dtype)

        return loss * tf.cast(scale, loss.dtype), gradient

    scaled = multiply(loss)
    setattr(scaled, _BY_HAND, scale)
    return scaled


def scale_by_hand(target: Any) -> Any:
    """Returns the scale that a target of a tape was multiplied by, None if it is not.

    Not of what was made of such a loss.
    """
    return getattr(target, _BY_HAND, None)


@dataclasses.dataclass
class Note:
    """What one call of a tape gave, and where."""

    graph: Any  # a reference to the traced function, None in eager code
    thread: Any  # a reference to the thread
    is_judged: bool  # whether a scale of an optimizer was in it
    is_by_hand: bool  # whether gradients are scaled, as the code scaled its loss
    gradients: Sequence[Any] = ()  # references
    verdict: Callable[[], Any] | None = None  # whether they were finite

    @property
    def is_current(self) -> bool:
        """Whether the function in which it was noted still exists, or the thread."""
        where = self.thread if self.graph is None else self.graph
        return where() is not None


class _Facts:
    """What is known of one variable."""

    def __init__(self) -> None:
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self.open_scale: OpenScale | None = None
        self.notes: dict[Any, list[Note]] = {}


def is_variable(source: Any) -> bool:
    """Returns whether a tape is asked for the gradient of a variable."""
    return isinstance(source, keras.Variable | tf.Variable)


def _facts(variable: Any) -> _Facts:
    held = vars(stored(variable))
    found = held.get(_NAME)
    # `setdefault` alone would make one at each of many readings a step.
    return held.setdefault(_NAME, _Facts()) if found is None else found


def own(optimizer: Any, variables: Iterable[Any]) -> None:
    """Has tapes take the scale of an optimizer for the variables that it trains."""
    for variable in variables:
        facts = _facts(variable)
        if optimizer in facts.owners:
            continue
        with _LOCK:
            facts.owners.add(optimizer)
        if facts.open_scale is not None:
            facts.open_scale.give(optimizer)


def owners_of(variables: Iterable[Any]) -> list[Any]:
    """Returns the optimizers that have trained any of these variables, each once."""
    found: dict[int, Any] = {}
    for variable in variables:
        for owner in tuple(_facts(variable).owners):
            found[id(owner)] = owner
    return list(found.values())


def without_owner(variables: Iterable[Any]) -> list[Any]:
    """Returns the variables that no optimizer with a scale has trained."""
    return [v for v in variables if not _facts(v).owners]


class OpenScale:
    """The scale of a traced function whose optimizer is not known yet.

    It is 1 until an optimizer owns a variable of it, which happens while the function
    is traced if the optimizer is called in it. From then on it is the least scale of
    those that do.
    """

    def __init__(self) -> None:
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        # In a thread of its own neither `tf.function` nor a strategy takes hold of it.
        thread = threading.Thread(target=self._make)
        thread.start()
        thread.join()

    def _make(self) -> None:
        self.variable = tf.Variable(1.0, trainable=False)

    def give(self, optimizer: Any) -> None:
        """Has the scale be that of an optimizer too."""
        with _LOCK:
            self._owners.add(optimizer)
        stored = getattr(optimizer, "scale_variables", None)
        if stored is not None:
            stored.followers.add(self)
        else:  # of Keras, which is asked after its steps
            vars(optimizer).setdefault(_NAME, weakref.WeakSet()).add(self)
        with tf.init_scope():
            self.follow()

    def follow(self) -> None:
        """Takes the present scale of its owners."""
        scales = [tf.convert_to_tensor(scale_of(each)) for each in self._owners]
        if scales:
            self.variable.assign(tf.reduce_min(tf.stack(scales)))


def open_scale_of(variables: Sequence[Any]) -> OpenScale:
    """Returns the scale that is open for variables without an owner, made once."""
    with _LOCK:
        known = (_facts(v).open_scale for v in variables)
        scale = next((each for each in known if each is not None), None) or OpenScale()
        for variable in variables:
            _facts(variable).open_scale = scale
    return scale


def tell_open_scales(stock: Any) -> None:
    """Has open scales follow one of Keras, after a step."""
    for scale in tuple(vars(stock).get(_NAME, ())):
        scale.follow()


def scale_of(optimizer: Any) -> Any:
    """Returns the variable of a scale, or the number it is going to start with."""
    scale = vars(optimizer).get("dynamic_scale")
    return float(optimizer.initial_scale) if scale is None else scale.value


def note(
    variables: Sequence[Any],
    gradients: Sequence[Any],
    *,
    is_judged: bool,
    is_by_hand: bool,
    verdict: Any = None,
) -> None:
    """Notes how a tape gave gradients of variables, and if they were finite."""
    key, graph, thread = _here()
    references = tuple(weakref.ref(gradient) for gradient in gradients)
    read = None if verdict is None else _read_later(verdict)
    noted = Note(graph, thread, is_judged, is_by_hand, references, read)
    HERE.latest = noted
    for variable in variables:
        notes = _facts(variable).notes
        for other in [k for k, v in tuple(notes.items()) if not v[-1].is_current]:
            notes.pop(other, None)
        here = notes.setdefault(key, [])
        here.append(noted)
        del here[:-_MAX_NOTES]  # of gradients that nobody applies


def note_unscaled() -> None:
    """Notes that the code divides gradients by the scale that it has put in."""
    _, graph, _ = _here()
    if HERE.latest is not None and HERE.latest.graph == graph:
        HERE.latest.is_by_hand = False


def take_notes(variables: Iterable[Any]) -> list[Note]:
    """Returns what was noted of gradients at hand, and forgets what is used up.

    Empty where they come from no tape.
    """
    key, _, _ = _here()
    here: dict[int, Note] = {}
    elsewhere: dict[int, Note] = {}
    for variable in variables:
        facts = _facts(variable)
        for place, notes in tuple(facts.notes.items()):
            found = here if place == key else elsewhere
            for each in notes:
                if each.is_current and (place == key or each.graph is not None):
                    found[id(each)] = each
        facts.notes.pop(key, None)
    return list((here or elsewhere).values())


def come_from_tape(variables: Iterable[Any]) -> bool:
    """Returns whether `take_notes` would return anything."""
    key, _, _ = _here()
    return any(
        notes[-1].is_current and (place == key or notes[-1].graph is not None)
        for variable in variables
        for place, notes in tuple(_facts(variable).notes.items())
    )


def verdict_on(notes: Sequence[Note], gradients: Sequence[Any]) -> tf.Tensor | None:
    """Returns whether all that tapes gave was finite; None if that is not known.

    Not where `gradients` are what they gave: those are judged themselves. What code
    makes of an overflow may be finite.
    """
    given = {id(gradient) for gradient in gradients}
    references = [reference for each in notes for reference in each.gradients]
    if all(r() is not None and id(r()) in given for r in references):
        return None
    verdicts = [each.verdict() for each in notes if each.verdict is not None]
    here = [v for v in verdicts if v is not None and _is_usable(v)]
    return tf.reduce_all(tf.stack(here)) if here else None


def _here() -> tuple[Any, Any, Any]:
    """Returns a key of this thread and traced function, and references to both."""
    graph, thread = outermost_graph(), HERE.thread
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
