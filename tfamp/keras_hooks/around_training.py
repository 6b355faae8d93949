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
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks.patches import replaced

# Takes the next function inside and the iterator, returns the logs.
Call = Callable[[Callable[[Any], Any], Any], Any]
Close = Callable[[BaseException | None], None]


class Place(enum.IntEnum):
    """Where a call stands around the training function, from the inside out."""

    THROUGHPUT = enum.auto()
    NAN_RECOVERY = enum.auto()


class Run:
    """One `fit`, or other training, of a model: its arguments, and who joined it."""

    def __init__(self, model: keras.Model, arguments: Mapping[str, Any]) -> None:
        self.model, self.arguments = model, arguments
        # What Keras draws the batches of training from: the first that `fit` resets.
        self.feed: Any = None
        self.members: list[Member] = []
        self.calls: dict[Place, Call] = {}
        self.is_inside = False

    def call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Runs a training function, with the calls of all members around it."""
        if self.is_inside:  # what another callback put in between has called it
            return function(iterator)
        for place in sorted(self.calls):
            function = functools.partial(self.calls[place], function)
        with replaced(self, is_inside=True):
            return function(iterator)


class Member:
    """The part that a callback has in one `fit`.

    `has_place` says whether its call stands around the training function; another
    member may have had the place before.
    """

    def __init__(self, run: Run, close: Close, place: Place | None) -> None:
        self.has_place = place is not None and place not in run.calls
        self._run, self._close, self._place = run, close, place

    def leave(self, error: BaseException | None = None) -> None:
        """Ends its part and tells it so; a second time does nothing.

        `error` is what ended `fit`, None where nothing did.
        """
        if self in self._run.members:
            self._run.members.remove(self)
            if self.has_place and self._place is not None:
                del self._run.calls[self._place]
                if not self._run.calls:
                    _take_off(self._run.model)
            self._close(error)

    def surround(self) -> None:
        """Puts the calls of all members around what the training function is now.

        Another callback may have put its own around it, or had it made anew.
        """
        _surround(self._run)


class _Runs(threading.local):
    """The runs of this thread that are under way, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Run] = []


_RUNS = _Runs()


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
    close: Close,
    *,
    place: Place | None = None,
    call: Call | None = None,
) -> Member:
    """Joins the `fit` of a model that runs now, as callbacks do when training begins.

    `close` is called once when the part ends, with the exception that ended `fit`, or
    None; outside of `fit` it ends where the callback says so. `call` is called in the
    place of the training function with the next function inside, and the iterator.
    """
    run = _current(model) or Run(model, {})
    member = Member(run, close, place)
    run.members.append(member)
    if member.has_place and place is not None and call is not None:
        run.calls[place] = call
        _surround(run)
    return member


@contextlib.contextmanager
def running(
    model: keras.Model, arguments: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """A frame around one `fit`, or any other training, of a model.

    Whoever joined a `fit` around it rests inside. `arguments` are those of `fit` by
    name, as they are when Keras gets them.
    """
    run, error = Run(model, arguments or {}), None
    _RUNS.stack.append(run)
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        for member in list(run.members):
            try:
                member.leave(error)
            except Exception:
                logging.exception("A callback could not be closed after its `fit`.")
        _RUNS.stack.remove(run)


def surrounded(model: keras.Model, function: Callable[[Any], Any]) -> Any:
    """Returns a training function just made, with what stood around the one before."""
    run = _current(model)
    return function if run is None or not run.calls else _Around(run, function)


def note_feed(feed: Any) -> None:
    """Notes what the run that is under way in this thread draws its batches from."""
    if _RUNS.stack and _RUNS.stack[-1].feed is None:
        _RUNS.stack[-1].feed = feed


def feed_of(model: keras.Model) -> Any:
    """Returns what the `fit` of a model that runs now draws its batches from."""
    run = _current(model)
    return None if run is None else run.feed


def callbacks_of(model: keras.Model) -> list[Any]:
    """Returns the callbacks of the `fit` of a model that runs now."""
    run = _current(model)
    given = None if run is None else run.arguments.get("callbacks")
    # Keras's own list of them, or what the user gave.
    return [] if given is None else tf.nest.flatten(getattr(given, "callbacks", given))


def on_iterator(model: keras.Model) -> Any:
    """Returns a training function of a model as it is compiled now."""
    function = type(model)._make_function(model, model.train_step)
    return function.function if isinstance(function, _Around) else function


def on_batch(model: keras.Model) -> Any:
    """Returns a function that trains on one batch as `fit` does, traced or compiled."""
    function = on_iterator(model)
    return lambda data: function([data])


def _current(model: keras.Model) -> Run | None:
    """Returns the innermost run of a model in this thread."""
    return next((run for run in reversed(_RUNS.stack) if run.model is model), None)


def _surround(run: Run) -> None:
    function = run.model.train_function
    if run.calls and function is not None and not isinstance(function, _Around):
        run.model.train_function = _Around(run, function)


def _take_off(model: keras.Model) -> None:
    while isinstance(model.train_function, _Around):
        model.train_function = model.train_function.function
