"""Text files as a source: each line that is not empty is an example."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
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
from tfamp.records.console import progress

EXTENSIONS = (".txt", ".text", ".md", ".txt.gz")
# Some 2,000 lines. TensorFlow splits such a block twice as fast as `TextLineDataset`
# hands out lines, and its place is known, so that an error can name file and line.
BLOCK_BYTES = 256 * 2**10


@dataclasses.dataclass(frozen=True)
class TextSource(ChunkedSource):
    """Lines of text files, one file after another."""

    labels: tuple[int, ...] | None  # of each file
    class_names: tuple[str, ...]  # of class 0, 1, ...; empty without labels

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns lines in UTF-8, with their labels if there are any."""
        spec = (tf.TensorSpec((), tf.string), tf.TensorSpec((), LABEL_DTYPE))

        def split(block: tf.Tensor, label: tf.Tensor) -> Any:
            lines = tf.strings.split(block, "\n")
            lines = tf.boolean_mask(lines, tf.strings.length(lines) > 0)
            return (
                lines
                if self.labels is None
                else (lines, tf.fill([tf.size(lines)], label))
            )

        return self.generated(self._blocks, spec, settings).map(split)

    def _blocks(self, settings: Settings) -> Iterator[tuple[int, Any]]:
        """Yields blocks of lines that are UTF-8, with the label of their file."""
        for file, path in enumerate(self.paths):
            label = LABEL_DTYPE(self.labels[file] if self.labels else 0)
            for first, block in read_blocks(path):
                lines = block.split(b"\n")
                bad = _bad_lines(block, lines)
                for number, reason in bad.items():
                    self.report(settings, f"{path}, line {first + number}", reason)
                if bad:
                    lines = [text for n, text in enumerate(lines) if n not in bad]
                    block = b"\n".join(lines)
                yield sum(map(bool, lines)), (block, label)

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        classes = f", {len(self.class_names)} classes" if self.class_names else ""
        reason = "checked to be UTF-8; empty lines left out"
        return f"text, {self.length('lines')}{classes}", reason

    def identity(self) -> Any:
        """Returns the files with size and time of change, and the labels."""
        return ("text", self.labels, self.class_names, files_identity(self.paths))


def text_source(
    paths: Any,
    *,
    labels: Any = None,
    class_names: Sequence[str] | None = None,
    extensions: Sequence[str] = EXTENSIONS,
    num_examples: int | str | None = "auto",
) -> TextSource:
    """Returns lines as a source, after a look at each file.

    `Pipeline.from_text` explains the arguments and the errors.
    """
    is_path = isinstance(paths, (str, os.PathLike))
    if isinstance(labels, str) or (
        is_path and os.path.isdir(os.path.expanduser(paths))
    ):
        options = {"class_names": class_names, "extensions": extensions}
        listed = folder_source(paths, labels=labels, kind="texts", **options)
    elif class_names is not None:
        raise ValueError(
            f"`class_names` is {tuple(class_names)!r} and `labels` {labels!r}; "
            "expected names where labels are 'inferred' from folders. Leave them out."
        )
    else:
        listed = label_files(find_files(paths), labels, kind="texts")
    for path in listed.paths:
        check_text(path)
    numbers = tuple(listed.tensors[1].numpy().tolist()) if listed.class_names else None
    asked = checked_number(num_examples)
    count = asked if isinstance(asked, int) else None
    if is_counted(listed.paths, asked):
        count = _count(listed.paths)
    return TextSource(listed.paths, count, numbers, listed.class_names)


def _count(paths: Sequence[str]) -> int:
    """Returns the number of lines that are not empty, of which there must be one."""
    count = 0
    with progress("Counting lines", unit="lines") as update:
        for path in paths:
            for _, block in read_blocks(path):
                count += sum(map(bool, block.split(b"\n")))
                update(count)
    if not count:
        raise ValueError(
            f"The {len(paths)} files in `paths` hold no text; expected at least one "
            "line that is not empty. Pass other files."
        )
    return count


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


def _bad_lines(block: bytes, lines: Sequence[bytes]) -> dict[int, str]:
    """Returns the lines of a block, from 0, that are no UTF-8, and why."""
    bad: dict[int, str] = {}
    try:
        block.decode()
    except UnicodeDecodeError:
        for number, line in enumerate(lines):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                at = f"byte 0x{line[error.start]:02x} at column {1 + error.start}"
                bad[number] = f"{at} is no UTF-8"
    return bad
