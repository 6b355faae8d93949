"""Text files as a source: each line that is not empty is an example."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfamp.data.sources import files_identity
from tfamp.data.sources._files import (
    ChunkedSource,
    check_text,
    counted,
    find_files,
    open_text,
)
from tfamp.data.sources.images import LABEL_DTYPE, folder_source, label_files
from tfamp.data.stages import Settings

_EXTENSIONS = (".txt", ".text", ".md", ".txt.gz")
# Some 2,000 lines. TensorFlow splits such a block twice as fast as `TextLineDataset`
# hands out lines, and its place is known, so that an error can name file and line.
_BLOCK_BYTES = 256 * 2**10


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
            labels = tf.fill([tf.size(lines)], label)
            return lines if self.labels is None else (lines, labels)

        return self.generated(self._blocks, spec, settings).map(split)

    def _blocks(self, settings: Settings) -> Iterator[Any]:
        """Yields blocks of lines that are UTF-8, with the label of their file."""
        for file, path in enumerate(self.paths):
            label = LABEL_DTYPE(self.labels[file] if self.labels else 0)
            for first, block in _read_blocks(path):
                lines = []
                for number, line in enumerate(block.split(b"\n"), first):
                    try:
                        line.decode()
                        lines.append(line)
                    except UnicodeDecodeError as error:
                        byte, at = line[error.start], 1 + error.start
                        reason = f"byte 0x{byte:02x} at column {at} is no UTF-8"
                        self.report(settings, f"{path}, line {number}", reason)
                yield b"\n".join(lines), label

    def explain(self) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        classes = f", {len(self.class_names)} classes" if self.class_names else ""
        reason = "checked to be UTF-8; empty lines left out"
        return f"text, {self.length('lines')}{classes}", reason

    def identity(self) -> Any:
        """Returns the files with size and time of change, and the labels."""
        return ("text", self.labels, self.class_names, files_identity(self.paths))


def text_source(
    paths: Any, *, labels: Any = None, class_names: Sequence[str] | None = None
) -> TextSource:
    """Returns lines as a source, after a look at each file.

    `Pipeline.from_text` explains the arguments and the errors.
    """
    is_path = isinstance(paths, (str, os.PathLike))
    is_folder = is_path and os.path.isdir(os.path.expanduser(paths))
    if is_folder or isinstance(labels, str):
        found = folder_source(paths, labels, class_names, _EXTENSIONS, "texts")
    else:
        found = label_files(find_files(paths), labels, "texts")
    for path in found.paths:
        check_text(path)
    count = counted(found.paths, _count, "lines")
    if count == 0:
        raise ValueError(
            f"The {len(found.paths)} files in `paths` hold no text; expected at least "
            "one line that is not empty. Pass other files."
        )
    numbers = tuple(found.tensors[1].numpy().tolist()) if found.class_names else None
    return TextSource(found.paths, count, numbers, found.class_names)


def _count(path: str) -> int:
    """Returns the number of lines that are not empty."""
    return sum(sum(map(bool, b.split(b"\n"))) for _, b in _read_blocks(path))


def _read_blocks(path: str) -> Iterator[tuple[int, bytes]]:
    r"""Yields the lines of a text file in blocks, behind the number of the first.

    A byte order mark is left out, line ends are "\n" whatever they were, and the last
    is left out too. Lines count from 1.
    """
    with open_text(path) as file:
        number = 1
        while block := file.read(_BLOCK_BYTES):
            block += file.readline()
            block = block.replace(b"\r\n", b"\n")
            yield number, block.removesuffix(b"\n")
            number += block.count(b"\n")
