"""The models that are served: where they lie, each with a queue in front of it."""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import prometheus_client as prometheus

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
# Seconds: from a tenth of a millisecond, what a small model takes, to ten seconds.
_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_EXAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What requests are held to; `serve` says what each limit is."""

    max_batch_size: int | None = None
    max_queue: int = 256
    max_body: int = 64 * 2**20
    max_json: int = 4 * 2**20
    timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        checks.positive("timeout_seconds", self.timeout_seconds)
        for name in ("max_batch_size", "max_queue", "max_body", "max_json"):
            if (value := getattr(self, name)) is not None:
                checks.positive_int(name, value)


class Metrics:
    """Counters and histograms by the name of a model, "" where a request names none."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...] = _SECONDS
        ) -> prometheus.Histogram:
            return prometheus.Histogram(
                f"tfamp_{name}",
                *(text, ["model"]),
                registry=self.registry,
                buckets=buckets,
            )

        self.requests = prometheus.Counter(
            *("tfamp_requests", "Answers by HTTP status.", ["model", "status"]),
            registry=self.registry,
        )
        self.waiting = prometheus.Gauge(
            *("tfamp_queue_requests", "Requests that wait or are computed."),
            ["model"],
            registry=self.registry,
        )
        text = "From the last byte of a request to its answer."
        self.seconds = histogram("request_seconds", text)
        self.waited = histogram("queue_seconds", "Time in the queue.")
        self.run = histogram("run_seconds", "Runs of the model.")
        self.examples = histogram("batch_examples", "Examples in a run.", _EXAMPLES)

    def counts(self) -> dict[str, int]:
        """Returns the number of answers by HTTP status."""
        found: dict[str, int] = {}
        for sample in next(iter(self.requests.collect())).samples:
            if sample.name.endswith("_total"):
                status = sample.labels["status"]
                found[status] = found.get(status, 0) + int(sample.value)
        return found


class Place(NamedTuple):
    """Where a model lies, and the number of its version."""

    folder: Path
    version: str = "1"


class Served:
    """A model that answers."""

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
    newest = max(numbers, key=int, default=None)
    return None if newest is None else Place(path / newest, str(int(newest)))
