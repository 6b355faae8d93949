"""The models that are served, their versions, and what changes of them on disk.

A request is answered by one version from its check to its answer. A version that is
replaced answers what it was asked and ends.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfamp.records.checks import short_error
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.serving.server import folders
from tfamp.serving.server.batching import Batcher
from tfamp.serving.server.metrics import Metrics
from tfamp.serving.server.refusals import Refusal, unknown
from tfamp.serving.server.warm_up import DEFAULT_BATCH_SIZE, warm_up

Key = tuple[str, str]
log = logging.getLogger("tfamp.serve")


class Version(NamedTuple):
    """A model that answers.

    Args:
        name: The model's.
        number: The version's.
        model: What answers.
        batcher: The queue in front of it.
        example: Inputs that it has answered; None where none were found.
        stamp: Of its files, when they were read.
    """

    name: str
    number: str
    model: LoadedModel
    batcher: Batcher
    example: dict[str, np.ndarray] | None
    stamp: folders.Stamp


class Limits(NamedTuple):
    """What requests are held to.

    Args:
        max_batch_size: Examples in a run; None finds out whether an answer depends on
            the others of its batch, and takes 64 or 1.
        max_queue: Requests of a model that may wait.
        timeout_seconds: How long a request may take.
    """

    max_batch_size: int | None = None
    max_queue: int = 256
    timeout_seconds: float = 10.0


class Models:
    """The served models by name and version; changed in the event loop alone.

    Args:
        sources: Where they lie.
        load: Reads one exported folder.
        limits: What requests are held to.
        metrics: What counts runs and loads.
    """

    def __init__(
        self,
        sources: list[folders.Source],
        load: Callable[[Path], LoadedModel],
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self._sources = sources
        self._load = load
        self._limits = limits
        self._metrics = metrics
        self._versions: dict[str, dict[str, Version]] = {
            source.name: {} for source in sources
        }
        # Stamps that were seen last, and those that failed to load.
        self._seen: dict[Key, folders.Stamp] = {}
        self._failed: dict[Key, folders.Stamp] = {}

    @property
    def names(self) -> list[str]:
        """The models' names."""
        return list(self._versions)

    @property
    def is_ready(self) -> bool:
        """Whether every model has a version that answers."""
        return all(self._versions.values())

    def numbers(self, name: str) -> list[str]:
        """Returns the versions of a model, the newest last.

        Raises:
            Refusal: There is no such model.
        """
        if name not in self._versions:
            raise unknown("model", name, self._versions)
        return sorted(self._versions[name], key=int)

    def get(self, name: str, number: str | None = None) -> Version:
        """Returns a version of a model, by default the newest.

        Raises:
            Refusal: There is no such model or version, or it is not loaded yet.
        """
        numbers = self.numbers(name)
        if not numbers:
            raise Refusal(
                503, f"Model {name!r} is not loaded yet; try again.", retry=True
            )
        if number is None:
            number = numbers[-1]
        if number not in self._versions[name]:
            raise unknown(f"version of {name!r}", number, numbers)
        return self._versions[name][number]

    def each(self) -> list[Version]:
        """Returns all versions that answer."""
        return [one for all_ in self._versions.values() for one in all_.values()]

    def load_all(self) -> None:
        """Loads what there is; before the event loop, or in a thread beside it.

        Raises:
            RuntimeError: A model cannot be loaded; its own error is the cause.
        """
        for source in self._sources:
            for number, folder in folders.versions(source.path).items():
                try:
                    version = self._loaded(source.name, number, folder)
                except Exception as error:
                    said = _failure(source.name, number, folder, error)
                    raise RuntimeError(said) from error
                self._versions[source.name][number] = version
                self._seen[source.name, number] = version.stamp

    def look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Looks once for changes on disk and takes them up; called in a thread.

        A folder is read when it is the same in two looks, so that one that is being
        copied is left alone. What cannot be loaded leaves what was there in place.
        """
        for source in self._sources:
            found = folders.versions(source.path)
            known = dict(self._versions[source.name])
            for number, folder in found.items():
                key = source.name, number
                now = folders.stamp(folder)
                is_steady, self._seen[key] = self._seen.get(key) == now, now
                if number in known and known[number].stamp == now:
                    continue
                if not is_steady or self._failed.get(key) == now:
                    continue
                try:
                    version = self._loaded(*key, folder)
                except Exception as error:
                    self._failed[key] = now
                    self._metrics.loads.add((*key, "failed"))
                    log.error("%s", _failure(*key, folder, error))
                    continue
                loop.call_soon_threadsafe(self._put, version)
            # Where nothing is left, what is there goes on: a folder may be replaced.
            if found:
                for number in known.keys() - found.keys():
                    loop.call_soon_threadsafe(self._drop, source.name, number)

    def stop(self) -> None:
        """Lets all versions end when they have answered."""
        for version in self.each():
            version.batcher.stop()

    def _loaded(self, name: str, number: str, folder: Path) -> Version:
        stamp = folders.stamp(folder)
        model = self._load(folder)
        first = warm_up(model)
        size = self._limits.max_batch_size
        if size is None:
            size = DEFAULT_BATCH_SIZE if first.joins else 1
            if first.why:
                log.warning(
                    "Model %r answers requests one by one, as %s.", name, first.why
                )
        labels = name, number

        def on_run(num_examples: int, waited: list[float], seconds: float) -> None:
            metrics = self._metrics
            metrics.examples.observe(labels, num_examples)
            metrics.run.observe(labels, seconds)
            for each in waited:
                metrics.waited.observe(labels, each)

        batcher = Batcher(
            model,
            max_batch_size=size,
            max_queue=self._limits.max_queue,
            timeout_seconds=self._limits.timeout_seconds,
            on_run=on_run,
        )
        self._metrics.loads.add((*labels, "loaded"))
        return Version(name, number, model, batcher, first.inputs, stamp)

    def _put(self, version: Version) -> None:
        versions = self._versions[version.name]
        before = versions.get(version.number)
        versions[version.number] = version
        if before is not None:
            before.batcher.stop()
        log.warning("Loaded version %s of model %r.", version.number, version.name)

    def _drop(self, name: str, number: str) -> None:
        version = self._versions[name].pop(number, None)
        if version is not None:
            version.batcher.stop()
            log.warning("Version %s of model %r is gone.", number, name)


def _failure(name: str, number: str, folder: Path, error: Exception) -> str:
    return (
        f"Version {number} of model {name!r} in {str(folder)!r} cannot be loaded: "
        f"{short_error(error)}"
    )
