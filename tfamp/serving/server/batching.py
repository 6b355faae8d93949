"""Requests that wait together are answered by one run of the model.

Nothing waits for a batch to fill: a thread takes what is queued when it is free. Under
load that is a batch, alone it is the one request, at once. The first runs of a model,
`warm_up`, show whether each example of a batch is answered for itself.
"""

import asyncio
import collections
import contextlib
import dataclasses
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
# Examples of a batch, where nobody says.
DEFAULT_BATCH_SIZE = 64
# Lengths that are tried for dimensions that the signature leaves open.
_LENGTHS = (16, 32, 64, 1, 224)
# How much larger the other example of a batch is, and the part of the largest output
# that an answer may move by. Sums in another order move it by far less, one scale of
# int8 for both examples by far more.
_LARGER = 100.0
_MAX_CHANGE = 0.02


class ModelError(RuntimeError):
    """A run of the model failed; the message says how."""


@dataclasses.dataclass(eq=False, slots=True)
class _Waiting:
    """A request in the queue."""

    inputs: Arrays
    num_examples: int
    key: tuple[tuple[int, ...], ...]  # those of one key differ in examples alone
    future: "asyncio.Future[Arrays]"
    timer: asyncio.TimerHandle


class Batcher:
    """A queue in front of a model, and the thread that runs the model."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_batch_size: int,
        max_queue: int,
        timeout_seconds: float,
    ) -> None:
        self._model = model
        self._max_batch_size, self._max_queue = max_batch_size, max_queue
        self._timeout_seconds = timeout_seconds
        # Is called with the number of examples of a run.
        self.on_run: Callable[[int], object] = lambda num_examples: None
        self._queue: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._run_since: float | None = None
        self.num_waiting = 0

    @property
    def is_well(self) -> bool:
        """Whether its thread lives and no run lasts longer than an answer may take."""
        since = self._run_since
        is_stuck = since and time.perf_counter() - since > self._timeout_seconds
        return not is_stuck and (self._thread is None or self._thread.is_alive())

    def ask(self, inputs: Arrays) -> "asyncio.Future[Arrays]":
        """Returns the future outputs of a request; called in the event loop."""
        if self.num_waiting >= self._max_queue:
            raise Refusal(
                503,
                f"{self.num_waiting} requests wait already, which is the most that "
                "may. Try again, or ask another server.",
                retry=True,
            )
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        shapes = [array.shape for array in inputs.values()]
        future: asyncio.Future[Arrays] = loop.create_future()
        waiting = _Waiting(
            inputs,
            shapes[0][0] if shapes and shapes[0] else 1,
            tuple(shape[1:] for shape in shapes),
            future,
            loop.call_later(self._timeout_seconds, self._expire, future),
        )
        self.num_waiting += 1
        self._queue.put(waiting)
        return future

    def _expire(self, future: "asyncio.Future[Arrays]") -> None:
        if not future.done():
            text = f"No answer within {self._timeout_seconds:g} s. The server has more "
            future.set_exception(
                Refusal(504, f"{text}to do than it can; try again later.")
            )

    def _work(self) -> None:
        """Runs the model on what is queued until the process ends."""
        waiting: collections.deque[_Waiting] = collections.deque()
        while True:
            if not waiting:
                waiting.append(self._queue.get())
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(self._queue.get_nowait())
            self._answer(self._next(waiting))

    def _next(self, waiting: collections.deque[_Waiting]) -> list[_Waiting]:
        """Takes the oldest request and those that fit into a batch with it."""
        batch = [waiting.popleft()]
        room = self._max_batch_size - batch[0].num_examples
        others: list[_Waiting] = []
        while waiting and room > 0:
            each = waiting.popleft()
            if each.num_examples <= room and each.key == batch[0].key:
                batch.append(each)
                room -= each.num_examples
            else:
                others.append(each)
        waiting.extendleft(reversed(others))
        return batch

    def _answer(self, batch: list[_Waiting]) -> None:
        """Runs the model and hands each request its own part of the outputs."""
        self._run_since = time.perf_counter()
        # Those that ran out of time are not worth a run.
        asked = [each for each in batch if not each.future.done()]
        results = self._together(asked) if len(asked) > 1 else None
        if results is None:
            results = [self._alone(each) for each in asked]
        self._run_since = None

        def deliver() -> None:
            self.num_waiting -= len(batch)
            for each in batch:
                each.timer.cancel()
            for each, result in zip(asked, results, strict=True):
                if each.future.done():
                    continue
                if isinstance(result, Exception):
                    each.future.set_exception(result)
                else:
                    each.future.set_result(result)
            if asked:
                self.on_run(sum(each.num_examples for each in asked))

        with contextlib.suppress(RuntimeError):  # The loop has ended.
            batch[0].future.get_loop().call_soon_threadsafe(deliver)

    def _together(self, asked: list[_Waiting]) -> list[Arrays | Exception] | None:
        """Returns the outputs of each request; None where one run cannot give them.

        One of them may spoil it for all, and together they may need more memory than
        there is.
        """
        ends = np.cumsum([each.num_examples for each in asked]).tolist()
        starts = [0, *ends[:-1]]
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
        return [
            {name: array[start:end] for name, array in outputs.items()}
            for start, end in zip(starts, ends, strict=True)
        ]

    def _alone(self, one: _Waiting) -> Arrays | Exception:
        try:
            return self._model.run(one.inputs)
        except MemoryError:
            text = f"There is no memory for {one.num_examples} examples at once."
            return Refusal(503, f"{text} Send fewer, or try again.", retry=True)
        except BaseException as error:  # as above
            return ModelError(short_error(error))


class WarmUp(NamedTuple):
    """Inputs that a model answers, and why requests may not share a run, "" if they do.

    The inputs are None where none were found.
    """

    inputs: dict[str, np.ndarray] | None
    alone: str


def warm_up(model: LoadedModel) -> WarmUp:
    """Runs a model and finds out whether requests may share a run."""
    specs = model.signature.inputs
    is_open = any(None in spec.shape[1:] for spec in specs)
    for length in _LENGTHS if is_open else (1,):
        inputs = {spec.name: _example(spec, length, 0) for spec in specs}
        try:
            alone = model.run(inputs)
            break
        except Exception:
            if not is_open:
                raise
    else:
        return WarmUp(None, "no example was found that it answers")
    if any(not spec.shape or spec.shape[0] is not None for spec in specs):
        return WarmUp(inputs, "its number of examples is fixed")
    try:
        others = {spec.name: _example(spec, length, 1) for spec in specs}
        both = model.run({n: np.concatenate([inputs[n], others[n]]) for n in inputs})
    except Exception as error:
        return WarmUp(inputs, f"two examples fail together: {error}")
    for name, array in alone.items():
        if both[name].shape[:1] != (2,) or array.shape[:1] != (1,):
            return WarmUp(inputs, f"output {name!r} has no row for each example")
        if _change(array[:1], both[name][:1]) > _MAX_CHANGE:
            why = "changes with the others of its batch, as where int8 has one scale"
            return WarmUp(inputs, f"output {name!r} of an example {why} for a batch")
    return WarmUp(inputs, "")


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
