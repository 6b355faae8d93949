"""Requests that wait together are answered by one run of the model.

Nothing waits for a batch to fill: a thread takes what is queued when it is free. Under
load that is a batch, alone it is the one request, at once.
"""

import asyncio
import collections
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.serving.server.refusals import Refusal

Arrays = Mapping[str, np.ndarray]


class _Waiting:
    """A request in the queue.

    Args:
        inputs: Arrays by name.
        future: Gets the outputs or a `Refusal`.
    """

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
    """A queue in front of a model, and the thread that runs the model.

    Args:
        model: What answers.
        max_batch_size: Examples that go into one run; 1 keeps requests apart. A request
            of more goes alone, and so does one of another shape than the others.
        max_queue: Requests that may wait; more are refused.
        timeout_seconds: How long a request may take, waiting included.
        on_run: Called in the event loop after a run, with the number of examples, the
            seconds that their requests have waited and those of the run.
    """

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
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._is_stopped = False
        self.num_waiting = 0

    def ask(self, inputs: Arrays) -> "asyncio.Future[Arrays]":
        """Returns the future outputs of a request; called in the event loop.

        Raises:
            Refusal: The queue is full, or the version is going.
        """
        if self._is_stopped:
            raise Refusal(
                503, "This version of the model is going; try again.", retry=True
            )
        if self.num_waiting >= self._max_queue:
            raise Refusal(
                503,
                f"{self.num_waiting} requests wait already, which is the most that "
                "may. Try again, or ask another server.",
                retry=True,
            )
        self._loop = asyncio.get_running_loop()
        if not self._thread.is_alive():
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
        """Runs the model on what is queued, for ever."""
        waiting: collections.deque[_Waiting] = collections.deque()
        is_stopping = False
        while waiting or not is_stopping:
            if not waiting:
                first = self._queue.get()
                is_stopping |= first is None
                if first is not None:
                    waiting.append(first)
            while not is_stopping:
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
                is_stopping |= item is None
                if item is not None:
                    waiting.append(item)
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
        start = time.perf_counter()
        # Those that ran out of time are not worth a run.
        asked = [each for each in batch if not each.future.done()]
        results: list[Any] = []
        if asked:
            results = self._run(asked)
        found = dict(zip(map(id, asked), results, strict=True))
        seconds = time.perf_counter() - start
        waited = [start - each.since for each in asked]
        num_examples = sum(each.num_examples for each in asked)

        def deliver() -> None:
            self.num_waiting -= len(batch)
            for each in batch:
                if each.timer is not None:
                    each.timer.cancel()
                if each.future.done():
                    continue
                result = found[id(each)]
                if isinstance(result, Exception):
                    each.future.set_exception(result)
                else:
                    each.future.set_result(result)
            if asked and self._on_run is not None:
                self._on_run(num_examples, waited, seconds)

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)

    def _run(self, asked: list[_Waiting]) -> list[Any]:
        """Returns the outputs or the error of each request."""
        if len(asked) == 1:
            return [self._alone(asked[0])]
        inputs = {
            name: np.concatenate([each.inputs[name] for each in asked])
            for name in asked[0].inputs
        }
        ends = np.cumsum([each.num_examples for each in asked]).tolist()
        try:
            outputs = self._model.run(inputs)
            lengths = {array.shape[:1] for array in outputs.values()}
        except Exception:  # one of them may spoil it for all
            lengths = set()
        if lengths != {(ends[-1],)}:
            return [self._alone(each) for each in asked]
        starts = [0, *ends[:-1]]
        return [
            {name: array[start:end] for name, array in outputs.items()}
            for start, end in zip(starts, ends, strict=True)
        ]

    def _alone(self, one: _Waiting) -> Any:
        try:
            return self._model.run(one.inputs)
        except MemoryError:
            return Refusal(
                503,
                f"There is no memory for {one.num_examples} examples at once. Send "
                "fewer, or try again.",
                retry=True,
            )
        except Exception as error:
            return error
