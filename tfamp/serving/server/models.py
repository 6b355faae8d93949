"""The models that are served, each with a queue in front of it.

Nothing waits for a batch to fill: what is queued when the model is free shares a run.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfamp.records.checks import short_error
from tfamp.serving.runtimes.manifest import NAME
from tfamp.serving.runtimes.signature import LoadedModel, dtype_named
from tfamp.serving.server.protocol import Refusal

Arrays = Mapping[str, np.ndarray]
log = logging.getLogger("tfamp.serve")
DEFAULT_BATCH_SIZE = 64
_LENGTH = 32  # of dimensions that the signature leaves open, in the example


class _Waiting(NamedTuple):
    """A request in the queue."""

    inputs: Arrays
    num_examples: int
    shapes: list[tuple[int, ...]]  # of an example
    future: "concurrent.futures.Future[Arrays]"


class Served:
    """A model that answers; `application` says what each limit is."""

    def __init__(
        self,
        name: str,
        model: LoadedModel,
        *,
        max_batch_size: int | None,
        max_queue: int,
        timeout_seconds: float,
    ) -> None:
        self.name, self.model = name, model
        self._example = warm_up(model)
        self._max_queue, self._timeout_seconds = max_queue, timeout_seconds
        self._size = max_batch_size or DEFAULT_BATCH_SIZE
        if max_batch_size is None and not model.is_by_example:
            self._size, text = 1, "Model %r answers requests one by one, as %s."
            log.warning(text, name, "an answer would depend on the others of its batch")
        # Is called with the number of examples of a run.
        self.on_run: Callable[[int], object] = lambda num_examples: None
        self.num_waiting = 0
        self._queue: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        # A run that never ends keeps no process.
        threading.Thread(target=self._work, daemon=True).start()

    async def is_ready(self) -> bool:
        """States whether it answers an example in time."""
        with contextlib.suppress(Refusal):
            return self._example is None or bool(await self.ask(self._example))
        return False

    async def ask(self, inputs: Arrays) -> Arrays:
        """Returns what the model answers to a request, once its turn has come."""
        if self.num_waiting >= self._max_queue:
            text = f"{self.num_waiting} requests wait already, the most that may."
            raise Refusal(503, f"{text} Try again.", retry=True)
        found: concurrent.futures.Future[Arrays] = concurrent.futures.Future()
        shapes = [array.shape for array in inputs.values()]
        self._queue.put(_Waiting(inputs, shapes[0][0], [x[1:] for x in shapes], found))
        self.num_waiting += 1
        try:
            seconds = self._timeout_seconds
            return await asyncio.wait_for(asyncio.wrap_future(found), seconds)
        except asyncio.TimeoutError:
            text = f"No answer within {seconds:g} s, as more waits. Try again later."
            raise Refusal(504, text) from None
        finally:
            self.num_waiting -= 1

    def _work(self) -> None:
        """Runs the model on the oldest request and those that fit into its batch."""
        left: list[_Waiting] = []
        while True:
            left = left or [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    left.append(self._queue.get_nowait())
            batch: list[_Waiting] = []
            others: list[_Waiting] = []
            room = self._size
            for each in left:
                is_like = not batch or each.shapes == batch[0].shapes
                if batch and each.num_examples > room or not is_like:
                    others.append(each)
                elif each.future.set_running_or_notify_cancel():  # not out of time
                    batch.append(each)
                    room -= each.num_examples
            left = others
            answers = self._answers(batch)
            if batch:
                self.on_run(sum(each.num_examples for each in batch))
            for each, result in zip(batch, answers, strict=True):
                if isinstance(result, Refusal):
                    each.future.set_exception(result)
                else:
                    each.future.set_result(result)

    def _answers(self, batch: list[_Waiting]) -> list[Arrays | Refusal]:
        """Returns the outputs of each request, by one run where that can give them."""
        # One of them may spoil it for all, and together they may need more memory than
        # there is; errors of extensions, too, would end the thread.
        with contextlib.suppress(BaseException):
            if len(batch) > 1:
                names = batch[0].inputs
                joined = lambda n: np.concatenate([x.inputs[n] for x in batch])  # noqa: E731
                *ends, last = np.cumsum([each.num_examples for each in batch]).tolist()
                outputs = self.model.run({n: joined(n) for n in names})
                if {array.shape[:1] for array in outputs.values()} == {(last,)}:
                    parts = {name: np.split(x, ends) for name, x in outputs.items()}
                    own = zip(*parts.values(), strict=True)
                    return [dict(zip(parts, each, strict=True)) for each in own]
        return [self._alone(each) for each in batch]

    def _alone(self, one: _Waiting) -> Arrays | Refusal:
        """Returns the outputs of a request, or whose fault it is if there are none."""
        try:
            return self.model.run(one.inputs)
        except MemoryError:
            text = f"There is no memory for {one.num_examples} examples at once."
            return Refusal(503, f"{text} Send fewer, or try again.", retry=True)
        except BaseException as error:  # as above
            said = short_error(error)
        try:  # tells a model that is broken from inputs that are
            if self._example is not None:
                self.model.run(self._example)
        except BaseException:
            log.error("Model %r fails: %s", self.name, said)
            return Refusal(500, f"Model {self.name!r} fails: {said}")
        return Refusal(400, f"Model {self.name!r} does not take these inputs: {said}.")


def warm_up(model: LoadedModel) -> Arrays | None:
    """Runs a model on an example; returns it, or None where no example was found."""
    inputs = {}
    for spec in model.signature.inputs:
        rest = (_LENGTH if size is None else size for size in spec.shape[1:])
        dtype = dtype_named(spec.dtype)
        fill = "" if dtype.kind == "O" else 1
        inputs[spec.name] = np.full((spec.shape[0] or 1, *rest), fill, dtype)
    try:
        model.run(inputs)
    except Exception:
        if any(None in spec.shape[1:] for spec in model.signature.inputs):
            return None
        raise
    return inputs


def named_folders(texts: Iterable[str]) -> dict[str, Path]:
    """Returns where the models lie that `PATH` and `NAME=PATH` name, by their names."""
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        path = Path(rest if equals else text)
        if (path / NAME).is_file():
            folders = [(name if equals else path.resolve().name, path)]
        else:  # `glob` finds nothing in what is no folder.
            inside = [] if equals else sorted(path.glob(f"*/{NAME}"))
            folders = [(each.parent.name, each.parent) for each in inside]
        if not folders:
            raise FileNotFoundError(
                f"{str(path)!r} holds no {NAME}; expected a folder that `tfamp.export` "
                "wrote, or, without a name, one of several."
            )
        for called, folder in folders:  # a name goes into addresses and metrics
            if called in found or not re.fullmatch(r"[A-Za-z0-9._-]+", called):
                raise ValueError(
                    f"The model of {text!r} is called {called!r}; expected a new name "
                    "of letters, digits, '.', '_', '-': 'name=PATH'."
                )
            found[called] = folder
    return found
