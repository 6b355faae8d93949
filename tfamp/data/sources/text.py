"""Text files as a source: a line or a file is an example."""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp import _checks
from tfamp.data._progress import progress
from tfamp.data._sources import DATA, Source, files_identity
from tfamp.data._stages import Settings
from tfamp.data.sources._damage import report, summed_up
from tfamp.data.sources._files import (
    BYTE_ORDER_MARK,
    check_text,
    find_files,
    is_gzip,
    open_bytes,
)
from tfamp.data.sources.images import (
    LABEL_DTYPE,
    checked_extensions,
    label_files,
    list_files,
)

EXTENSIONS = (".txt", ".text", ".md", ".txt.gz")
# Lines of files up to this size in all are counted at once, in a tenth of a second.
MAX_COUNTED_BYTES = 64 * 2**20
# Some 2,000 lines. TensorFlow splits such a block twice as fast as `TextLineDataset`
# hands out lines, and its place is known, so that an error can name file and line.
BLOCK_BYTES = 256 * 2**10
# Files that are handed on at once, where a file is an example.
_FILES_A_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class TextSource(Source):
    """Lines of text files, or whole files, one file after another.

    Attributes:
        paths: The files.
        labels: The label of each file's examples, None for none.
        class_names: Name of class 0, 1, ...; empty without labels.
        by: "line" or "file".
        keep_empty: Whether examples may be empty.
        num_examples: Examples in all, None where they were not counted.
        num_empty: Empty ones that are left out, None where they were not counted.
    """

    shard_policy = DATA
    skips_errors = True
    paths: tuple[str, ...]
    labels: tuple[int, ...] | None
    class_names: tuple[str, ...]
    by: str
    keep_empty: bool
    num_examples: int | None
    num_empty: int | None

    def dataset(self, settings: Settings) -> tf.data.Dataset:
        """Returns the texts, in UTF-8, with their labels."""
        texts = self.chunks(settings).unbatch()
        if self.num_examples is None or settings.errors is not None:
            return texts
        return texts.apply(tf.data.experimental.assert_cardinality(self.num_examples))

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns the same texts in vectors of many."""
        spec: Any = (tf.TensorSpec((), tf.string), tf.TensorSpec((), LABEL_DTYPE))
        read: Any = self._line_blocks
        if self.by == "file":
            spec = tf.nest.map_structure(
                lambda one: tf.TensorSpec((None,), one.dtype), spec
            )
            read = self._whole_files
        found = tf.data.Dataset.from_generator(
            functools.partial(read, settings), output_signature=spec
        )
        return summed_up(found.map(self._finished), settings.errors)

    def _finished(self, text: tf.Tensor, label: tf.Tensor) -> Any:
        """Returns texts `(n,)`, with labels `(n,)` if there are any."""
        if self.by == "line":
            text = tf.strings.split(text, "\n")
            if not self.keep_empty:
                text = tf.boolean_mask(text, tf.strings.length(text) > 0)
            label = tf.fill(tf.shape(text), label)
        return text if self.labels is None else (text, label)

    def _line_blocks(self, settings: Settings) -> Iterator[tuple[bytes, Any]]:
        """Yields blocks of lines that are UTF-8, with the label of their file."""
        for file, path in enumerate(self.paths):
            for line, block in read_blocks(path):
                lines = _bad_lines(block)
                for number, reason in lines.items():
                    where = f"{path}, line {line + number}"
                    report(settings.errors, where, reason, self._total)
                good = block
                if lines:
                    parts = enumerate(block.split(b"\n"))
                    good = b"\n".join(part for n, part in parts if n not in lines)
                if good or block in (b"", good):
                    yield good, self._label(file)

    def _whole_files(self, settings: Settings) -> Iterator[tuple[list[bytes], Any]]:
        """Yields the contents of some files that are UTF-8, with their labels."""
        texts: list[bytes] = []
        labels: list[Any] = []
        for file, path in enumerate(self.paths):
            with open_bytes(path) as opened:
                text = opened.read().removeprefix(BYTE_ORDER_MARK)
            for line, reason in _bad_lines(text).items():
                where = f"{path}, line {1 + line}"
                report(settings.errors, where, reason, self._total)
                break
            else:
                if text or self.keep_empty:
                    texts.append(text)
                    labels.append(self._label(file))
            if len(texts) == _FILES_A_CHUNK:
                yield texts, labels
                texts, labels = [], []
        if texts:
            yield texts, labels

    def _label(self, file: int) -> Any:
        return LABEL_DTYPE(self.labels[file] if self.labels else 0)

    def _total(self) -> int:
        """Returns how many examples there are, about, to hold errors against."""
        if self.num_examples is not None:
            return self.num_examples
        _, block = next(read_blocks(self.paths[0]))
        num_bytes = sum(os.path.getsize(path) for path in self.paths)
        return num_bytes * (1 + block.count(b"\n")) // max(1, len(block))

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        num_files = len(self.paths)
        files = f"{num_files} file" if num_files == 1 else f"{num_files:,} files"
        if self.num_examples is None:
            size = "length unknown (`num_examples`)"
        else:
            size = f"{self.num_examples:,} {self.by}s"
        if self.class_names:
            size += f", {len(self.class_names)} classes"
        empty = "empty ones kept"
        if not self.keep_empty:
            count = "" if self.num_empty is None else f"{self.num_empty:,} "
            empty = f"{count}empty ones left out"
        files = "" if self.by == "file" and self.num_examples else f"{files}, "
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

    Arguments are those of `Pipeline.from_text`, which explains them.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A file is missing or no text, all are empty, or labels do not fit.
    """
    _checks.choice("by", by, ["line", "file"])
    is_folder = isinstance(paths, (str, os.PathLike)) and os.path.isdir(
        os.path.expanduser(paths)
    )
    if is_folder or isinstance(labels, str):
        listed = list_files(
            paths,
            labels=labels,
            class_names=class_names,
            extensions=checked_extensions(extensions),
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
    source = TextSource(
        listed.paths, numbers, listed.class_names, by, bool(keep_empty), None, None
    )
    return _counted(source, num_examples)


def _counted(source: TextSource, asked: int | str | None) -> TextSource:
    """Returns the source with the number of its examples, as asked for.

    Raises:
        ValueError: There are none.
    """
    if asked is None:
        return source
    if not isinstance(asked, str):
        count = _checks.positive_int("num_examples", asked)
        return dataclasses.replace(source, num_examples=count)
    _checks.choice("num_examples", asked, ["auto", "count"])
    is_packed = any(is_gzip(path) for path in source.paths)
    total = sum(os.path.getsize(path) for path in source.paths)
    is_large = total > MAX_COUNTED_BYTES and source.by == "line"
    if asked == "auto" and (is_packed or is_large):
        return source
    count, num_empty = 0, 0
    with progress(f"Counting {source.by}s", unit=f"{source.by}s") as update:
        for path in source.paths:
            if source.by == "file" and not is_gzip(path):
                count += 1
                num_empty += os.path.getsize(path) == 0
                continue
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
    r"""Yields the lines of a text file in blocks.

    A byte order mark is left out, and line ends are "\n" whatever they were.

    Yields:
        The number of its first line, from 1, and the lines, without the last "\n".
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
    try:
        text.decode()
    except UnicodeDecodeError:
        bad = {}
        for number, line in enumerate(text.split(b"\n")):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                wrong = line[error.start]
                at = f"byte 0x{wrong:02x} at column {1 + error.start}"
                bad[number] = f"{at} is no UTF-8"
        return bad
    return {}
