"""Keeps a pipeline's elements after their first pass, in memory or in a folder.

The name of a folder ends with the fingerprint of all that comes before the cache, so a
changed pipeline has another one. It is written beside its place, in the format of
tf.data's file cache, and renamed when it is whole: nothing that is half written is ever
read. A lock lets one process do the work; where there are none the first folder stays.
"""

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import tensorflow as tf
from absl import logging

from tfamp.data._elements import bytes_held, is_endless, known_length, with_length
from tfamp.data.fingerprints import Fingerprint, fingerprint
from tfamp.data.stages import Settings, Stage
from tfamp.records import checks, units
from tfamp.records.console import progress

# In the folder: tf.data's files, whose names begin so, and how long each of them is.
_DATA, _RECORD = "elements", "tfamp.json"
_UNFINISHED = ".unfinished"
_COUNTED_AT_ONCE = 64
_FULL = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]
# What systems say that have no locks, as some network and bucket file systems.
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}


@dataclasses.dataclass(frozen=True)
class Cache(Stage):
    """Keeps the elements in memory, or in a folder that later runs use too."""

    name: ClassVar[str] = "cache"
    where: Any
    unseen: str = "warn"
    version: Any = None
    of: Fingerprint = Fingerprint("")
    repeats: bool = False
    path: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        checks.choice("unseen", self.unseen, ["warn", "error"])
        if not isinstance(self.where, (str, os.PathLike)) or self.where == "":
            raise TypeError(f"`where` is {self.where!r}; expected 'memory' or a path.")
        if self.where != "memory":
            path = Path(self.where).expanduser().absolute()
            if path.is_dir() or not os.access(path.parent, os.W_OK):
                raise ValueError(
                    f"Cache path {os.fspath(self.where)!r} is a folder, or lies in no "
                    "writable one; expected the path that the name of the cache begins "
                    f"with. Pass such as {os.fspath(path / 'train')!r}."
                )
            object.__setattr__(self, "path", path)

    def in_files(
        self, source: Any, steps: Sequence[Stage], settings: Settings
    ) -> "Cache":
        """Returns the cache in files, which knows what steps make of a source."""
        dataset = source.dataset(settings)
        # Looked at in the source, since a filter hides that there is no end.
        is_cut = any(step.name in ("subset", "take") for step in steps)
        before = [step for step in steps if step.name != "on_error"]
        identity = (type(source).__name__, source.identity())
        found = fingerprint(identity, before, dataset.element_spec, self.version)
        repeats = is_endless(dataset) and not is_cut
        return dataclasses.replace(self, of=found, repeats=repeats)

    @property
    def folder(self) -> Path:
        """Where the elements lie."""
        return self.path.with_name(f"{self.path.name}-{self.of.digest}")

    def read(self) -> dict[str, Any]:
        """Returns the record of a cache that is whole, nothing of any other."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = dict(json.loads((self.folder / _RECORD).read_text()))
            if _sizes(self.folder) == record["files"]:
                return record
        return {}

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset behind a cache, which is filled here if it has files."""
        if self.path is None:
            each, length = bytes_held(dataset.element_spec), known_length(dataset)
            if each is not None and length is not None:
                self.found["size"] = units.format_bytes(each * length)
            return dataset.cache()
        if self.repeats or is_endless(dataset):
            raise ValueError(
                f"Cache {str(self.path)!r} would never be full: the elements before it "
                "repeat without end. Expected a pass that ends: leave `repeat()` out."
            )
        unseen = "; ".join(self.of.unseen)
        if self.unseen == "error" and unseen:
            raise ValueError(
                f"Cache {str(self.path)!r} would not notice changes in: {unseen}; with "
                "`unseen='error'` expected nothing of the kind. Hand over the value "
                "itself, do this in a `.map` written after the cache, or pass "
                "`unseen='warn'` and another `version` after a change."
            )
        if unseen:
            logging.warning(
                "Cache %s does not notice changes in: %s. Pass `.cache` another "
                "`version` after one.",
                *(self.folder, unseen),
            )
        while not (record := self.read()):  # again if it is removed at once
            with _alone(self.path.with_name(f"{self.folder.name}.lock")) as is_alone:
                if not self.read():
                    self._fill(dataset, is_alone)
        cached = dataset.cache(str(self.folder / _DATA))
        return with_length(cached, record["num_elements"])

    def _fill(self, dataset: tf.data.Dataset, is_alone: bool) -> None:
        if is_alone:  # so what is unfinished is of processes that were killed
            for left in list(self.path.parent.glob(f"*-{self.of.digest}.*")):
                name = left.name
                if name.startswith(self.folder.name) and left.suffix == _UNFINISHED:
                    text = "Removed %s, which a process that has ended left unfinished."
                    logging.warning(text, left)
                    shutil.rmtree(left, ignore_errors=True)
        part = self._beside()
        part.mkdir()
        try:
            num_elements = _write(part, self.path.name, dataset)
            if num_elements == 0:
                raise ValueError(
                    f"Cache {str(self.path)!r} would hold no elements; expected at "
                    "least one. All were filtered out: loosen `.filter`."
                )
            record = {"num_elements": num_elements, "files": _sizes(part)}
            (part / _RECORD).write_text(json.dumps(record))
            self._put_in_place(part)
        except (OSError, tf.errors.OpError) as error:
            shutil.rmtree(part, ignore_errors=True)
            if not any(words in str(error) for words in _FULL):
                raise
            folder = self.path.parent
            free = units.format_bytes(shutil.disk_usage(folder).free)
            raise OSError(
                errno.ENOSPC,
                f"The disk of {str(folder)!r} was full before the cache was whole; "
                f"expected room for all of it. {free} are free: make room, choose a "
                "path on another disk, or cache in 'memory'",
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _beside(self) -> Path:
        name = f"{self.folder.name}.{secrets.token_hex(4)}{_UNFINISHED}"
        return self.path.with_name(name)

    def _put_in_place(self, part: Path) -> None:
        try:
            part.rename(self.folder)
        except OSError:
            if not self.folder.is_dir():
                raise
            if self.read():  # of another process, where there are no locks
                return
            damaged = self._beside()
            self.folder.rename(damaged)
            part.rename(self.folder)
            shutil.rmtree(damaged, ignore_errors=True)

    @property
    def setting(self) -> str:
        """Where they are kept."""
        return "memory" if self.path is None else f"files {self.folder}"

    @property
    def facts(self) -> str:
        """How large it is, and what it does not notice."""
        if self.path is None:
            return super().facts
        told, record = "filled once by `build`, then read", self.read()
        if record:
            size = units.format_bytes(sum(record["files"].values()))
            told = f"{record['num_elements']:,} elements, {size}, filled already"
        if self.of.unseen:
            told += f"; does not notice changes in: {'; '.join(self.of.unseen)}"
        return told


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Waits for other processes in this block; yields whether there is a lock."""
    try:
        import filelock

        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            logging.info("Waiting for the process that fills %s.", path.stem)
            lock.acquire()
    except (ImportError, NotImplementedError):
        yield False
        return
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _sizes(folder: Path) -> dict[str, int]:
    files = [one for one in folder.iterdir() if one.name.startswith(_DATA)]
    return {one.name: one.stat().st_size for one in files}


def _write(folder: Path, name: str, dataset: tf.data.Dataset) -> int:
    """Lets tf.data write its files, and returns the number of elements."""
    cached, count = dataset.cache(str(folder / _DATA)), 0
    numbers = cached.enumerate().map(lambda number, _: number).batch(_COUNTED_AT_ONCE)
    with progress(f"Caching {name}", known_length(dataset)) as update:
        for batch in numbers:
            count += int(batch.shape[0])
            update(count)
    return count
