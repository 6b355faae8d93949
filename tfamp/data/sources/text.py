"""Text files as a source: a line or a file is an example."""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp.data.sources import files_identity
from tfamp.data.sources._files import (
    BYTE_ORDER_MARK,
    ChunkedSource,
    check_text,
    checked_number,
    find_files,
    is_counted,
    open_bytes,
)
from tfamp.data.sources.images import LABEL_DTYPE, folder_source, label_files
from tfamp.data.stages import Settings
from tfamp.records import checks
from tfamp.records.console import progress

EXTENSIONS = (".txt", ".text", ".md", ".txt.gz")
# Some 2,000 lines. TensorFlow splits such a block twice as fast as `TextLineDataset`
# hands out lines, and its place is known, so that an error can name file and line.
BLOCK_BYTES = 256 * 2**10
# Files that are handed on at once, where a file is an example.
_FILES_A_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class TextSource(ChunkedSource):
    """Lines of text files, or whole files, one file after another."""

    labels: tuple[int, ...] | None  # of each file
    class_names: tuple[str, ...]  # of class 0, 1, ...; empty without labels
    by: str  # "line" or "file"
    keep_empty: bool
    num_empty: int | None = None  # left out, None where they were not counted

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns texts in UTF-8 with their labels, in vectors of many."""
        shape = () if self.by == "line" else (None,)
        spec = (tf.TensorSpec(shape, tf.string), tf.TensorSpec(shape, LABEL_DTYPE))
        read = self._line_blocks if self.by == "line" else self._whole_files
        return self.generated(read, spec, settings).map(self._finished)

    def _finished(self, text: tf.Tensor, label: tf.Tensor) -> Any:
        """Returns texts `(n,)`, with labels `(n,)` if there are any."""
        if self.by == "line":
            text = tf.strings.split(text, "\n")
            if not self.keep_empty:
                text = tf.boolean_mask(text, tf.strings.length(text) > 0)
            label = tf.fill(tf.shape(text), label)
        return text if self.labels is None else (text, label)

    def _line_blocks(self, settings: Settings) -> Iterator[tuple[int, Any]]:
        """Yields blocks of lines that are UTF-8, with the label of their file."""
        for file, path in enumerate(self.paths):
            for line, block in read_blocks(path):
                bad = _bad_lines(block)
                for number, reason in bad.items():
                    self.report(settings, f"{path}, line {line + number}", reason)
                lines = block.split(b"\n")
                if bad:
                    lines = [text for n, text in enumerate(lines) if n not in bad]
                count = len(lines) if self.keep_empty else sum(map(bool, lines))
                if lines:
                    yield count, (b"\n".join(lines), self._label(file))

    def _whole_files(self, settings: Settings) -> Iterator[tuple[int, Any]]:
        """Yields the contents of some files that are UTF-8, with their labels."""
        found = self._texts(settings)
        while chunk := list(itertools.islice(found, _FILES_A_CHUNK)):
            yield len(chunk), tuple(map(list, zip(*chunk, strict=True)))

    def _texts(self, settings: Settings) -> Iterator[tuple[bytes, Any]]:
        """Yields each text that is UTF-8 with its label, and reports the others."""
        for file, path in enumerate(self.paths):
            with open_bytes(path) as opened:
                text = opened.read().removeprefix(BYTE_ORDER_MARK)
            bad = next(iter(_bad_lines(text).items()), None)
            if bad is not None:
                self.report(settings, f"{path}, line {1 + bad[0]}", bad[1])
            elif text or self.keep_empty:
                yield text, self._label(file)

    def _label(self, file: int) -> Any:
        return LABEL_DTYPE(self.labels[file] if self.labels else 0)

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        size = self.length(f"{self.by}s")
        if self.class_names:
            size += f", {len(self.class_names)} classes"
        empty = "empty ones kept"
        if not self.keep_empty:
            count = "" if self.num_empty is None else f"{self.num_empty:,} "
            empty = f"{count}empty ones left out"
        files = "" if self.by == "file" and self.num_examples else f"{self.files()}, "
        return f"text, {files}{size}", f"checked to be UTF-8; {empty}"

    def identity(self) -> Any:
        """Returns the files with size and time of change, and how they are read."""
        read = (self.labels, self.class_names, self.by, self.keep_empty)
        return ("text", *read, files_identity(self.paths))


def text_source(
    paths: Any,
    *,
    labels: Any = None,
    class_names: Sequence[str] | None = None,
    by: str = "line",
    keep_empty: bool = False,
    extensions: Sequence[str] = EXTENSIONS,
    num_examples: int | str | None = "auto",
) -> TextSource:
    """Returns texts as a source, after a look at each file.

    `Pipeline.from_text` explains the arguments and the errors.
    """
    checks.choice("by", by, ["line", "file"])
    is_folder = isinstance(paths, (str, os.PathLike)) and os.path.isdir(
        os.path.expanduser(paths)
    )
    if is_folder or isinstance(labels, str):
        listed = folder_source(
            paths,
            labels=labels,
            class_names=class_names,
            extensions=extensions,
            kind="texts",
        )
    else:
        if class_names is not None or isinstance(labels, Mapping):
            raise ValueError(
                f"`paths` is {paths!r}, no folder, and `class_names` or a dict of "
                "`labels` came with it; expected a folder then. Pass one integer for "
                "each file."
            )
        listed = label_files(find_files(paths), labels, kind="texts")
    for path in listed.paths:
        check_text(path)
    numbers = None
    if listed.class_names:
        numbers = tuple(listed.tensors[1].numpy().tolist())
    asked = checked_number(num_examples)
    source = TextSource(
        listed.paths,
        None if isinstance(asked, str) else asked,
        numbers,
        listed.class_names,
        by,
        bool(keep_empty),
    )
    is_cheap = by == "file"  # a byte of each is enough
    is_to_count = is_counted(listed.paths, asked, any_size=is_cheap)
    return _counted(source) if is_to_count else source


def _counted(source: TextSource) -> TextSource:
    """Returns the source with the number of its examples, of which it has some."""
    count, num_empty = 0, 0
    with progress(f"Counting {source.by}s", unit=f"{source.by}s") as update:
        for path in source.paths:
            if source.by == "file":
                with open_bytes(path) as file:
                    num_empty += not file.read(1)
                count += 1
                continue
            for _, block in read_blocks(path):
                lines = block.split(b"\n")
                count += len(lines)
                num_empty += len(lines) - sum(map(bool, lines))
                update(count)
    if not source.keep_empty:
        count -= num_empty
    if count == 0:
        raise ValueError(
            f"The {len(source.paths)} files in `paths` hold no text; expected at "
            f"least one {source.by} that is not empty. Pass other files, or "
            "`keep_empty=True`."
        )
    return dataclasses.replace(source, num_examples=count, num_empty=num_empty)


def read_blocks(path: str) -> Iterator[tuple[int, bytes]]:
    r"""Yields the lines of a text file in blocks, behind the number of the first.

    A byte order mark is left out, line ends are "\n" whatever they were, and the last
    is left out too. Lines count from 1.
    """
    with open_bytes(path) as file:
        if file.read(3) != BYTE_ORDER_MARK:
            file.seek(0)
        number = 1
        while block := file.read(BLOCK_BYTES):
            block += file.readline()
            if b"\r" in block:
                block = block.replace(b"\r\n", b"\n")
            yield number, block.removesuffix(b"\n")
            number += block.count(b"\n")


def _bad_lines(text: bytes) -> dict[int, str]:
    """Returns the lines, from 0, that are no UTF-8, and why."""
    bad: dict[int, str] = {}
    try:
        text.decode()
    except UnicodeDecodeError:
        for number, line in enumerate(text.split(b"\n")):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                at = f"byte 0x{line[error.start]:02x} at column {1 + error.start}"
                bad[number] = f"{at} is no UTF-8"
    return bad
