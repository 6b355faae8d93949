"""Keeps a pipeline's elements after their first pass, in memory or in a folder.

The name of a folder ends with the fingerprint of all that comes before the cache, so a
changed pipeline has another one. `build` fills it in one pass with a progress bar, so
that a full disk or a damaged element shows before training. It is written beside its
place, in the format of tf.data's file cache, and renamed when it is whole: nothing that
is half written is ever read, whatever becomes of the process. A lock lets one process
do the work; where there are no locks several may, and the first one's folder stays.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import tensorflow as tf
from absl import logging

from tfamp.data._elements import (
    bytes_held,
    bytes_of_element,
    is_endless,
    known_length,
    of_unknown_length,
    with_length,
)
from tfamp.data.fingerprints import Fingerprint, fingerprint
from tfamp.data.sources._files import check_no_address
from tfamp.data.stages import Settings, Stage
from tfamp.records import checks, units
from tfamp.records.console import progress

# In the folder: tf.data's files, whose names begin so, and how long each of them is.
_DATA, _RECORD = "elements", "tfamp.json"
# Ends the name of a folder that is not whole.
_UNFINISHED = ".unfinished"
_COUNTED_AT_ONCE = 64
_SPACE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SPACE_WORDS = tuple(os.strerror(code) for code in _SPACE_ERRORS)
# What systems say that have no locks, as some network and bucket file systems.
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}


@dataclasses.dataclass(frozen=True)
class Cache(Stage):
    """Keeps the elements in memory; a plan puts `FileCache` where there is a path."""

    name: ClassVar[str] = "cache"
    where: Any
    unseen: str = "warn"
    version: Any = None
    path: Path | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        checks.choice("unseen", self.unseen, ["warn", "error"])
        if not isinstance(self.where, (str, os.PathLike)) or self.where == "":
            raise TypeError(
                f"`where` is {self.where!r}; expected 'memory' or a path. Pass "
                "'memory' if the decoded data fits there."
            )
        if self.where != "memory":
            object.__setattr__(self, "path", _absolute(self.where))
        elif self.version is not None:
            raise ValueError(
                f"`version` is {self.version!r} with a cache in 'memory', which ends "
                "with the process; expected None. Leave it out, or pass a path."
            )

    def in_files(
        self, source: Any, steps: Sequence[Stage], settings: Settings
    ) -> "FileCache":
        """Returns the cache in files of what steps make of a source."""
        path: Any = self.path
        # Looked at in the source, since a filter hides that there is no end.
        given = getattr(source, "given", None)
        is_cut = any(step.name == "subset" for step in steps)
        repeats = given is not None and is_endless(given) and not is_cut
        # The careful step tells what is skipped.
        before = [step for step in steps if step.name != "on_error"]
        identity = (type(source).__name__, source.identity())
        spec = source.dataset(settings).element_spec
        found = fingerprint(identity, before, spec, self.version)
        return FileCache(path, found, self.unseen, repeats)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset behind a cache in memory."""
        return dataset.cache()

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        each, length = bytes_held(dataset.element_spec), known_length(dataset)
        size = "size unknown"
        if each is not None and length is not None:
            size = units.format_bytes(each * length)
        return f"memory, {size}", "after map: done once; before shuffle: order varies"


