"""Whether the parts that workers read hold each example of a data set once."""

import collections
import dataclasses
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfamp.data import _examples
from tfamp.records.record import Record, TableRecord

_DIGEST_BYTES = 12


@dataclasses.dataclass(frozen=True)
class Tally(Record):
    """How often each example came in an epoch.

    Args:
        counts: How often, by a checksum of all values of the example.

    Example:
        >>> import numpy as np
        >>> tally(np.array([3, 5, 3])).num_examples
        3
    """

    counts: dict[str, int]

    @property
    def num_examples(self) -> int:
        """The examples that came, those that came again included."""
        return sum(self.counts.values())


@dataclasses.dataclass(frozen=True)
class Coverage(TableRecord):
    """What parts of a data set have of it.

    Args:
        num_examples: Examples of the whole.
        sizes: Examples of each part.
        num_lost: Examples of the whole that no part has, or too few times.
        num_doubled: Examples of the whole that come once more than they should, each
            time counted.
        num_strange: Examples of parts that the whole does not have.
    """

    num_examples: int
    sizes: tuple[int, ...]
    num_lost: int
    num_doubled: int
    num_strange: int

    @property
    def is_exact(self) -> bool:
        """Whether each example comes as often as in the whole."""
        return not (self.num_lost or self.num_doubled or self.num_strange)

    def table(self) -> str:
        """Returns what was found in one line."""
        sizes = ", ".join(f"{size:,}" for size in self.sizes)
        return (
            f"{self.num_examples:,} examples in parts of {sizes}: {self.num_lost:,} "
            f"lost, {self.num_doubled:,} doubled, {self.num_strange:,} not of it"
        )


def tally(data: Any) -> Tally:
    """Counts the examples of one epoch, by checksums of their values.

    One pass over the data, about 5 us an example. Where workers train together each
    counts what it reads, and `coverage` compares: `tally(dataset).to_json(path)`.

    Args:
        data: A dataset or a pipeline, batched or not, or arrays; without changes at
            random, which would make another example of each.

    Returns:
        The counts, as many as there are different examples.

    Raises:
        TypeError: A part is no dense tensor.
        ValueError: There is no example, or no end.
    """
    counts: collections.Counter[str] = collections.Counter()

    def take(chunk: dict[str, np.ndarray]) -> None:
        for row in zip(*chunk.values(), strict=True):
            counts[_checksum(dict(zip(chunk, row, strict=True)))] += 1

    _examples.read("data", data).scan("Counting examples", take)
    return Tally(dict(counts))


def coverage(parts: Sequence[Any], whole: Any) -> Coverage:
    """Compares what several workers read with the data set that they divide.

    Args:
        parts: For each worker what it reads: a dataset or a pipeline, what `tally`
            gave, or the path of its JSON.
        whole: All examples, as one of these.

    Returns:
        A `Coverage`: `.is_exact`, `.sizes`, `.num_lost`, `.num_doubled`; print it for
        a line.

    Raises:
        TypeError: A part is no dense tensor.
        ValueError: There is no example or no end.

    Example:
        >>> import numpy as np
        >>> import tfamp
        >>> whole = tfamp.data.Pipeline.from_arrays(np.arange(7))
        >>> print(coverage([whole.shard(2, index) for index in range(2)], whole))
        7 examples in parts of 4, 3: 0 lost, 0 doubled, 0 not of it
        >>> coverage([whole.shard(2, 0), whole.shard(2, 0)], whole).num_lost
        3
    """
    tallies = [_tally_of(part) for part in parts]
    wanted = collections.Counter(_tally_of(whole).counts)
    found: collections.Counter[str] = collections.Counter()
    for each in tallies:
        found.update(each.counts)
    extra = found - wanted
    strange = sum(count for name, count in extra.items() if name not in wanted)
    return Coverage(
        num_examples=wanted.total(),
        sizes=tuple(each.num_examples for each in tallies),
        num_lost=(wanted - found).total(),
        num_doubled=extra.total() - strange,
        num_strange=strange,
    )


def _tally_of(data: Any) -> Tally:
    if isinstance(data, Tally):
        return data
    if isinstance(data, (str, os.PathLike)):
        return Tally.from_json(data)
    return tally(data)


def _checksum(example: dict[str, Any]) -> str:
    """Returns a checksum of all values of an example, with their names and dtypes."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name, part in example.items():
        value = np.asarray(part)
        is_text = value.dtype.kind in "OSU"
        kind = "text" if is_text else value.dtype
        digest.update(f"{name} {kind} {value.shape}".encode())
        for text in value.ravel() if is_text else ():
            content = text if isinstance(text, bytes) else str(text).encode()
            digest.update(len(content).to_bytes(8, "little") + content)
        if not is_text:
            digest.update(value.tobytes())
    return digest.hexdigest()
