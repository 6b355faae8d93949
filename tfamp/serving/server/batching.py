"""Requests that wait together are answered by one run of the model.

Nothing waits for a batch to fill: a thread takes what is queued when it is free. Under
load that is a batch, alone it is the one request, at once. The first runs of a model,
`warm_up`, show whether each example of a batch is answered for itself.
"""

import asyncio
import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tfamp.records.checks import short_error
from tfamp.serving.runtimes.signature import LoadedModel, TensorSpec, dtype_named
from tfamp.serving.server.protocol import Refusal

Arrays = Mapping[str, np.ndarray]


class ModelError(RuntimeError):
    """A run of the model failed; the message says how."""


class _Waiting:
    """A request in the queue."""

    __slots__ = ("inputs", "future", "num_examples", "key", "since", "timer")

    def __init__(self, inputs: Arrays, future: "asyncio.Future[Arrays]") -> None:
        self.inputs = inputs
        self.future = future
        shapes = [array.shape for array in inputs.values()]
        self.num_examples = shapes[0][0] if shapes and shapes[0] else 1
        # Those of one key differ in the number of examples alone.
        self.key = tuple(shape[1:] for shape in shapes)
        self.since = time.perf_counter()
        self.timer: asyncio.TimerHandle | None = None


class Batcher:
    """A queue in front of a model, and the thread that runs the model."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_batch_size: int,
        max_queue: int,
        timeout_seconds: float,
        on_run: Callable[[int, list[float], float], None] | None = None,
    ) -> None:
        self._model = model
        self._max_batch_size = max_batch_size
        self._max_queue = max_queue
        self._timeout_seconds = timeout_seconds
        self._on_run = on_run
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._run_since: float | None = None
        self._is_stopped = False
        self.num_waiting = 0

    @property
    def is_well(self) -> bool:
        """Whether its thread lives and no run lasts longer than an answer may take."""
        since = self._run_since
        is_stuck = since and time.perf_counter() - since > self._timeout_seconds
        return not is_stuck and (self._thread is None or self._thread.is_alive())

    def ask(self, inputs: Arrays) -> "asyncio.Future[Arrays]":
        """Returns the future outputs of a request; called in the event loop."""
        if self._is_stopped:
            raise Refusal(503, "The server ends. Ask another one.", retry=True)
        if self.num_waiting >= self._max_queue:
            raise Refusal(
                503,
                f"{self.num_waiting} requests wait already, which is the most that "
                "may. Try again, or ask another server.",
                retry=True,
            )
        self._loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        waiting = _Waiting(inputs, self._loop.create_future())
        waiting.timer = self._loop.call_later(
            self._timeout_seconds, self._expire, waiting
        )
        self.num_waiting += 1
        self._queue.put(waiting)
        return waiting.future

    def stop(self) -> None:
        """Lets the thread end when it has answered what is queued."""
        self._is_stopped = True
        self._queue.put(None)

    def _expire(self, waiting: _Waiting) -> None:
        if not waiting.future.done():
            waiting.future.set_exception(
                Refusal(
                    504,
                    f"No answer within {self._timeout_seconds:g} s. The server has "
                    "more to do than it can; try again later.",
                )
            )

    def _work(self) -> None:
        """Runs the model on what is queued until it is told to end."""
        waiting: collections.deque[_Waiting] = collections.deque()
        is_stopping = False
        while waiting or not is_stopping:
            taken = [] if waiting else [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    taken.append(self._queue.get_nowait())
            is_stopping |= None in taken
            waiting.extend(each for each in taken if each is not None)
            if waiting:
                self._answer(self._next(waiting))

    def _next(self, waiting: collections.deque[_Waiting]) -> list[_Waiting]:
        """Takes the oldest request and those that fit into a batch with it."""
        batch = [waiting.popleft()]
        num_examples = batch[0].num_examples
        others: list[_Waiting] = []
        while waiting and num_examples < self._max_batch_size:
            each = waiting.popleft()
            fits = num_examples + each.num_examples <= self._max_batch_size
            if fits and each.key == batch[0].key:
                batch.append(each)
                num_examples += each.num_examples
            else:
                others.append(each)
        waiting.extendleft(reversed(others))
        return batch

    def _answer(self, batch: list[_Waiting]) -> None:
        """Runs the model and hands each request its own part of the outputs."""
        start = self._run_since = time.perf_counter()
        # Those that ran out of time are not worth a run.
        asked = [each for each in batch if not each.future.done()]
        results: list[Arrays | Exception] | None = None
        if len(asked) > 1:
            results = self._together(asked)
        if results is None:
            results = [self._alone(each) for each in asked]
        self._run_since = None
        seconds = time.perf_counter() - start

        def deliver() -> None:
            self.num_waiting -= len(batch)
            for each in batch:
                if each.timer is not None:
                    each.timer.cancel()
            for each, result in zip(asked, results, strict=True):
                if each.future.done():
                    continue
                if isinstance(result, Exception):
                    each.future.set_exception(result)
                else:
                    each.future.set_result(result)
            if asked and self._on_run is not None:
                num_examples = sum(each.num_examples for each in asked)
                waited = [start - each.since for each in asked]
                self._on_run(num_examples, waited, seconds)

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop has ended.
                self._loop.call_soon_threadsafe(deliver)

    def _together(self, asked: list[_Waiting]) -> list[Arrays | Exception] | None:
        """Returns the outputs of each request; None where one run cannot give them.

        One of them may spoil it for all, and together they may need more memory than
        there is.
        """
        ends = np.cumsum([each.num_examples for each in asked]).tolist()
        try:
            inputs = {
                name: np.concatenate([each.inputs[name] for each in asked])
                for name in asked[0].inputs
            }
            outputs = self._model.run(inputs)
            if {array.shape[:1] for array in outputs.values()} != {(ends[-1],)}:
                return None
        except BaseException:  # Of extensions too: nobody else would end the thread.
            return None
        starts = [0, *ends[:-1]]
        return [
            {name: array[start:end] for name, array in outputs.items()}
            for start, end in zip(starts, ends, strict=True)
        ]

    def _alone(self, one: _Waiting) -> Arrays | Exception:
        try:
            return self._model.run(one.inputs)
        except MemoryError:
            return Refusal(
                503,
                f"There is no memory for {one.num_examples} examples at once. Send "
                "fewer, or try again.",
                retry=True,
            )
        except BaseException as error:  # as above
            return ModelError(short_error(error))


# Lengths that are tried for dimensions that the signature leaves open.
_LENGTHS = (16, 32, 64, 1, 224)
# How much larger the other example of a batch is, and the part of the largest output
# that an answer may move by. Sums in another order move it by far less, one scale of
# int8 for both examples by far more.
_LARGER = 100.0
_MAX_CHANGE = 0.02
# Examples of a batch, where nobody says.
DEFAULT_BATCH_SIZE = 64


class WarmUp(NamedTuple):
    """What the first runs showed."""

    inputs: dict[str, np.ndarray] | None
    joins: bool
    why: str


def warm_up(model: LoadedModel) -> WarmUp:
    """Runs a model and finds out whether requests may share a run."""
    specs = model.signature.inputs
    is_open = any(None in spec.shape[1:] for spec in specs)
    inputs, failure = None, None
    for length in _LENGTHS if is_open else (1,):
        try:
            example = {spec.name: _example(spec, length, 0) for spec in specs}
            alone = model.run(example)
        except Exception as error:
            failure = error
            continue
        inputs = example
        break
    if inputs is None:
        if failure is not None and not is_open:
            raise failure
        return WarmUp(None, False, "no example was found that it answers")
    if any(not spec.shape or spec.shape[0] is not None for spec in specs):
        return WarmUp(inputs, False, "its number of examples is fixed")
    try:
        both = model.run(
            {
                spec.name: np.concatenate(
                    [inputs[spec.name], _example(spec, length, 1)]
                )
                for spec in specs
            }
        )
    except Exception as error:
        return WarmUp(inputs, False, f"two examples fail together: {error}")
    for name, array in alone.items():
        if both[name].shape[:1] != (2,) or array.shape[:1] != (1,):
            return WarmUp(inputs, False, f"output {name!r} has no row for each example")
        if _change(array[:1], both[name][:1]) > _MAX_CHANGE:
            return WarmUp(
                inputs,
                False,
                f"output {name!r} of an example changes with the others of its batch, "
                "as where int8 has one scale for a whole batch",
            )
    return WarmUp(inputs, True, "")


def _example(spec: TensorSpec, length: int, number: int) -> np.ndarray:
    """Returns one example of an input: the first small, the second large."""
    shape = [length if size is None else size for size in spec.shape]
    if shape and spec.shape[0] is None:
        shape[0] = 1
    dtype = dtype_named(spec.dtype)
    if dtype.kind == "O":
        return np.full(shape, f"text {number}", dtype=object)
    if dtype.kind in "iub":
        return np.full(shape, number).astype(dtype)
    # Not of NumPy's generators: importing them takes 10 ms and 2 MB of a server.
    waves = np.cos(1.7 * np.arange(number, number + np.prod(shape, dtype=int)))
    return (waves.reshape(shape) * _LARGER**number).astype(dtype)


def _change(alone: np.ndarray, beside: np.ndarray) -> float:
    """Returns the largest difference over the largest output."""
    if alone.dtype.kind in "OSU":
        return float(not np.array_equal(alone, beside))
    one, other = alone.astype(np.float64), beside.astype(np.float64)
    if not np.isfinite(one).all():
        return float(not np.array_equal(one, other, equal_nan=True))
    largest = np.abs(one).max(initial=0.0)
    change = np.abs(one - other).max(initial=0.0)
    return float(change / largest) if largest > 0 else float(change > 0)
