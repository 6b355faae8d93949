"""Keeps a pipeline's elements after their first pass, in memory or in files.

Files are filled when the pipeline is built, in one pass with a progress bar, so
that a full disk or a damaged element shows before training, the length is known
from then on, and a pass that is broken off leaves nothing behind.
"""

import dataclasses
import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import tensorflow as tf
from absl import logging

from tfamp.data._elements import (
    bytes_held,
    bytes_of_element,
    bytes_of_first,
    is_endless,
    known_length,
    of_unknown_length,
    with_length,
)
from tfamp.data.fingerprints import Fingerprint, fingerprint
from tfamp.data.sources._files import check_no_address
from tfamp.data.sources.datasets import DatasetSource
from tfamp.data.stages import ORDER, Role, Settings, Stage
from tfamp.data.stages.cache_files import (
    CacheFiles,
    fill_or_read,
    kept_from_others,
    others,
)
from tfamp.records import checks, units
from tfamp.records.console import progress

# Elements that are read to estimate how large all will be, where shapes vary.
_SAMPLED = 64
# What tf.data adds to an element: a key and an entry in the index for each part.
_OVERHEAD_BYTES = 64
_COUNTED_AT_ONCE = 256
_COUNTED_BYTES = 2**16
# Parts of a fingerprint that say which data it is.
_DATA_PARTS = ("source", *(name for name in ORDER if Role.CUTS in ORDER[name]))
_SPACE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SPACE_WORDS = tuple(os.strerror(code) for code in _SPACE_ERRORS)


@dataclasses.dataclass(frozen=True)
class Cache(Stage):
    """Keeps the elements in memory; a plan puts `FileCache` where there is a path."""

    name: ClassVar[str] = "cache"
    where: Any
    unseen: str = "warn"
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

    def in_files(self, source: Any, steps: Sequence[Stage]) -> "FileCache":
        """Returns the cache in files of what steps make of a source."""
        path: Any = self.path
        # Looked at in the source, since a filter hides that there is no end.
        repeats = isinstance(source, DatasetSource) and is_endless(source.given)
        is_cut = any(step.name == "subset" for step in steps)
        found = _fingerprint(source, steps)
        return FileCache(path, found, self.unseen, repeats and not is_cut)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset behind a cache in memory."""
        return dataset.cache()

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        reason = "after map: done once; before shuffle: order varies"
        num_bytes = _expected_bytes(dataset, bytes_held(dataset.element_spec))
        size = "size unknown" if num_bytes is None else units.format_bytes(num_bytes)
        return f"memory, {size}", reason


@dataclasses.dataclass(frozen=True)
class FileCache(Stage):
    """Keeps the elements in files, which later runs of the same pipeline use too.

    The names of the files begin with `path` and end with the fingerprint of all that
    comes before, which `is_endless` where that is known although the dataset itself
    may not know. Where `_DATA_PARTS` of fingerprints differ, a cache is no older
    version of another but holds other elements: a worker's, or the validation's.
    """

    name: ClassVar[str] = Cache.name
    path: Path
    found: Fingerprint
    unseen: str = "warn"
    is_endless: bool = False

    @property
    def _files(self) -> CacheFiles:
        return CacheFiles(self.path, self.found.digest)

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises where the files would never be full, or not notice a change."""
        if self.is_endless or is_endless(dataset):
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
                "pass `unseen='warn'` and delete the cache's files after a change."
            )

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a dataset of the same spec, of the length that is on record."""
        record = self._files.read()
        if not record:
            return dataset
        return with_length(of_unknown_length(dataset), record["num_elements"])

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Fills the files, unless they are here, and reads them."""
        found, files = self.found, self._files
        if found.unseen:
            logging.warning(
                "Cache %s does not notice changes in: %s. Delete its files after one.",
                files.stem,
                "; ".join(found.unseen),
            )
        is_new = fill_or_read(files, lambda: self._fill(files, dataset))
        record = files.read()
        if not is_new:
            # Not locked: two that start together may count as one.
            files.write({**record, "hits": record["hits"] + 1})
        self._remove_older(files, record)
        cached = dataset.cache(str(files.path.with_name(record["data"])))
        return with_length(cached, record["num_elements"])

    def _fill(self, files: CacheFiles, dataset: tf.data.Dataset) -> None:
        """Writes the files in one pass, or leaves none."""
        left = files.remove_unnamed()
        if left:
            text = (
                "Cache %s was left unfinished by a process that has ended; its %d "
                "files are removed and it is built again."
            )
            logging.warning(text, files.stem, len(left))
        needed = _expected_bytes(dataset, bytes_of_element(dataset.element_spec))
        length = known_length(dataset)
        if needed is None and length is not None:
            each = bytes_of_first(dataset, _SAMPLED, beside=_OVERHEAD_BYTES)
            needed = None if each is None else each * length
        _check_space(files, needed)
        data = files.new_data()
        so_far = _Progress()
        try:
            _write(files, data, dataset, so_far)
            if so_far.num_elements == 0:
                raise ValueError(
                    f"Cache {str(files.stem)!r} would hold no elements; expected at "
                    "least one. All were filtered out: loosen `.filter`."
                )
            contents = {
                "parts": self.found.parts,
                "num_elements": so_far.num_elements,
                "num_bytes": files.num_bytes,
                "hits": 0,
            }
            files.publish(data, contents)
        except BaseException as error:
            for path in files.parts(data.name):
                path.unlink(missing_ok=True)
            if not files.is_complete:
                files.record.unlink(missing_ok=True)
            if _is_about_space(error):
                raise _full_disk(files, so_far.num_bytes, needed) from error
            raise

    def _remove_older(self, files: CacheFiles, record: dict[str, Any]) -> None:
        """Removes caches of the same source whose later steps have changed since."""
        own = dict(map(tuple, record["parts"]))
        for other in others(files):
            with kept_from_others(other) as is_unused:
                if not is_unused:
                    continue
                parts = dict(map(tuple, other.read().get("parts", ())))
                names = {**own, **parts}
                changed = [one for one in names if own.get(one) != parts.get(one)]
                if parts and not set(_DATA_PARTS).isdisjoint(changed):
                    continue  # another part of the data, under the same path
                size = units.format_bytes(other.num_bytes)
                other.remove()
            text = "Removed the cache %s (%s): changed since then: %s."
            changes = ", ".join(changed) or "nothing known"
            logging.warning(text, other.stem, size, changes)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        found, files = self.found, self._files
        record = files.read()
        reason = "filled once by `build`, then read"
        if record:
            size = units.format_bytes(record["num_bytes"])
            times = "once" if record["hits"] == 1 else f"{record['hits']} times"
            reason = f"{record['num_elements']:,} elements, {size}; used again {times}"
        if found.unseen:
            reason += f"; does not notice changes in: {'; '.join(found.unseen)}"
        return f"files {files.stem}", reason


