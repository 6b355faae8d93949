"""What sources that read files by the chunk share: lengths, and damaged data."""

import abc
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfamp.data._sources import DATA, Source
from tfamp.data._stages import Settings
from tfamp.data.sources._files import open_bytes
from tfamp.records import checks


@dataclasses.dataclass(frozen=True)
class ChunkedSource(Source):
    """Examples of files, many of which are read at once.

    Attributes:
        paths: The files.
        num_examples: Examples in all, None where they were not counted.
    """

    # By examples: files differ in length, and there may be fewer than workers.
    shard_policy = DATA
    skips_errors = True
    paths: tuple[str, ...]
    num_examples: int | None

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
        """Returns chunks that Python reads; a pass ends by summing up its errors.

        Args:
            read: Yields chunks, each behind the number of its examples.
            spec: What a chunk is.
            settings: With what to do about damaged data, None to raise.
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
        """Counts damaged data where that is skipped, else raises.

        Args:
            settings: With what to do about it, None to raise.
            where: File, and place in it.
            message: What is wrong.

        Raises:
            ValueError: Errors are not skipped, or there are too many.
        """
        errors = settings.errors
        if errors is None:
            raise ValueError(
                f"{where}: {message}. Expected data that can be read: repair it, or "
                "leave out what is damaged with `.on_error('skip')`."
            )
        if where not in errors.log:
            errors.log.leave_out(where, message, about=self.about())

    def about(self) -> int:
        """Returns how many examples there are, at least about: lines, by the first."""
        if self.num_examples is not None:
            return self.num_examples
        with open_bytes(self.paths[0]) as file:
            start = file.read(2**18)
        num_bytes = sum(os.path.getsize(path) for path in self.paths)
        return num_bytes * (1 + start.count(b"\n")) // max(1, len(start))

    def files(self) -> str:
        """Returns how many files there are, in words."""
        return f"{len(self.paths):,} file{'' if len(self.paths) == 1 else 's'}"

    def length(self, unit: str) -> str:
        """Returns how many examples there are, in words."""
        if self.num_examples is None:
            return "length unknown (`num_examples`)"
        return f"{self.num_examples:,} {unit}"


def checked_number(num_examples: Any) -> int | str | None:
    """Returns a number of examples as a source takes it: "auto" and "count" too."""
    if num_examples is None:
        return None
    if isinstance(num_examples, str):
        return checks.choice("num_examples", num_examples, ["auto", "count"])
    return checks.positive_int("num_examples", num_examples)
