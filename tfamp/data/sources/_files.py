"""Files of a source: found, opened, read by the chunk.

What is missing or unfit is said at once, what is damaged when it is met.
"""

import abc
import contextlib
import dataclasses
import glob
import gzip
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import tensorflow as tf

from tfamp.data.sources import Source
from tfamp.data.stages import Settings
from tfamp.records import checks
from tfamp.records.units import join_words

# Examples of text files up to this size in all are counted at once, in 0.1 s.
MAX_COUNTED_BYTES = 64 * 2**20
# Names shown in a message; enough to see what kind of files they are.
_NUM_SHOWN = 3
# Of two letters at least: "C:/" is a disk of Windows.
_ADDRESS = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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
        """Returns the examples one by one."""
        examples = self.chunks(settings).unbatch()
        if self.num_examples is None or settings.errors is not None:
            return examples
        known = tf.data.experimental.assert_cardinality(self.num_examples)
        return examples.apply(known)

    def generated(
        self,
        read: Callable[[Settings], Iterator[tuple[int, Any]]],
        spec: Any,
        settings: Settings,
    ) -> tf.data.Dataset:
        """Returns chunks of a spec that Python reads; a pass ends by summing up errors.

        `read` yields chunks, each behind the number of its examples.
        """
        errors = settings.errors

        def chunks() -> Iterator[Any]:
            num_examples = 0
            for count, chunk in read(settings):
                num_examples += count
                yield chunk
            # Where a later step looks for errors too, that one sums up.
            if errors is not None and errors.is_last:
                errors.log.finish(num_examples)

        return tf.data.Dataset.from_generator(chunks, output_signature=spec)

    def report(self, settings: Settings, where: str, message: str) -> None:
        """Counts damaged data where it is skipped, else raises a ValueError."""
        errors = settings.errors
        if errors is None:
            raise ValueError(
                f"{where}: {message}. Expected data that can be read: repair it, or "
                "leave out what is damaged with `.on_error('skip')`."
            )
        if where not in errors.log:
            errors.log.leave_out(where, message)

    def length(self, unit: str) -> str:
        """Returns how many files and examples there are, in words."""
        files = f"{len(self.paths):,} file{'' if len(self.paths) == 1 else 's'}"
        if self.num_examples is None:
            return f"{files}, length unknown (`num_examples`)"
        return f"{files}, {self.num_examples:,} {unit}"


def checked_number(num_examples: Any) -> int | str | None:
    """Returns a number of examples as a source takes it: "auto" and "count" too."""
    if num_examples is None:
        return None
    if isinstance(num_examples, str):
        return checks.choice("num_examples", num_examples, ["auto", "count"])
    return checks.positive_int("num_examples", num_examples)


def is_counted(paths: Sequence[str], asked: int | str | None) -> bool:
    """Whether to count examples now: for "auto" those of small plain files alone."""
    if asked != "auto":
        return asked == "count"
    is_small = sum(map(os.path.getsize, paths)) <= MAX_COUNTED_BYTES
    return is_small and not any(map(is_gzip, paths))


def find_files(paths: Any, *, extensions: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the files that paths, patterns and folders stand for, at least one.

    Matches of a pattern and the contents of a folder come in the order of their names,
    a list in its own. Of folders count files with one of the `extensions` (none for
    all), but none whose name begins with a dot. A ValueError says what is missing,
    empty or named twice, or is no local file.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if not isinstance(paths, Sequence) or isinstance(paths, bytes):
        raise TypeError(
            f"`paths` is {paths!r}, of type {type(paths).__name__}; expected a "
            "path, a pattern, a folder, or a list of these. Pass a string such as "
            "'data/*'."
        )
    if not paths:
        raise ValueError(
            f"`paths` is {paths!r}; expected at least one file. Pass a path, or "
            "check the code that makes the list."
        )
    found = [file for path in paths for file in _files_of(path, extensions)]
    if repeated := [file for file, count in Counter(found).items() if count > 1]:
        raise ValueError(
            f"`paths` names {repeated[0]!r} twice; expected each file once. Its "
            "elements would count double: make the patterns exclusive."
        )
    for file in found:
        if os.path.getsize(file) == 0:
            raise ValueError(
                f"File {file!r} in `paths` has 0 bytes; expected at least one "
                "element. Its writer may have failed: write it again or leave it out."
            )
    return tuple(found)


def is_gzip(path: str) -> bool:
    """Whether a file is compressed with gzip, by its first bytes."""
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def check_text(path: str) -> None:
    """Raises a ValueError if a file is in UTF-16 or holds zero bytes."""
    with open_bytes(path) as file:
        start = file.read(4096)
    is_utf_16 = start.startswith((b"\xff\xfe", b"\xfe\xff"))
    if is_utf_16 or b"\0" in start:
        kind = "in UTF-16" if is_utf_16 else "with zero bytes"
        raise ValueError(
            f"File {path!r} is {kind}; expected text in UTF-8. Convert it, for example "
            "with `iconv -f UTF-16 -t UTF-8`, or leave it out."
        )


@contextlib.contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes]]:
    """Opens a file, through gzip where it is packed; damage is a ValueError."""
    if not is_gzip(path):
        with open(path, "rb") as plain:
            yield plain
        return
    with open(path, "rb") as compressed, gzip.open(compressed) as file:
        try:
            yield file  # type: ignore[misc]
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(
                f"File {path!r} is damaged: its gzip stream breaks near byte "
                f"{compressed.tell():,} ({error}); expected a whole one. What follows "
                "cannot be read: restore the file, or leave it out."
            ) from error


