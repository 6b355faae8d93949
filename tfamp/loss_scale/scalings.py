"""Knows whether the gradients that an optimizer is handed are scaled.

`scale_loss` says that they will be, the tape that they are not; `apply` asks. What is
noted holds for one thread and the function being traced there, until the next `apply`.
Where gradients leave a function and are applied outside of it, what was noted while it
was traced holds each time.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import optimizers
from tfamp.keras_hooks.backend import HALF
from tfamp.keras_hooks.variables import outermost_graph
from tfamp.loss_scale.gradients import multiplied, sums_of_squares


class _Thread:
    """A thread, which is gone when this is: the identity of one is used again."""


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


_THIS = _ThisThread()


@dataclasses.dataclass
class Scaling:
    """What is known of the gradients that an optimizer has not applied yet."""

    is_scaled: bool  # whether they are multiplied by the loss scale
    graph: Any  # a reference to the traced function, None in eager code
    thread: Any  # a reference to the thread
    gradients: list[Any] = dataclasses.field(default_factory=list)
    # Holds whether an optimizer applied what a trace gave; None where one was known.
    is_taken: Any = None
    _verdicts: list[Any] = dataclasses.field(default_factory=list)
    _losses: list[Any] = dataclasses.field(default_factory=list)  # that were scaled

    @property
    def is_current(self) -> bool:
        """Whether the function in which it was noted still exists, or the thread."""
        where = self.thread if self.graph is None else self.graph
        return where() is not None

    def add_loss(self, loss: Any) -> None:
        """Notes what came out of `scale_loss`."""
        if tf.is_tensor(loss):
            self._losses.append(weakref.ref(loss))

    def has_loss(self, targets: Any) -> bool:
        """Returns whether a target of a tape came out of `scale_loss` as it is."""
        known = {id(loss()) for loss in self._losses if loss() is not None}
        return any(id(target) in known for target in tf.nest.flatten(targets))

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

    def is_scaled(self, optimizer: Any, targets: Any = None) -> bool:
        """Whether a loss was scaled here since the last `apply`.

        With `targets`, whether one of them is that loss.
        """
        noted = self._noted.get(optimizer, {}).get(_here()[0])
        if noted is None or not (noted.is_current and noted.is_scaled):
            return False
        return targets is None or noted.has_loss(targets)

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


# A target in float16 cannot be given more.
_MAX_HALF_SCALE = 2.0**15
_Compute = Callable[[list[Any], Any], list[Any]]  # of targets and their seeds


class ScaledGradients:
    """How one call of a tape is scaled, by the smallest of possible scales.

    `scalings` are told whether the gradients are finite. `is_judged` says that somebody
    looks at the gradients, so that an overflow may be left to see.
    """

    def __init__(
        self, scales: Sequence[Any], scalings: Sequence[Scaling], *, is_judged: bool
    ) -> None:
        self._scales = [tf.convert_to_tensor(scale) for scale in scales]
        self._scalings = scalings
        self._is_judged = is_judged
        self._is_nested = not is_judged and optimizers.is_recording()

    def gradients(
        self, compute: _Compute, target: Any, sources: list[Any], seeds: Any
    ) -> list[Any]:
        """Returns the true gradients, in float32 for variables."""
        targets = tf.nest.flatten(target)
        factor = self._factor(targets)
        given = [None] * len(targets) if seeds is None else tf.nest.flatten(seeds)
        scaled_seeds = [
            (tf.ones_like(target) if seed is None else tf.convert_to_tensor(seed))
            * tf.cast(factor, target.dtype)
            for target, seed in zip(targets, given, strict=True)
        ]
        scaled = compute(targets, scaled_seeds)
        true = [
            _unscaled(gradient, source, 1 / factor)
            for gradient, source in zip(scaled, sources, strict=True)
        ]
        if self._is_judged:
            self._tell(true)
            return true
        return _or_as_they_are(true, sources, lambda: compute(targets, seeds))

    def _factor(self, targets: Sequence[Any]) -> tf.Tensor:
        scales = list(self._scales)
        if any(target.dtype in HALF for target in targets):
            scales.append(tf.constant(_MAX_HALF_SCALE))
        least = scales[0] if len(scales) == 1 else tf.reduce_min(tf.stack(scales))
        # What flows back through this gradient is divided by its scale, so that it and
        # the gradient share what the tape around gives.
        return tf.sqrt(least) if self._is_nested else least

    def _tell(self, gradients: Sequence[Any]) -> None:
        """Notes whether the gradients are finite: what follows may hide it."""
        gradients = [g for g in gradients if g is not None]
        if not (gradients and self._scalings):
            return
        verdict = tf.math.is_finite(tf.reduce_sum(sums_of_squares(gradients)))
        for scaling in self._scalings:
            scaling.add(gradients, verdict)


def can_be_scaled(target: Any) -> bool:
    """Returns whether all targets are tensors with gradients of their own dtype."""
    targets = tf.nest.flatten(target)
    return bool(targets) and all(
        isinstance(t, tf.Tensor) and (t.dtype.is_floating or t.dtype.is_complex)
        for t in targets
    )


def _unscaled(gradient: Any, source: Any, factor: Any) -> Any:
    if gradient is None:
        return None
    true = multiplied(gradient, factor)
    if isinstance(source, keras.Variable | tf.Variable) or true.dtype == gradient.dtype:
        return true
    # The code around it may combine it with the source, as without a scale.
    return tf.cast(true, gradient.dtype)


def _or_as_they_are(
    true: list[Any], sources: list[Any], again: Callable[[], list[Any]]
) -> list[Any]:
    """Returns gradients of no variable, or those without a scale if they overflowed.

    No optimizer judges them and lowers the scale.
    """
    known = [i for i, gradient in enumerate(true) if gradient is not None]
    if not known:
        return true
    dense = [tf.convert_to_tensor(true[i]) for i in known]

    def without_a_scale() -> list[tf.Tensor]:
        plain = again()
        return [
            tf.convert_to_tensor(_unscaled(plain[i], sources[i], 1.0)) for i in known
        ]

    is_finite = tf.math.is_finite(tf.reduce_sum(sums_of_squares(dense)))
    chosen = tf.cond(is_finite, lambda: dense, without_a_scale)
    found = dict(zip(known, chosen, strict=True))
    return [found.get(i) for i in range(len(true))]
