"""The models that are served, each with a queue in front of it.

Nothing waits for a batch to fill: what is queued when the model is free shares a run.
Under load that is a batch, alone it is the one request, at once.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import logging
import re
import time
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
# Examples of a batch, where nobody says.
DEFAULT_BATCH_SIZE = 64
# Of dimensions that the signature leaves open, in the example.
_LENGTH = 32


class ModelError(RuntimeError):
    """A run of the model failed; the message says how."""


class Limits(NamedTuple):
    """What requests are held to; `application` says what each limit is."""

    max_batch_size: int | None
    max_queue: int
    max_body: int
    max_json: int
    timeout_seconds: float


class _Waiting(NamedTuple):
    """A request in the queue."""

    inputs: Arrays
    num_examples: int
    key: tuple[tuple[int, ...], ...]  # those of one key differ in examples alone
    future: "asyncio.Future[Arrays]"


class Served:
    """A model that answers."""

    def __init__(
        self,
        name: str,
        folder: Path,
        load: Callable[[Path], LoadedModel],
        limits: Limits,
    ) -> None:
        self.name, self._limits = name, limits
        try:
            self.model = load(folder)
            self._example = warm_up(self.model)
        except Exception as error:
            raise RuntimeError(
                f"Model {name!r} in {str(folder)!r} cannot be loaded: "
                f"{short_error(error)}"
            ) from error
        size = DEFAULT_BATCH_SIZE if self.model.is_by_example else 1
        self._size = limits.max_batch_size or size
        if self._size == 1:
            why = "an answer would depend on the others of its batch"
            log.warning("Model %r answers requests one by one, as %s.", name, why)
        # Is called with the number of examples of a run.
        self.on_run: Callable[[int], object] = lambda num_examples: None
        self.num_waiting = 0
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._runs: asyncio.Task[None] | None = None
        self._run_since: float | None = None
        self._is_failing = False

    async def ask(self, inputs: Arrays) -> Arrays:
        """Returns what the model answers, or says whose fault it is if it fails."""
        try:
            found = await self._put(inputs)
        except ModelError as error:
            said = error
        else:
            self._is_failing = False
            return found
        await self._ask_example()
        if self._is_failing:
            raise Refusal(500, f"Model {self.name!r} fails: {said}")
        text = f"Model {self.name!r} does not take these inputs: {said}. Compare them "
        raise Refusal(400, f"{text}with its metadata.")

    async def is_ready(self) -> bool:
        """States whether it answers; one that failed is asked for its example again."""
        if self._is_failing:
            with contextlib.suppress(Refusal):
                await self._ask_example()
        return not self.is_stuck and not self._is_failing

    @property
    def is_stuck(self) -> bool:
        """Whether a run takes longer than any may."""
        took = 0.0 if self._run_since is None else time.monotonic() - self._run_since
        return took > self._limits.timeout_seconds

    async def _ask_example(self) -> None:
        """Tells a model that is broken from inputs that are."""
        if self._example is None:
            return
        try:
            await self._put(self._example)
            self._is_failing = False
        except ModelError as error:
            log.error("Model %r fails: %s", self.name, error)
            self._is_failing = True

    async def _put(self, inputs: Arrays) -> Arrays:
        """Returns the outputs of a request, once its turn has come."""
        if self.num_waiting >= self._limits.max_queue:
            raise Refusal(
                503,
                f"{self.num_waiting} requests wait already, which is the most that "
                "may. Try again, or ask another server.",
                retry=True,
            )
        shapes = [array.shape for array in inputs.values()]
        number = shapes[0][0] if shapes and shapes[0] else 1
        key = tuple(shape[1:] for shape in shapes)
        future = asyncio.get_running_loop().create_future()
        seconds = self._limits.timeout_seconds
        self._queue.append(_Waiting(inputs, number, key, future))
        self.num_waiting += 1
        if self._runs is None or self._runs.done():
            self._runs = asyncio.create_task(self._run())
        try:
            return await asyncio.wait_for(future, seconds)
        except asyncio.TimeoutError:
            text = f"No answer within {seconds:g} s. The server has more to do than it "
            raise Refusal(504, f"{text}can; try again later.") from None
        finally:
            self.num_waiting -= 1

    async def _run(self) -> None:
        """Runs the model on what is queued, until nothing is."""
        loop = asyncio.get_running_loop()
        while self._queue:
            batch = self._next()
            if not batch:
                continue
            self._run_since = time.monotonic()  # stays where the loop ends meanwhile
            found = await loop.run_in_executor(self._thread, self._answers, batch)
            self._run_since = None
            for each, result in zip(batch, found, strict=True):
                if each.future.done():
                    continue
                if isinstance(result, Exception):
                    each.future.set_exception(result)
                else:
                    each.future.set_result(result)
            self.on_run(sum(each.num_examples for each in batch))

    def _next(self) -> list[_Waiting]:
        """Takes the oldest request and those that fit into a batch with it."""
        batch: list[_Waiting] = []
        others: list[_Waiting] = []
        room = 0
        while self._queue and (not batch or room > 0):
            each = self._queue.popleft()
            if each.future.done():
                continue
            if not batch:
                room = max(self._size, each.num_examples)
            is_like = not batch or each.key == batch[0].key
            if each.num_examples <= room and is_like:
                batch.append(each)
                room -= each.num_examples
            else:
                others.append(each)
        self._queue.extendleft(reversed(others))
        return batch

    def _answers(self, batch: list[_Waiting]) -> list[Arrays | Exception]:
        """Returns the outputs of each request, by one run where that can give them."""
        ends = np.cumsum([each.num_examples for each in batch]).tolist()
        # One of them may spoil it for all, and together they may need more memory than
        # there is; errors of extensions, too, would end the thread.
        with contextlib.suppress(BaseException):
            inputs = {
                name: np.concatenate([each.inputs[name] for each in batch])
                for name in batch[0].inputs
            }
            outputs = self.model.run(inputs) if len(batch) > 1 else {}
            if {array.shape[:1] for array in outputs.values()} == {(ends[-1],)}:
                return [
                    {name: array[start:end] for name, array in outputs.items()}
                    for start, end in zip([0, *ends], ends, strict=False)
                ]
        return [self._alone(each) for each in batch]

    def _alone(self, one: _Waiting) -> Arrays | Exception:
        try:
            return self.model.run(one.inputs)
        except MemoryError:
            text = f"There is no memory for {one.num_examples} examples at once."
            return Refusal(503, f"{text} Send fewer, or try again.", retry=True)
        except BaseException as error:  # as above
            return ModelError(short_error(error))


def warm_up(model: LoadedModel) -> dict[str, np.ndarray] | None:
    """Runs a model on an example; returns it, or None where no example was found."""
    inputs = {}
    for spec in model.signature.inputs:
        shape = [_LENGTH if size is None else size for size in spec.shape]
        if spec.shape and spec.shape[0] is None:
            shape[0] = 1
        dtype = dtype_named(spec.dtype)
        inputs[spec.name] = np.full(shape, "" if dtype.kind == "O" else 1, dtype)
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
                "wrote, or, without a name, one of several. Write one with `tfamp "
                "export`, or correct the path."
            )
        for called, folder in folders:  # a name goes into addresses and metrics
            if called in found or not re.fullmatch(r"[A-Za-z0-9._-]+", called):
                raise ValueError(
                    f"The model of {text!r} is called {called!r}; expected a new name "
                    "of letters, digits, '.', '_' and '-'. Name it, as in "
                    "'digits=PATH'."
                )
            found[called] = folder
    return found
