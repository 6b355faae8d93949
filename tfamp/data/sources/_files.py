"""Finds and opens the files of a source; says at once which are missing or unfit."""

import contextlib
import glob
import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tfamp.records import checks
from tfamp.records.units import join_words

# Names shown in a message; enough to see what kind of files they are.
_NUM_SHOWN = 3
_GZIP = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Starts of files in UTF-16, which no part of TensorFlow reads as text.
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def find_files(
    paths: Any, *, argument: str = "paths", extensions: Sequence[str] = ()
) -> tuple[str, ...]:
    """Returns the files that paths, patterns and folders stand for.

    Matches of a pattern and the contents of a folder come in the order of their
    names, so that every machine reads the same elements in the same order. A list
    keeps its own order. Files whose names begin with a dot are left out of folders.

    Args:
        paths: A file, a folder, a pattern such as "data/*.csv", or several of these.
        argument: Its name, for messages.
        extensions: Endings of the files that count inside a folder, with the dot,
            in lower case; none for all files.

    Returns:
        At least one absolute path; each is a file that has at least one byte.

    Raises:
        TypeError: `paths` holds something that is no path.
        ValueError: A file is missing or empty, a pattern or a folder gives no file,
            a file comes twice, or a path is an address such as "gs://bucket/file".
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if not isinstance(paths, Sequence) or isinstance(paths, bytes):
        raise TypeError(
            f"`{argument}` is {paths!r}, of type {type(paths).__name__}; expected a "
            "path, a pattern, a folder, or a list of these. Pass a string such as "
            "'data/*'."
        )
    if not paths:
        raise ValueError(
            f"`{argument}` is {paths!r}; expected at least one file. Pass a path, or "
            "check the code that makes the list."
        )
    found = [
        file
        for path in paths
        for file in _files_of(path, argument=argument, extensions=extensions)
    ]
    seen: set[str] = set()
    for file in found:
        if file in seen:
            raise ValueError(
                f"`{argument}` names {file!r} twice; expected each file once. Its "
                "elements would count double: make the patterns exclusive."
            )
        seen.add(file)
        if os.path.getsize(file) == 0:
            raise ValueError(
                f"File {file!r} in `{argument}` has 0 bytes; expected at least one "
                "element. Its writer may have failed: write it again or leave it out."
            )
    return tuple(found)


def check_folder(folder: Any, *, argument: str) -> str:
    """Returns the absolute path of a folder that exists.

    Raises:
        TypeError: `folder` is no path.
        ValueError: It does not exist, or is a file.
    """
    path = _as_text(folder, argument)
    absolute = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(absolute):
        return absolute
    if os.path.exists(absolute):
        raise ValueError(
            f"`{argument}` is {path!r}, a file; expected a folder. Pass the folder "
            f"that it lies in, {os.path.dirname(absolute)!r}."
        )
    raise ValueError(
        f"`{argument}` is {path!r}, which does not exist; expected a folder."
        f"{_nearest(absolute)}"
    )


def check_name(path: str) -> str:
    """Returns a path that TensorFlow can hold, which is one in UTF-8.

    Raises:
        ValueError: Its name is in another encoding.
    """
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"File {path!r} has a name that is not UTF-8; expected one that is. Rename "
            "it, for example with `convmv -f latin1 -t utf8 --notest`."
        ) from error
    return path


def is_gzip(path: str) -> bool:
    """Whether a file is compressed with gzip, by its first bytes."""
    with open(path, "rb") as file:
        return file.read(2) == _GZIP


def check_text(path: str) -> None:
    """Raises if a file is plainly no text in UTF-8.

    Raises:
        ValueError: It is in UTF-16, or holds zero bytes.
    """
    with open_bytes(path) as file:
        start = file.read(4096)
    if start.startswith(_UTF_16) or b"\0" in start:
        kind = "in UTF-16" if start.startswith(_UTF_16) else "with zero bytes"
        raise ValueError(
            f"File {path!r} is {kind}; expected text in UTF-8. Convert it, for example "
            "with `iconv -f UTF-16 -t UTF-8`, or leave it out."
        )


@contextlib.contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes]]:
    """Opens a file for reading, through gzip where it is compressed.

    Raises:
        ValueError: The compressed stream is damaged, wherever that is met.
    """
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


def is_pattern(path: str) -> bool:
    """Whether `path` holds a wildcard.

    Example:
        >>> is_pattern("data/*.csv"), is_pattern("data/a.csv")
        (True, False)
    """
    return any(sign in path for sign in "*?[")


def shown(names: Sequence[str]) -> str:
    """Returns a few names for a message, and how many there are beyond these.

    Example:
        >>> shown(["a", "b"]), shown(["a", "b", "c", "d", "e"])
        ("'a' and 'b'", "'a', 'b', 'c' and 2 more")
    """
    quoted = [repr(name) for name in names[:_NUM_SHOWN]]
    rest = len(names) - _NUM_SHOWN
    return join_words([*quoted, f"{rest} more"] if rest > 0 else quoted)


def _as_text(path: Any, argument: str) -> str:
    """Returns a path as a string."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise TypeError(
            f"`{argument}` holds {path!r}, of type {type(path).__name__}; expected a "
            "path. Pass a string or a pathlib.Path."
        )
    text = os.fspath(path)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if "://" in text:
        raise ValueError(
            f"`{argument}` holds {text!r}, an address; expected files on this machine "
            "or on a mounted disk. Copy or mount them, or open them with `tf.data` and "
            "use `Pipeline.from_dataset`."
        )
    return text


def _files_of(path: Any, *, argument: str, extensions: Sequence[str]) -> list[str]:
    """Returns the files of one path, pattern or folder."""
    text = _as_text(path, argument)
    absolute = os.path.abspath(os.path.expanduser(text))
    if os.path.isfile(absolute):
        return [absolute]
    if os.path.isdir(absolute):
        return _files_in(absolute, text, argument=argument, extensions=extensions)
    if is_pattern(text):
        matches = sorted(filter(os.path.isfile, _matches(absolute)))
        if matches:
            return matches
        raise ValueError(
            f"Pattern {text!r} in `{argument}` matches no file; expected at least one."
            f"{_nearest(absolute)}"
        )
    raise ValueError(
        f"File {text!r} in `{argument}` does not exist.{_nearest(absolute)} Expected "
        "a file, a folder or a pattern such as 'data/*'; check the path."
    )


def _matches(absolute: str) -> list[str]:
    """Returns what a pattern matches; folders that exist are no part of it."""
    folder, names = absolute, ""
    while not os.path.isdir(folder):
        folder, name = os.path.split(folder)
        names = os.path.join(name, names) if names else name
    return glob.glob(os.path.join(glob.escape(folder), names))


def _files_in(
    absolute: str, text: str, *, argument: str, extensions: Sequence[str]
) -> list[str]:
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
        others = f"it has {shown(entries)}" if entries else "it holds no files"
        raise ValueError(
            f"Folder {text!r} in `{argument}` has no file{kind}; {others}. Expected at "
            "least one: pass another folder, or a pattern such as "
            f"{os.path.join(text, '*')!r}."
        )
    return [os.path.join(absolute, name) for name in fitting]


def _nearest(absolute: str) -> str:
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
    close = None if is_pattern(path.name) else checks.did_you_mean(path.name, names)
    if close:
        return f" Did you mean {str(parent / close)!r}?"
    return f" Folder {str(parent)!r} has {shown(names)}."
