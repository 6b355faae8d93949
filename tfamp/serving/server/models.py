"""The models that are served: where they lie, and each with a queue in front of it."""

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from tfamp.records.checks import short_error
from tfamp.serving.runtimes.manifest import NAME
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.serving.server.batching import (
    DEFAULT_BATCH_SIZE,
    Arrays,
    Batcher,
    ModelError,
    warm_up,
)
from tfamp.serving.server.metrics import Metrics
from tfamp.serving.server.tensors import Refusal

log = logging.getLogger("tfamp.serve")
# A name goes into addresses and metrics.
_ALLOWED = re.compile(r"[A-Za-z0-9._-]+")


class Limits(NamedTuple):
    """What requests are held to.

    Args:
        max_batch_size: Examples in a run; None finds out whether an answer depends on
            the others of its batch, and takes 64 or 1.
        max_queue: Requests of a model that may wait.
        max_body: Bytes of the largest request.
        max_json: Bytes of the largest JSON.
        timeout_seconds: How long an answer, and a body on its way, may take.
    """

    max_batch_size: int | None = None
    max_queue: int = 256
    max_body: int = 64 * 2**20
    max_json: int = 4 * 2**20
    timeout_seconds: float = 10.0


class Place(NamedTuple):
    """Where a model lies, and the number of its version."""

    folder: Path
    version: str = "1"


class Served:
    """A model that answers.

    Args:
        name: As it stands in addresses.
        place: Where it lies.
        load: Reads an exported folder.
        limits: What requests are held to.
        metrics: What counts.

    Raises:
        RuntimeError: It cannot be loaded; its own error is the cause.
    """

    def __init__(
        self,
        name: str,
        place: Place,
        load: Callable[[Path], LoadedModel],
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self.name, self.version = name, place.version
        try:
            self.model = load(place.folder)
            first = warm_up(self.model)
        except Exception as error:
            raise RuntimeError(
                f"Model {name!r} in {str(place.folder)!r} cannot be loaded: "
                f"{short_error(error)}"
            ) from error
        size = limits.max_batch_size
        if size is None:
            size = DEFAULT_BATCH_SIZE if first.joins else 1
            if first.why:
                log.warning(
                    "Model %r answers requests one by one, as %s.", name, first.why
                )
        examples, run = metrics.examples.labels(name), metrics.run.labels(name)
        waiting = metrics.waited.labels(name)

        def on_run(num_examples: int, waited: list[float], seconds: float) -> None:
            examples.observe(num_examples)
            run.observe(seconds)
            for each in waited:
                waiting.observe(each)

        self.batcher = Batcher(
            self.model,
            max_batch_size=size,
            max_queue=limits.max_queue,
            timeout_seconds=limits.timeout_seconds,
            on_run=on_run,
        )
        metrics.waiting.labels(name).set_function(lambda: self.batcher.num_waiting)
        # Inputs that it has answered; None where none were found.
        self._example = first.inputs
        self._is_failing = False

    async def ask(self, inputs: Arrays) -> Arrays:
        """Returns what the model answers, or says whose fault it is if it fails.

        Raises:
            Refusal: There is no answer.
        """
        try:
            found = await self.batcher.ask(inputs)
        except ModelError as error:
            said = error
        else:
            self._is_failing = False
            return found
        await self._ask_example()
        if self._is_failing:
            raise Refusal(500, f"Model {self.name!r} fails: {said}")
        raise Refusal(
            400,
            f"Model {self.name!r} does not take these inputs: {said}. Compare them "
            "with its metadata.",
        )

    async def is_ready(self) -> bool:
        """States whether it answers; one that failed is asked for its example again."""
        if self._is_failing:
            try:
                await self._ask_example()
            except Refusal:
                return False
        return self.batcher.is_well and not self._is_failing

    async def _ask_example(self) -> None:
        """Tells a model that is broken from inputs that are."""
        if self._example is None:
            return
        try:
            await self.batcher.ask(self._example)
            self._is_failing = False
        except ModelError as error:
            log.error("Model %r fails: %s", self.name, error)
            self._is_failing = True


def named_places(texts: Iterable[str]) -> dict[str, Place]:
    """Returns where the models lie that `PATH` and `NAME=PATH` name, by their names.

    A path is an exported folder, one of numbered versions, of which the newest is
    taken, or one of several such models, which are called as their folders are.

    Raises:
        FileNotFoundError: A path does not exist, or holds no exported model.
        ValueError: A name cannot stand in an address, or came twice.

    Example:
        >>> named_places(["digits=nowhere"])
        Traceback (most recent call last):
        ...
        FileNotFoundError: There is no folder 'nowhere'; expected one that \
`tfamp.export` wrote, or one of several. Correct the path.
    """
    found: dict[str, Place] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        path = Path(rest if equals else text)
        if path.is_file():
            raise FileNotFoundError(
                f"{str(path)!r} is a file; expected a folder that `tfamp.export` "
                f"wrote. Write one with `tfamp export {path}`, or name the folder that "
                "the file is in."
            )
        if not path.is_dir():
            raise FileNotFoundError(
                f"There is no folder {str(path)!r}; expected one that `tfamp.export` "
                "wrote, or one of several. Correct the path."
            )
        place = _place(path)
        if place is not None:
            places = {name if equals else path.resolve().name: place}
        else:
            folders = sorted(each for each in path.iterdir() if each.is_dir())
            places = {each.name: p for each in folders if (p := _place(each))}
        if not places:
            raise FileNotFoundError(
                f"Folder {str(path)!r} holds neither {NAME} nor folders with it; "
                "expected an exported model, or several. Write one with "
                "`tfamp.export`."
            )
        if equals and place is None:
            raise ValueError(
                f"{text!r} names {len(places)} models, {list(places)}; expected one. "
                "Leave the name out, or name the folder of one."
            )
        for each in places:
            if not _ALLOWED.fullmatch(each):
                raise ValueError(
                    f"The model of {text!r} is called {each!r}; expected letters, "
                    "digits, '.', '_' and '-'. Name it, as in 'digits=PATH'."
                )
            if each in found:
                raise ValueError(
                    f"Two models are called {each!r}; expected one. Name them, as in "
                    "'first=PATH'."
                )
        found |= places
    return found


def _place(path: Path) -> Place | None:
    """Returns where in a folder its model lies; None where there is none."""
    if (path / NAME).is_file():
        return Place(path)
    numbers = [
        each.name
        for each in path.iterdir()
        if each.name.isascii() and each.name.isdigit() and (each / NAME).is_file()
    ]
    if not numbers:
        return None
    newest = max(numbers, key=int)
    return Place(path / newest, str(int(newest)))
