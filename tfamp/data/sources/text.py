"""Text files as a source: each line that is not empty is an example."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfamp.data.sources import _files, files_identity
from tfamp.data.stages import Settings

# Some 2,000 lines. TensorFlow splits such a block twice as fast as `TextLineDataset`
# hands out lines, and its place is known, so that an error can name file and line.
_BLOCK_BYTES = 256 * 2**10


@dataclasses.dataclass(frozen=True)
class TextSource(_files.ChunkedSource):
    """Lines of text files, one file after another."""

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns lines in UTF-8."""

        def split(block: tf.Tensor) -> tf.Tensor:
            lines = tf.strings.split(block, "\n")
            return tf.boolean_mask(lines, tf.strings.length(lines) > 0)

        read, spec = (
            functools.partial(self._blocks, settings),
            tf.TensorSpec((), "string"),
        )
        return tf.data.Dataset.from_generator(read, output_signature=spec).map(split)

    def _blocks(self, settings: Settings) -> Iterator[bytes]:
        for path in self.paths:
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
                yield b"\n".join(lines)

    def explain(self) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        reason = "checked to be UTF-8; empty lines left out"
        return f"text, {self.length('lines')}", reason

    def identity(self) -> Any:
        """Returns the files with size and time of change."""
        return ("text", files_identity(self.paths))


def text_source(paths: Any) -> TextSource:
    """Returns lines as a source, after a look at each file."""
    found = _files.find_files(paths, (".txt", ".text", ".md", ".txt.gz"))
    for path in found:
        _files.check_text(path)

    def count(path: str) -> int:
        return sum(sum(map(bool, b.split(b"\n"))) for _, b in _read_blocks(path))

    number = _files.counted(found, count, "lines")
    if number == 0:
        raise ValueError(
            f"The {len(found)} files in `paths` hold no text; expected at least one "
            "line that is not empty. Pass others."
        )
    return TextSource(found, number)


def _read_blocks(path: str) -> Iterator[tuple[int, bytes]]:
    """Yields blocks of lines, behind the number of the first, from 1."""
    with _files.open_text(path) as file:
        number = 1
        while block := file.read(_BLOCK_BYTES):
            block += file.readline()
            block = block.replace(b"\r\n", b"\n")
            yield number, block.removesuffix(b"\n")
            number += block.count(b"\n")
