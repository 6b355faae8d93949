"""Files of a source: found, opened, read by the chunk.

What is missing or unfit is said at once, what is damaged when it is met.
"""

import abc
import contextlib
import dataclasses
import glob
import gzip
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import tensorflow as tf

from tfamp.data._elements import with_length
from tfamp.data.sources import Source
from tfamp.data.stages import Settings
from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.records.units import join_words

# Examples of plain text files up to this size in all are counted at once, in 0.1 s.
_MAX_COUNTED_BYTES = 64 * 2**20
_NUM_SHOWN = 3
_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class ChunkedSource(Source):
    """Examples of files, many of which are read at once."""

    skips_errors = True
    paths: tuple[str, ...]
    num_examples: int | None  # None where they were not counted

    @abc.abstractmethod
    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns the examples in batches of many, of varying size."""

    def dataset(self, settings: Settings) -> tf.data.Dataset:
        """Returns the examples one by one; the length is known if none are skipped."""
        examples, length = self.chunks(settings).unbatch(), self.num_examples
        is_known = length is not None and settings.errors is None
        return with_length(examples, length or 0) if is_known else examples

    def report(self, settings: Settings, where: str, message: str) -> None:
        """Counts damaged data where it is skipped, else raises a ValueError."""
        if settings.errors is None:
            raise ValueError(
                f"{where}: {message}. Expected data that can be read: repair it, or "
                "leave out what is damaged with `.on_error('skip')`."
            )
        settings.errors.add(where, message)

    def length(self, unit: str) -> str:
        """Returns how many files and examples there are, in words."""
        files = f"{len(self.paths):,} file{'' if len(self.paths) == 1 else 's'}"
        known = None if self.num_examples is None else f"{self.num_examples:,} {unit}"
        return f"{files}, {known or 'length unknown'}"


def counted(paths: Sequence[str], count: Callable[[str], int], unit: str) -> int | None:
    """Returns the number of examples in small plain files, None of others."""
    size = sum(map(os.path.getsize, paths))
    if size > _MAX_COUNTED_BYTES or any(map(is_gzip, paths)):
        return None
    with progress(f"Counting {unit}", unit=unit):
        return sum(map(count, paths))


def find_files(paths: Any, extensions: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Returns the files that paths, patterns and folders stand for, at least one."""
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    found = [file for path in paths for file in _files_of(path, extensions)]
    if not found:
        raise ValueError(
            f"`paths` is {paths!r}; expected at least one file. Pass some."
        )
    file, count = Counter(found).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"`paths` names {file!r} twice; expected each file once. Make the patterns "
            "exclusive."
        )
    for file in found:
        if os.path.getsize(file) == 0:
            raise ValueError(
                f"File {file!r} in `paths` has 0 bytes; expected at least one "
                "element. Its writer may have failed: write it again or leave it out."
            )
    return tuple(found)


def _files_of(path: Any, extensions: tuple[str, ...]) -> list[str]:
    absolute = os.path.abspath(os.path.expanduser(os.fsdecode(path)))
    if os.path.isfile(absolute):
        return [absolute]
    # What a pattern matches; folders that exist are no part of it.
    folder, pattern = absolute, ""
    while not os.path.isdir(folder):
        folder, name = os.path.split(folder)
        pattern = os.path.join(name, pattern) if pattern else name
    matches = glob.glob(os.path.join(glob.escape(folder), pattern or "*"))
    files = sorted(filter(os.path.isfile, matches))
    if not pattern:
        files = [file for file in files if file.lower().endswith(extensions or "")]
    if not files:
        what = f" that ends in {join_words(extensions, 'or')}" if extensions else ""
        raise ValueError(
            f"{os.fsdecode(path)!r} in `paths` is no file{what}, and no folder or "
            f"pattern of any, on this machine; expected one, of a bucket that is "
            f"mounted too.{nearest(absolute)}"
        )
    return files


def nearest(absolute: str) -> str:
    """Returns a sentence about what does exist near a path that does not."""
    is_folder = os.path.isdir(absolute)
    parent, name = (absolute, "") if is_folder else os.path.split(absolute)
    if not os.path.isdir(parent):
        return f" Folder {parent!r} does not exist."
    names = sorted(os.listdir(parent))
    close = None if glob.has_magic(name) else checks.did_you_mean(name, names)
    if close:
        return f" Did you mean {os.path.join(parent, close)!r}?"
    return f" Folder {parent!r} has {listed(names) or 'no files'}."


def listed(names: Sequence[Any]) -> str:
    """Returns a few names for a message, and how many there are beyond these."""
    quoted = [repr(name) for name in names[:_NUM_SHOWN]]
    rest = len(names) - _NUM_SHOWN
    return join_words([*quoted, f"{rest} more"] if rest > 0 else quoted)


def is_gzip(path: str) -> bool:
    """Whether a file is compressed with gzip, by its first bytes."""
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


@contextlib.contextmanager
def open_text(path: str) -> Iterator[IO[bytes]]:
    """Opens a file behind a byte order mark, through gzip where it is packed."""
    opened: Any = (gzip.open if is_gzip(path) else open)(path, "rb")
    with opened as file:
        try:
            if file.read(len(_MARK)) != _MARK:
                file.seek(0)
            yield file
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(
                f"File {path!r} is damaged: {error}; expected a whole one. What "
                "follows cannot be read: restore the file, or leave it out."
            ) from error


def check_text(path: str) -> None:
    """Raises a ValueError if a file is in UTF-16 or holds zero bytes."""
    with open_text(path) as file:
        start = file.read(4096)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start:
        raise ValueError(
            f"File {path!r} is in UTF-16, or no text; expected text in UTF-8. Convert "
            "it, for example with `iconv -f UTF-16 -t UTF-8`, or leave it out."
        )
