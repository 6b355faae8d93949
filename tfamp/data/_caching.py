"""Keeps a pipeline's elements after their first pass, in memory or in files.

Files are filled when the pipeline is built, in one pass with a progress bar, so
that a full disk or a damaged element shows before training, the length is known
from then on, and a pass that is broken off leaves nothing behind.
"""

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from absl import logging

from tfamp import _units
from tfamp.data._elements import bytes_of_element, known_length
from tfamp.data._file_cache import CacheFiles, is_in_use, others
from tfamp.data._fingerprint import Fingerprint
from tfamp.data._progress import progress
from tfamp.data._stages import Settings, Stage

# Elements that are read to estimate how large all will be, where shapes vary.
_SAMPLED = 64
# What tf.data adds to an element: a key and an entry in the index for each part.
_OVERHEAD_BYTES = 64
_COUNTED_AT_ONCE = 256
_SPACE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SPACE_WORDS = tuple(os.strerror(code) for code in _SPACE_ERRORS)


@dataclasses.dataclass(frozen=True)
class Cache(Stage):
    """Asks for a cache in memory, or in files that begin with a path."""

    rank: ClassVar[int] = 20
    name: ClassVar[str] = "cache"
    path: Path | None

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Caches in memory; a plan puts `FileCache` where there is a path."""
        return dataset.cache()

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        reason = "after map: done once; before shuffle: order varies"
        num_bytes = _expected_bytes(dataset)
        size = "size unknown" if num_bytes is None else _units.format_bytes(num_bytes)
        return f"memory, {size}", reason


@dataclasses.dataclass(frozen=True)
class FileCache(Stage):
    """Keeps the elements in files, which later runs of the same pipeline use too.

    Attributes:
        path: Where the names of the files begin.
        make_fingerprint: Gives the fingerprint of all that comes before.
    """

    rank: ClassVar[int] = Cache.rank
    name: ClassVar[str] = Cache.name
    path: Path
    make_fingerprint: Callable[[], Fingerprint]

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a dataset of the same spec, of the length that is on record."""
        files = CacheFiles(self.path, self.make_fingerprint().digest)
        if not files.is_complete:
            return dataset
        count = files.read()["num_elements"]
        unknown = dataset.filter(lambda *parts: True)
        return unknown.apply(tf.data.experimental.assert_cardinality(count))

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Fills the files, unless they are here, and reads them.

        Raises:
            OSError: The disk is full, or would be.
            ValueError: There are no elements, or the files are gone while in use.
        """
        found = self.make_fingerprint()
        files = CacheFiles(self.path, found.digest)
        with files.owned_or_complete() as is_owner:
            if is_owner:
                self._fill(files, found, dataset)
            else:
                record = files.read()
                # Not locked: two that start together may count as one.
                files.write({**record, "hits": record["hits"] + 1})
        _remove_older(files)
        cached = dataset.cache(str(files.stem))
        count = files.read()["num_elements"]
        return cached.apply(tf.data.experimental.assert_cardinality(count))

    def _fill(
        self, files: CacheFiles, found: Fingerprint, dataset: tf.data.Dataset
    ) -> None:
        """Writes the files in one pass, or leaves none."""
        if files.parts():
            logging.warning(
                "Cache %s was left unfinished by a process that has ended; its %d "
                "files are removed and it is built again.",
                files.stem,
                len(files.parts()),
            )
            files.remove_data()
        if found.unseen:
            logging.warning(
                "Cache %s does not notice changes in: %s. Delete its files after one.",
                files.stem,
                "; ".join(found.unseen),
            )
        self._check_space(files, dataset)
        try:
            count = _write(files, dataset)
            if count == 0:
                raise ValueError(
                    f"Cache {str(files.stem)!r} would hold no elements; expected at "
                    "least one. All were filtered out: loosen `.filter`."
                )
            contents = {
                "parts": found.parts,
                "num_elements": count,
                "num_bytes": files.num_bytes,
                "hits": 0,
            }
            files.write(contents)
        except BaseException as error:
            needed = files.num_bytes
            files.remove()
            if _is_about_space(error):
                raise OSError(
                    errno.ENOSPC,
                    f"The disk of {str(files.path.parent)!r} was full after "
                    f"{_units.format_bytes(needed)} of the cache; expected room for "
                    "all of it. What was written is removed. Free space, choose a path "
                    "on another disk, or cache in 'memory'",
                ) from error
            raise

    def _check_space(self, files: CacheFiles, dataset: tf.data.Dataset) -> None:
        """Raises if the cache will not fit, as far as its size can be foreseen."""
        needed = _expected_bytes(dataset)
        if needed is None:
            needed = _sampled_bytes(dataset)
        free = shutil.disk_usage(files.path.parent).free
        if needed is not None and needed > free:
            files.record.unlink(missing_ok=True)
            raise OSError(
                errno.ENOSPC,
                f"The cache needs about {_units.format_bytes(needed)}, and the disk of "
                f"{str(files.path.parent)!r} has {_units.format_bytes(free)} free; "
                "expected more. Free space, choose a path on another disk, or cache "
                "fewer elements (`.subset`)",
            )

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        files = CacheFiles(self.path, self.make_fingerprint().digest)
        if not files.is_complete:
            return f"files {files.stem}", "filled once by `build`, then read"
        record = files.read()
        size = _units.format_bytes(record["num_bytes"])
        times = "once" if record["hits"] == 1 else f"{record['hits']} times"
        held = f"{record['num_elements']:,} elements, {size}"
        return f"files {files.stem}", f"{held}; used again {times}"


def _write(files: CacheFiles, dataset: tf.data.Dataset) -> int:
    """Lets tf.data write its files; returns how many elements there were."""
    cached = dataset.cache(str(files.stem))
    # Only numbers come to Python, and not one by one.
    numbers = cached.enumerate().map(lambda number, _: number).batch(_COUNTED_AT_ONCE)
    count = 0
    with progress(f"Caching {files.path.name}", known_length(dataset)) as update:
        for batch in numbers:
            count += int(batch.shape[0])
            update(count)
    return count


def _remove_older(files: CacheFiles) -> None:
    """Removes caches of the same source whose later steps have changed since."""
    own = dict(map(tuple, files.read()["parts"]))
    for other in others(files):
        if is_in_use(other):
            continue
        parts = dict(map(tuple, other.read().get("parts", ())))
        if parts and any(
            parts.get(name) != own.get(name) for name in ("source", "shard")
        ):
            continue  # the validation part or another worker's, under the same path
        changed = [
            name for name in {**own, **parts} if own.get(name) != parts.get(name)
        ]
        size = _units.format_bytes(other.num_bytes)
        other.remove()
        logging.warning(
            "Removed the cache %s (%s): changed since then: %s.",
            other.stem,
            size,
            ", ".join(changed) or "nothing known",
        )


def _expected_bytes(dataset: tf.data.Dataset) -> int | None:
    """Returns what all elements take, None where shapes or the length vary."""
    element_bytes = bytes_of_element(dataset.element_spec)
    length = known_length(dataset)
    return None if element_bytes is None or length is None else element_bytes * length


def _sampled_bytes(dataset: tf.data.Dataset) -> int | None:
    """Returns an estimate from the first elements, None where the length is unknown."""
    length = known_length(dataset)
    if length is None:
        return None
    sizes = [_bytes_of(element) for element in dataset.take(_SAMPLED)]
    return round(length * sum(sizes) / max(1, len(sizes)))


def _bytes_of(element: Any) -> int:
    """Returns the bytes of a given element."""
    total = 0
    for leaf in tf.nest.flatten(element, expand_composites=True):
        array = leaf.numpy()
        if leaf.dtype == tf.string:
            total += sum(map(len, np.ravel(array)))
        else:
            total += array.nbytes
        total += _OVERHEAD_BYTES
    return total


def _is_about_space(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _SPACE_ERRORS
    return isinstance(error, tf.errors.OpError) and any(
        word in str(error) for word in _SPACE_WORDS
    )
