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
        # The function that was made ahead of the hooks, to be put back.
        self.bare: Any = None


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
        run = self._run
        if self in run.members:
            run.members.remove(self)
            if self.has_place and self._place is not None:
                del run.calls[self._place]
            if run.bare is not None and not run.calls:
                run.model.train_function, run.bare = run.bare, None
            self._close(error)


class _Runs(threading.local):
    """The runs of this thread that are under way, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Run] = []


_RUNS = _Runs()


def surrounded(model: keras.Model, function: Callable[[Any], Any]) -> Any:
    """Returns a training function around which the calls of each `fit` stand."""

    @functools.wraps(function)
    def call(iterator: Any) -> Any:
        # Another `fit` of this model, inside of this one, is none of its members'.
        run, inside = _current(model), function
        calls = {} if run is None else run.calls
        for place in sorted(calls):
            inside = functools.partial(calls[place], inside)
        return inside(iterator)

    call.function = function  # type: ignore[attr-defined]
    return call


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
        function = model.train_function
        if function is not None and not hasattr(function, "function"):
            run.bare, model.train_function = function, surrounded(model, function)
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
    return getattr(function, "function", function)


def on_batch(model: keras.Model) -> Any:
    """Returns a function that trains on one batch as `fit` does, traced or compiled."""
    function = on_iterator(model)
    return lambda data: function([data])


def _current(model: keras.Model) -> Run | None:
    """Returns the innermost run of a model in this thread."""
    return next((run for run in reversed(_RUNS.stack) if run.model is model), None)