def listed(names: Sequence[str]) -> str:
    """Returns a few names for a message, and how many there are beyond these.

    Example:
        >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e"])
        ("'a' and 'b'", "'a', 'b', 'c' and 2 more")
    """
    quoted = [repr(name) for name in names[:_NUM_SHOWN]]
    rest = len(names) - _NUM_SHOWN
    return join_words([*quoted, f"{rest} more"] if rest > 0 else quoted)


def as_path(path: Any, argument: str) -> str:
    """Returns a path as a string."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise TypeError(
            f"`{argument}` holds {path!r}, of type {type(path).__name__}; expected a "
            "path. Pass a string or a pathlib.Path."
        )
    text = os.fsdecode(path)
    check_no_address(f"`{argument}` holds {text!r}", text)
    return text


def check_no_address(what: str, text: str) -> None:
    """Raises a ValueError if a path is an address, such as that of a bucket.

    `pathlib` leaves one of the slashes of "gs://bucket/data".
    """
    found = _ADDRESS.match(text)
    if found is None or ("://" not in text and os.path.exists(text)):
        return
    scheme = found[1].lower()
    remedy = "Copy or mount them: TensorFlow alone does not read these either."
    if scheme == "file":
        remedy = f"Pass {'/' + text[found.end() :]!r}."
    elif scheme == "gs":
        remedy = (
            "Mount the bucket (gcsfuse) or copy them (`gcloud storage cp -r`), or open "
            "them with `tf.data`, which reads gs://, and use `Pipeline.from_dataset`."
        )
    raise ValueError(
        f"{what}, an address; expected files on this machine or on a mounted disk. "
        f"{remedy}"
    )


def _files_of(path: Any, extensions: Sequence[str]) -> list[str]:
    """Returns the files of one path, pattern or folder."""
    text = as_path(path, "paths")
    absolute = os.path.abspath(os.path.expanduser(text))
    if os.path.isfile(absolute):
        return [absolute]
    if os.path.isdir(absolute):
        return _files_in(absolute, text, extensions)
    if not glob.has_magic(text):
        raise ValueError(
            f"File {text!r} in `paths` does not exist.{nearest(absolute)} Expected "
            "a file, a folder or a pattern such as 'data/*'; check the path."
        )
    # What a pattern matches; folders that exist are no part of it.
    folder, names = absolute, ""
    while not os.path.isdir(folder):
        folder, name = os.path.split(folder)
        names = os.path.join(name, names) if names else name
    matches = glob.glob(os.path.join(glob.escape(folder), names))
    files = sorted(filter(os.path.isfile, matches))
    if not files:
        raise ValueError(
            f"Pattern {text!r} in `paths` matches no file; expected at least one."
            f"{nearest(absolute)}"
        )
    return files


def _files_in(absolute: str, text: str, extensions: Sequence[str]) -> list[str]:
    """Returns the files of a folder that have one of the extensions."""
    entries = sorted(
        entry.name
        for entry in os.scandir(absolute)
        if entry.is_file() and not entry.name.startswith(".")
    )
    wanted = tuple(extensions)
    fitting = [name for name in entries if not wanted or name.lower().endswith(wanted)]
    if not fitting:
        kind = f" that ends in {join_words(list(wanted), 'or')}" if wanted else ""
        others = f"it has {listed(entries)}" if entries else "it holds no files"
        raise ValueError(
            f"Folder {text!r} in `paths` has no file{kind}; {others}. Expected at "
            "least one: pass another folder, or a pattern such as "
            f"{os.path.join(text, '*')!r}."
        )
    return [os.path.join(absolute, name) for name in fitting]


def nearest(absolute: str) -> str:
    """Returns a sentence about what does exist near a path that does not."""
    path = Path(absolute)
    parent = path.parent
    if not parent.is_dir():
        while not parent.is_dir():
            parent = parent.parent
        return f" Of its folders only {str(parent)!r} exists."
    names = sorted(entry.name for entry in parent.iterdir())
    if not names:
        return f" Folder {str(parent)!r} is empty."
    close = None if glob.has_magic(path.name) else checks.did_you_mean(path.name, names)
    if close:
        return f" Did you mean {str(parent / close)!r}?"
    return f" Folder {str(parent)!r} has {listed(names)}."
