"""What stands around a model's training function, for the length of one `fit`.

Keras tells callbacks nothing of an exception: `fit` is left, and `on_train_end` is
never called. So each `fit` has a record of those who joined it, in the order in which
they stand around the training function. It ends with `fit`, however that ends: then
the training function is the one that Keras made, and all are told.

Relies on: `fit` and `train_on_batch` calling `model.train_function` anew for each step.
"""

import contextlib
import enum
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks.patches import replaced


def on_batch(model: keras.Model) -> Any:
    """Returns a function that trains on one batch as `fit` does, traced or compiled."""
    function = type(model)._make_function(model, model.train_step)
    return lambda data: function([data])


def on_iterator(model: keras.Model) -> Any:
    """Returns a training function of a model as it is compiled now."""
    return type(model)._make_function(model, model.train_step)


# Takes the next function inside and the iterator, returns the logs.
Call = Callable[[Callable[[Any], Any], Any], Any]


class Place(enum.IntEnum):
    """Where a call stands around the training function, from the inside out."""

    THROUGHPUT = enum.auto()
    NAN_RECOVERY = enum.auto()


_LOCK = threading.Lock()
_NUMBERS = itertools.count()
# The runs of each model that are under way, the innermost last.
_RUNS: "weakref.WeakKeyDictionary[keras.Model, list[Run]]" = weakref.WeakKeyDictionary()


class Member:
    """The part that a callback has in one `fit`.

    `has_place` says whether its call stands around the training function; another
    member may have had the place before.
    """

    def __init__(
        self,
        run: "Run",
        close: Callable[[BaseException | None], None],
    ) -> None:
        self.has_place = False
        self._run, self._close = run, close

    def leave(self, error: BaseException | None = None) -> None:
        """Ends its part and tells it so; a second time does nothing.

        `error` is what ended `fit`, None where nothing did.
        """
        if self in self._run.members:
            self._run.drop(self)
            self._close(error)

    def surround(self) -> None:
        """Puts the calls of all members around what the training function is now.

        Another callback may have put its own around it, or had it made anew.
        """
        self._run.surround()


class Run:
    """One `fit` of a model, in one thread."""

    def __init__(
        self, model: keras.Model, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.model, self.thread = model, threading.get_ident()
        self.arguments = arguments or {}
        # What Keras draws the batches of training from: the first that `fit` resets.
        self.epochs: Any = None
        self.number = next(_NUMBERS)
        self.members: list[Member] = []
        self.calls: dict[Place, tuple[Member, Call]] = {}
        self._is_inside = False

    def drop(self, member: Member) -> None:
        """Lets a member go."""
        self.members.remove(member)
        self.calls = {p: c for p, c in self.calls.items() if c[0] is not member}
        if not self.calls:
            self._take_off()

    def end(self, error: BaseException | None) -> None:
        """Lets all members go, the first one first, whatever one of them raises."""
        with contextlib.ExitStack() as stack:
            for member in reversed(self.members):
                stack.callback(_leave, member, error)

    def surround(self) -> None:
        """Puts the calls around the training function, unless they are there."""
        function = self.model.train_function
        if function is None or not self.calls:
            return
        if all(each.run is not self for each in _layers(function)):
            self.model.train_function = _Around(self, function)

    def call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Runs a training function, with the calls of all members around it."""
        if self._is_inside:  # what another callback put in between has called it
            return function(iterator)
        for place in sorted(self.calls):
            function = functools.partial(self.calls[place][1], function)
        with replaced(self, _is_inside=True):
            return function(iterator)

    def _take_off(self) -> None:
        """Takes the calls off the training function, where they can be reached."""
        outer, function = None, self.model.train_function
        for each in list(_layers(function)):
            if each.run is not self:
                outer = each
            elif outer is None:
                self.model.train_function = each.function
            else:
                outer.function = each.function


class _Around:
    """A training function with the calls of a run around it."""

    def __init__(self, run: Run, function: Callable[[Any], Any]) -> None:
        functools.update_wrapper(self, function)
        self.run, self.function = run, function

    def __call__(self, iterator: Any) -> Any:
        # Another `fit` of this model, inside of this one, is none of its members'.
        run = _current(self.run.model) or self.run
        return run.call(self.function, iterator)


def join(
    model: keras.Model,
    close: Callable[[BaseException | None], None],
    *,
    place: Place | None = None,
    call: Call | None = None,
) -> Member:
    """Joins the `fit` of a model that runs now, as callbacks do when training begins.

    In a loop of the user's own, with no `fit` around it, the part ends where the
    callback says so.

    Args:
        model: The model.
        close: Called once when the part ends, with the exception that ended `fit`, or
            None.
        place: Where `call` stands around the training function.
        call: Called in its place with the next function inside, and the iterator.
    """
    run = _current(model) or Run(model)
    member = Member(run, close)
    run.members.append(member)
    if place is not None and call is not None and place not in run.calls:
        member.has_place = True
        run.calls[place] = member, call
        run.surround()
    return member


@contextlib.contextmanager
def running(
    model: keras.Model, arguments: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """A frame around one `fit`, or any other training, of a model.

    Whoever joined a `fit` around it rests inside. `arguments` are those of `fit` by
    name, as they are when Keras gets them.
    """
    run = Run(model, arguments or {})
    with _LOCK:
        _RUNS.setdefault(model, []).append(run)
    try:
        yield
    except BaseException as error:
        run.end(error)
        raise
    else:
        run.end(None)
    finally:
        with _LOCK:
            _RUNS[model].remove(run)
            if not _RUNS[model]:
                del _RUNS[model]


def note_made(model: keras.Model) -> None:
    """Puts what stood around a model's training function around the one just made."""
    run = _current(model)
    if run is not None:
        run.surround()


def note_epochs(epochs: Any) -> None:
    """Notes what the run that is under way in this thread draws its batches from."""
    thread = threading.get_ident()
    with _LOCK:
        runs = [r for each in _RUNS.values() for r in each if r.thread == thread]
    # The innermost is the last to have begun.
    run = max(runs, key=lambda each: each.number, default=None)
    if run is not None and run.epochs is None:
        run.epochs = epochs


def epochs_of(model: keras.Model) -> Any:
    """Returns what the `fit` of a model that runs now draws its batches from."""
    run = _current(model)
    return None if run is None else run.epochs


def callbacks_of(model: keras.Model) -> list[Any]:
    """Returns the callbacks of the `fit` of a model that runs now."""
    run = _current(model)
    given = None if run is None else run.arguments.get("callbacks")
    if given is None:
        return []
    found = getattr(given, "callbacks", given)  # Keras's own list of them
    return list(tf.nest.flatten(found))


def _current(model: keras.Model) -> Run | None:
    """Returns the innermost run of a model in this thread."""
    thread = threading.get_ident()
    for run in reversed(_RUNS.get(model, ())):
        if run.thread == thread:
            return run
    return None


def _layers(function: Any) -> Iterator[_Around]:
    while isinstance(function, _Around):
        yield function
        function = function.function


def _leave(member: Member, error: BaseException | None) -> None:
    try:
        member.leave(error)
    except Exception:
        logging.exception("A callback could not be closed after its `fit`.")
