"""The models that are served: where they lie, each with a queue in front of it."""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from tfamp.records import checks
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
from tfamp.serving.server.protocol import Refusal

log = logging.getLogger("tfamp.serve")
# A name goes into addresses and metrics.
_ALLOWED = re.compile(r"[A-Za-z0-9._-]+")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What requests are held to; `application` says what each limit is."""

    max_batch_size: int | None
    max_queue: int
    max_body: int
    max_json: int
    timeout_seconds: float

    def __post_init__(self) -> None:
        checks.positive("timeout_seconds", self.timeout_seconds)
        for name in ("max_batch_size", "max_queue", "max_body", "max_json"):
            if (value := getattr(self, name)) is not None:
                checks.positive_int(name, value)


class Served:
    """A model that answers."""

    def __init__(
        self,
        name: str,
        folder: Path,
        load: Callable[[Path], LoadedModel],
        limits: Limits,
    ) -> None:
        self.name = name
        try:
            self.model = load(folder)
            # Inputs that it has answered; None where none were found.
            self._example, alone = warm_up(self.model)
        except Exception as error:
            raise RuntimeError(
                f"Model {name!r} in {str(folder)!r} cannot be loaded: "
                f"{short_error(error)}"
            ) from error
        size = limits.max_batch_size or (1 if alone else DEFAULT_BATCH_SIZE)
        if alone and size == 1:
            log.warning("Model %r answers requests one by one, as %s.", name, alone)
        self.batcher = Batcher(
            self.model,
            max_batch_size=size,
            max_queue=limits.max_queue,
            timeout_seconds=limits.timeout_seconds,
        )
        self._is_failing = False

    async def ask(self, inputs: Arrays) -> Arrays:
        """Returns what the model answers, or says whose fault it is if it fails."""
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
        text = f"Model {self.name!r} does not take these inputs: {said}. Compare them "
        raise Refusal(400, f"{text}with its metadata.")

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


def named_folders(texts: Iterable[str]) -> dict[str, Path]:
    """Returns where the models lie that `PATH` and `NAME=PATH` name, by their names.

    A path is an exported folder, or one of several, which are called as they are.
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        path = Path(rest if equals else text)
        if (path / NAME).is_file():
            folders = [(name if equals else path.resolve().name, path)]
        else:
            # `glob` finds nothing in what is no folder.
            inside = sorted(each.parent for each in path.glob(f"*/{NAME}"))
            folders = [(each.name, each) for each in inside]
            if equals and inside:
                raise ValueError(
                    f"{text!r} names {len(inside)} models; expected one. Leave the "
                    "name out, or name the folder of one."
                )
        if not folders:
            what = "is no folder" if not path.is_dir() else f"holds no {NAME}"
            raise FileNotFoundError(
                f"{str(path)!r} {what}; expected a folder that `tfamp.export` wrote, "
                "or one of several. Write one with `tfamp export`, or correct the path."
            )
        for called, folder in folders:
            if called in found or not _ALLOWED.fullmatch(called):
                why = "as another one is" if called in found else "in other letters"
                raise ValueError(
                    f"The model of {text!r} is called {called!r}, {why}; expected a "
                    "new name of letters, digits, '.', '_' and '-'. Name it, as in "
                    "'digits=PATH'."
                )
            found[called] = folder
    return found
