"""The models that are served, where they lie, their versions, and changes on disk.

A request is answered by one version from its check to its answer. A version that is
replaced answers what it was asked and ends.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfamp.records.checks import short_error
from tfamp.serving.runtimes.manifest import NAME
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.serving.server.batching import DEFAULT_BATCH_SIZE, Batcher, warm_up
from tfamp.serving.server.metrics import Metrics
from tfamp.serving.server.tensors import Refusal, unknown

Key = tuple[str, str]
log = logging.getLogger("tfamp.serve")
# The number of a folder that has no versions.
_ONLY = "1"
# A name goes into addresses and metrics.
_ALLOWED = re.compile(r"[A-Za-z0-9._-]+")
# Of each file of a folder: its name, when it changed, its size and its number on disk.
Stamp = tuple[tuple[str, int, int, int], ...]


class Version(NamedTuple):
    """A version of a model that answers, and the queue in front of it."""

    name: str
    number: str
    model: LoadedModel
    batcher: Batcher
    # Inputs that it has answered; None where none were found.
    example: dict[str, np.ndarray] | None
    # Of its files, when they were read.
    stamp: Stamp


class Limits(NamedTuple):
    """What requests are held to.

    Args:
        max_batch_size: Examples in a run; None finds out whether an answer depends on
            the others of its batch, and takes 64 or 1.
        max_queue: Requests of a model that may wait.
        timeout_seconds: How long an answer, and a body on its way, may take.
        max_body: Bytes of the largest request.
    """

    max_batch_size: int | None = None
    max_queue: int = 256
    timeout_seconds: float = 10.0
    max_body: int = 64 * 2**20


class Models:
    """The served models by name and version; changed in the event loop alone.

    Args:
        places: Where each lies, by its name in addresses.
        load: Reads one exported folder.
        limits: What requests are held to.

    Attributes:
        metrics: What counts.
    """

    def __init__(
        self,
        places: Mapping[str, Path],
        load: Callable[[Path], LoadedModel],
        limits: Limits,
    ) -> None:
        self._places = places
        self._load = load
        self.limits = limits
        self.metrics = Metrics()
        self._versions: dict[str, dict[str, Version]] = {name: {} for name in places}
        # Stamps that were seen last, and those that failed to load.
        self._seen: dict[Key, Stamp] = {}
        self._failed: dict[Key, Stamp] = {}

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
        return [one for each in self._versions.values() for one in each.values()]

    def count_waiting(self) -> None:
        """Notes for the metrics how many requests wait for each version."""
        self.metrics.waiting.values = {
            (each.name, each.number): each.batcher.num_waiting for each in self.each()
        }

    def load_all(self) -> None:
        """Loads what there is; before the event loop, or in a thread beside it.

        Raises:
            RuntimeError: A model cannot be loaded; its own error is the cause.
        """
        for name, place in self._places.items():
            for number, folder in versions_in(place).items():
                try:
                    version = self._loaded(name, number, folder)
                except Exception as error:
                    said = _failure(name, number, folder, error)
                    raise RuntimeError(said) from error
                self._versions[name][number] = version
                self._seen[name, number] = version.stamp

    def look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Looks once for changes on disk and takes them up; called in a thread.

        A folder is read when it is the same in two looks, so that one that is being
        copied is left alone. What cannot be loaded leaves what was there in place.
        """
        for name, place in self._places.items():
            found = versions_in(place)
            known = dict(self._versions[name])
            for number, folder in found.items():
                key = name, number
                now = stamp_of(folder)
                is_steady, self._seen[key] = self._seen.get(key) == now, now
                if number in known and known[number].stamp == now:
                    continue
                if not is_steady or self._failed.get(key) == now:
                    continue
                try:
                    version = self._loaded(*key, folder)
                except Exception as error:
                    self._failed[key] = now
                    self.metrics.loads.add((*key, "failed"))
                    log.error("%s", _failure(*key, folder, error))
                    continue
                loop.call_soon_threadsafe(self._put, version)
            # Where nothing is left, what is there goes on: a folder may be replaced.
            if found:
                for number in known.keys() - found.keys():
                    loop.call_soon_threadsafe(self._drop, name, number)

    def stop(self) -> None:
        """Lets all versions end when they have answered."""
        for version in self.each():
            version.batcher.stop()

    def _loaded(self, name: str, number: str, folder: Path) -> Version:
        stamp = stamp_of(folder)
        model = self._load(folder)
        first = warm_up(model)
        limits, metrics = self.limits, self.metrics
        size = limits.max_batch_size
        if size is None:
            size = DEFAULT_BATCH_SIZE if first.joins else 1
            if first.why:
                log.warning(
                    "Model %r answers requests one by one, as %s.", name, first.why
                )
        labels = name, number

        def on_run(num_examples: int, waited: list[float], seconds: float) -> None:
            metrics.examples.observe(labels, num_examples)
            metrics.run.observe(labels, seconds)
            for each in waited:
                metrics.waited.observe(labels, each)

        batcher = Batcher(
            model,
            max_batch_size=size,
            max_queue=limits.max_queue,
            timeout_seconds=limits.timeout_seconds,
            on_run=on_run,
        )
        metrics.loads.add((*labels, "loaded"))
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


def named_places(texts: Iterable[str]) -> dict[str, Path]:
    """Returns where the models lie that `PATH` and `NAME=PATH` name, by their names.

    Raises:
        FileNotFoundError: A path does not exist, or holds no exported model.
        ValueError: A name cannot stand in an address, or came twice.

    Example:
        >>> named_places(["digits=nowhere"])
        Traceback (most recent call last):
        ...
        FileNotFoundError: There is no folder 'nowhere' for model 'digits'; expected \
one that `tfamp.export` wrote, or one of numbered versions. Correct the path.
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        path = Path(rest if equals else text)
        name = name if equals else path.resolve().name
        if not _ALLOWED.fullmatch(name):
            raise ValueError(
                f"The model of {text!r} is called {name!r}; expected letters, digits, "
                f"'.', '_' and '-'. Name it, as in 'digits={path}'."
            )
        if name in found:
            raise ValueError(
                f"Two models are called {name!r}; expected one. Name them, as in "
                f"'first={path}'."
            )
        if path.is_file():
            raise FileNotFoundError(
                f"{str(path)!r} is a file; expected a folder that `tfamp.export` "
                f"wrote. Write one with `tfamp export {path}`, or name the folder that "
                "the file is in."
            )
        if not path.is_dir():
            raise FileNotFoundError(
                f"There is no folder {str(path)!r} for model {name!r}; expected one "
                "that `tfamp.export` wrote, or one of numbered versions. Correct the "
                "path."
            )
        if not versions_in(path):
            raise FileNotFoundError(
                f"Folder {str(path)!r} holds neither {NAME} nor numbered folders with "
                "it; expected an exported model, or its versions. Write one with "
                "`tfamp.export`."
            )
        found[name] = path
    return found


def versions_in(path: Path) -> dict[str, Path]:
    """Returns the exported folders of a model by their numbers."""
    if (path / NAME).is_file():
        return {_ONLY: path}
    try:
        entries = sorted(path.iterdir())
    except OSError:
        return {}
    return {
        str(int(entry.name)): entry
        for entry in entries
        if entry.name.isascii() and entry.name.isdigit() and (entry / NAME).is_file()
    }


def stamp_of(folder: Path) -> Stamp:
    """Returns what changes when a file of the folder does; () where it is gone."""
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            try:
                known = os.stat(path)
            except OSError:
                continue
            found.append((path, known.st_mtime_ns, known.st_size, known.st_ino))
    return tuple(sorted(found))