@dataclasses.dataclass(frozen=True)
class FileCache(Stage):
    """Keeps the elements in a folder, which later runs of the same pipeline use too.

    Its name begins with `path` and ends with the fingerprint of all that comes before,
    which `repeats` without end where that is known although the dataset may not know.
    """

    name: ClassVar[str] = Cache.name
    path: Path
    found: Fingerprint
    unseen: str = "warn"
    repeats: bool = False

    @property
    def folder(self) -> Path:
        """Where the elements lie."""
        return self.path.with_name(f"{self.path.name}-{self.found.digest}")

    def read(self) -> dict[str, Any]:
        """Returns the record of a cache that is whole, nothing of any other."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = dict(json.loads((self.folder / _RECORD).read_text()))
            if _sizes(self.folder) == record["files"]:
                return record
        return {}

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises where the cache would never be full, or not notice a change."""
        if self.repeats or is_endless(dataset):
            raise ValueError(
                f"Cache {str(self.path)!r} would never be full: the elements before it "
                "repeat without end. Expected a pass that ends: leave `repeat()` out, "
                "since `fit` repeats the dataset each epoch, or give it a number."
            )
        unseen = self.found.unseen
        if self.unseen == "error" and unseen:
            raise ValueError(
                f"Cache {str(self.path)!r} would not notice changes in: "
                f"{'; '.join(unseen)}; with `unseen='error'` expected nothing of the "
                "kind. Hand the value itself to the function (as a default, a closure "
                "or a global), do this part in a `.map` written after the cache, or "
                "pass `unseen='warn'` and another `version` after a change."
            )

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a dataset of the same spec, of the length that is on record."""
        record = self.read()
        if not record:
            return dataset
        return with_length(of_unknown_length(dataset), record["num_elements"])

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Fills the folder, unless it is here, and reads it."""
        if self.found.unseen:
            logging.warning(
                "Cache %s does not notice changes in: %s. Pass `.cache` another "
                "`version` after one.",
                self.folder,
                "; ".join(self.found.unseen),
            )
        if not self.read():
            with _alone(self.path.with_name(f"{self.folder.name}.lock")) as is_alone:
                if not self.read():
                    self._fill(dataset, is_alone)
        record = self.read()
        if not record:
            raise FileNotFoundError(
                f"Cache {str(self.folder)!r} was removed as soon as it was filled; "
                "expected nobody to remove it. Build again."
            )
        cached = dataset.cache(str(self.folder / _DATA))
        return with_length(cached, record["num_elements"])

    def _fill(self, dataset: tf.data.Dataset, is_alone: bool) -> None:
        """Writes the folder in one pass, or leaves none."""
        if is_alone:
            self._remove_left()
        _check_space(self.path.parent, dataset)
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
            if not _is_about_space(error):
                raise
            folder = self.path.parent
            free = units.format_bytes(shutil.disk_usage(folder).free)
            raise OSError(
                errno.ENOSPC,
                f"The disk of {str(folder)!r} was full before the cache was whole; "
                f"expected room for all of it. What was written is removed, and {free} "
                "are free. Free space, choose a path on another disk, or cache in "
                "'memory'",
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _beside(self) -> Path:
        name = f"{self.folder.name}.{secrets.token_hex(4)}{_UNFINISHED}"
        return self.path.with_name(name)

    def _put_in_place(self, part: Path) -> None:
        """Gives a whole folder its name, which another one may have."""
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

    def _remove_left(self) -> None:
        """Removes what processes left that were killed, under the lock."""
        name = re.escape(self.folder.name)
        pattern = re.compile(rf"{name}\.[0-9a-f]+{re.escape(_UNFINISHED)}")
        for path in list(self.path.parent.iterdir()):
            if pattern.fullmatch(path.name):
                text = "Removed %s, which a process that has ended left unfinished."
                logging.warning(text, path)
                shutil.rmtree(path, ignore_errors=True)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        record = self.read()
        reason = "filled once by `build`, then read"
        if record:
            size = units.format_bytes(sum(record["files"].values()))
            reason = f"{record['num_elements']:,} elements, {size}, filled already"
        if self.found.unseen:
            reason += f"; does not notice changes in: {'; '.join(self.found.unseen)}"
        return f"files {self.folder}", reason


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Waits for other processes in this block; yields whether there is a lock."""
    try:
        import filelock
    except ImportError:
        yield False
        return
    lock = filelock.FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            logging.info("Waiting for the process that fills %s.", path.stem)
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _sizes(folder: Path) -> dict[str, int]:
    """Returns the length of each file of tf.data's in a folder."""
    files = [one for one in folder.iterdir() if one.name.startswith(_DATA)]
    return {one.name: one.stat().st_size for one in files}


def _absolute(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a cache whose folder exists and can be written."""
    text = os.fspath(path)
    check_no_address(f"Cache path is {text!r}", text)
    absolute = Path(path).expanduser().absolute()
    if absolute.is_dir():
        raise ValueError(
            f"Cache path {text!r} is a folder; expected the path that the name "
            f"of the cache begins with. Pass {str(Path(path) / 'train')!r}."
        )
    if not absolute.parent.is_dir():
        raise ValueError(
            f"Cache path {text!r} lies in a folder that does not exist; expected "
            f"an existing one. Create it with `mkdir -p {absolute.parent}`."
        )
    if not os.access(absolute.parent, os.W_OK):
        raise ValueError(
            f"Cache path {text!r} lies in a folder that cannot be written; "
            "expected a writable one. Choose another, or cache in 'memory'."
        )
    return absolute


def _write(folder: Path, name: str, dataset: tf.data.Dataset) -> int:
    """Lets tf.data write its files, and returns the number of elements."""
    cached, count = dataset.cache(str(folder / _DATA)), 0
    # Only numbers come to Python, and not one by one.
    numbers = cached.enumerate().map(lambda number, _: number).batch(_COUNTED_AT_ONCE)
    with progress(f"Caching {name}", known_length(dataset)) as update:
        for batch in numbers:
            count += int(batch.shape[0])
            update(count)
    return count


def _check_space(folder: Path, dataset: tf.data.Dataset) -> None:
    """Raises if the cache will not fit, as far as its size can be foreseen."""
    each, length = bytes_of_element(dataset.element_spec), known_length(dataset)
    free = shutil.disk_usage(folder).free
    if each is not None and length is not None and each * length > free:
        raise OSError(
            errno.ENOSPC,
            f"The cache needs about {units.format_bytes(each * length)}, and the disk "
            f"of {str(folder)!r} has {units.format_bytes(free)} free; expected more. "
            "Free space, choose a path on another disk, or cache fewer elements "
            "(`.subset`)",
        )


def _is_about_space(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _SPACE_ERRORS
    return any(word in str(error) for word in _SPACE_WORDS)