def _fingerprint(source: Any, steps: Sequence[Stage]) -> Fingerprint:
    """Returns the fingerprint of a source and the steps before a cache."""
    parts: dict[str, Any] = {"source": (type(source).__name__, source.identity())}
    for step in steps:
        if step.name == "on_error":
            continue  # the careful step tells what is skipped
        same = sum(name.split(" ")[0] == step.name for name in parts)
        parts[f"{step.name} {same + 1}" if same else step.name] = step
    return fingerprint(parts)


def _absolute(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a cache whose folder exists and can be written."""
    check_no_address(f"Cache path is {os.fspath(path)!r}", os.fspath(path))
    absolute = Path(path).expanduser().absolute()
    if absolute.is_dir():
        raise ValueError(
            f"Cache path {str(path)!r} is a folder; expected the path that the names "
            f"of the cache files begin with. Pass {str(Path(path) / 'train')!r}."
        )
    if not absolute.parent.is_dir():
        raise ValueError(
            f"Cache path {str(path)!r} lies in a folder that does not exist; expected "
            f"an existing one. Create it with `mkdir -p {absolute.parent}`."
        )
    if not os.access(absolute.parent, os.W_OK):
        raise ValueError(
            f"Cache path {str(path)!r} lies in a folder that cannot be written; "
            "expected a writable one. Choose another, or cache in 'memory'."
        )
    return absolute


@dataclasses.dataclass
class _Progress:
    """Elements that tf.data has taken, and their bytes as far as these are known.

    tf.data keeps up to 8 MiB before it writes, and removes its files when a disk is
    full.
    """

    num_elements: int = 0
    num_bytes: int = 0


def _write(
    files: CacheFiles, data: Path, dataset: tf.data.Dataset, so_far: _Progress
) -> None:
    """Lets tf.data write its files, and counts."""
    cached = dataset.cache(str(data))
    element_bytes = bytes_of_element(dataset.element_spec)
    at_once = _COUNTED_AT_ONCE
    if element_bytes:
        at_once = max(1, min(at_once, _COUNTED_BYTES // element_bytes))
    # Only numbers come to Python, and not one by one.
    numbers = cached.enumerate().map(lambda number, _: number).batch(at_once)
    with progress(f"Caching {files.path.name}", known_length(dataset)) as update:
        for batch in numbers:
            so_far.num_elements += int(batch.shape[0])
            if element_bytes:
                so_far.num_bytes = so_far.num_elements * element_bytes
            else:
                so_far.num_bytes = files.num_bytes
            update(so_far.num_elements)


def _check_space(files: CacheFiles, needed: int | None) -> None:
    """Raises if the cache will not fit, as far as its size can be foreseen."""
    free = shutil.disk_usage(files.path.parent).free
    if needed is not None and needed > free:
        raise OSError(
            errno.ENOSPC,
            f"The cache needs about {units.format_bytes(needed)}, and the disk of "
            f"{str(files.path.parent)!r} has {units.format_bytes(free)} free; "
            "expected more. Free space, choose a path on another disk, or cache "
            "fewer elements (`.subset`)",
        )


def _full_disk(files: CacheFiles, num_bytes: int, needed: int | None) -> OSError:
    """Returns the error of a disk that was full before a cache was whole."""
    folder = files.path.parent
    whole = "" if needed is None else f" of about {units.format_bytes(needed)}"
    free = units.format_bytes(shutil.disk_usage(folder).free)
    return OSError(
        errno.ENOSPC,
        f"The disk of {str(folder)!r} was full when {units.format_bytes(num_bytes)}"
        f"{whole} of the cache were made; expected room for all of it. What was "
        f"written is removed, and {free} are free. Free space, choose a path on "
        "another disk, or cache in 'memory'",
    )


def _expected_bytes(dataset: tf.data.Dataset, element_bytes: int | None) -> int | None:
    """Returns what all elements take, None where shapes or the length vary."""
    length = known_length(dataset)
    return None if element_bytes is None or length is None else element_bytes * length


def _is_about_space(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _SPACE_ERRORS
    return isinstance(error, tf.errors.OpError) and any(
        word in str(error) for word in _SPACE_WORDS
    )
