"""Finds examples with equal inputs, inside train and between train and validation.

Rows are compared by a 128-bit hash of their bytes: two different rows agree by
chance once in 10**38. So 0.0 and -0.0 differ, as do NaNs of different bits.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfamp.records.findings import Finding
from tfamp.records.units import format_share

RULES = ("duplicates", "leak", "conflict")
# Hashes held of one data set, 24 bytes each: 96 MiB. Beyond, a fixed part of all
# hash values is kept, of both sets, so shares stay right.
_MAX_HELD = 2**22
# Shares of train, of validation, and of conflicting groups worth a warning.
_MANY_DUPLICATES = 0.01
_MIN_LEAK, _LARGE_LEAK = 0.001, 0.1
_MANY_CONFLICTS = 0.01
# With fewer distinct rows than this, equal rows are no surprise.
_MIN_DISTINCT = 0.5


class RowHashes:
    """Hashes of the inputs of each example, and of its targets.

    Args:
        max_held: Rows to hold at most; beyond, every second one is kept, by its
            hash, then every fourth, and so on.

    Attributes:
        num_rows: Rows seen.
        skipped_bits: How often the rows were halved: 1 in 2**skipped_bits is held.
    """

    def __init__(self, max_held: int = _MAX_HELD) -> None:
        self._max_held = max_held
        self._inputs: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []
        self._held = 0
        self.num_rows = 0
        self.skipped_bits = 0

    def update(self, inputs: list[np.ndarray], targets: list[np.ndarray]) -> None:
        """Takes the columns of the next examples."""
        if not inputs:
            return
        self.num_rows += len(inputs[0])
        keys = _hashes(inputs, 16).view(np.dtype([("high", "<u8"), ("low", "<u8")]))
        keys = keys.reshape(-1)
        labels = (
            _hashes(targets, 8).view("<u8").reshape(-1)
            if targets
            else np.zeros(len(keys), np.uint64)
        )
        kept = _is_kept(keys, self.skipped_bits)
        self._inputs.append(keys[kept])
        self._targets.append(labels[kept])
        self._held += int(kept.sum())
        while self._held > self._max_held:
            self.thin(self.skipped_bits + 1)

    def thin(self, bits: int) -> None:
        """Keeps 1 in 2**bits of the hash values."""
        keys, labels = self.keys, self.labels
        kept = _is_kept(keys, bits)
        self.skipped_bits = max(bits, self.skipped_bits)
        self._inputs, self._targets = [keys[kept]], [labels[kept]]
        self._held = int(kept.sum())

    @property
    def keys(self) -> np.ndarray:
        """The hashes of the inputs that are held."""
        return np.concatenate(self._inputs) if self._inputs else np.empty(0, "<u8")

    @property
    def labels(self) -> np.ndarray:
        """The hashes of their targets, in the same order."""
        return np.concatenate(self._targets) if self._targets else np.empty(0, "<u8")


def _is_kept(keys: np.ndarray, bits: int) -> np.ndarray:
    mask = np.uint64(2**bits - 1)
    return (keys["low"] & mask) == 0


def _hashes(columns: list[np.ndarray], size: int) -> np.ndarray:
    """Returns a hash of each row, shape (rows, size), as bytes."""
    rows = [_bytes_of_rows(column) for column in columns]
    digests = []
    for parts in zip(*rows, strict=True):
        digest = hashlib.blake2b(digest_size=size)
        for part in parts:
            digest.update(part)
        digests.append(digest.digest())
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, size).copy()


def _bytes_of_rows(column: np.ndarray) -> list[Any]:
    """Returns the bytes of each row; text with its lengths, so none run together."""
    if column.dtype.kind in "OSU":
        return [repr(row.tolist()).encode() for row in column.reshape(len(column), -1)]
    flat = np.ascontiguousarray(column).reshape(len(column), -1)
    raw = flat.view(np.uint8) if flat.size else np.zeros((len(column), 1), np.uint8)
    return list(raw)


def find(train: RowHashes, validation: RowHashes | None) -> Iterator[Finding]:
    """Yields equal examples and what they do to the result."""
    if validation is not None:
        bits = max(train.skipped_bits, validation.skipped_bits)
        train.thin(bits)
        validation.thin(bits)
    if not len(train.keys):
        return
    # Both bits of the hash count: sorting structured arrays compares them in turn.
    distinct, groups, sizes = np.unique(
        train.keys, return_inverse=True, return_counts=True
    )
    held, about = len(train.keys), "" if not train.skipped_bits else "about "
    few = len(distinct) < _MIN_DISTINCT * held
    share = 1 - len(distinct) / held
    if share:
        yield Finding(
            "duplicates",
            "note" if few or share < _MANY_DUPLICATES else "warning",
            f"{about}{format_share(share)} of the training examples repeat the inputs "
            f"of another one ({about}{round(share * train.num_rows):,} of "
            f"{train.num_rows:,}): they count double in the loss"
            + (", which is natural with so few distinct inputs." if few else "."),
            "Nothing." if few else "Drop the copies, unless they are meant as weights.",
            figure=share,
            details={"num_groups": int((sizes > 1).sum())},
        )
        yield from _conflict(groups.reshape(-1), sizes, train.labels, few=few)
    if validation is not None and len(validation.keys):
        yield from _leak(distinct, validation, few=few, about=about)


def _conflict(
    groups: np.ndarray, sizes: np.ndarray, labels: np.ndarray, *, few: bool
) -> Iterator[Finding]:
    """Equal inputs with different targets."""
    pairs = np.unique(np.stack([groups.astype(np.uint64), labels]), axis=1)
    answers = np.bincount(pairs[0].astype(np.int64), minlength=len(sizes))
    in_conflict = int(sizes[answers > 1].sum())
    if not in_conflict:
        return
    share = in_conflict / int(sizes.sum())
    many = share >= _MANY_CONFLICTS and not few
    yield Finding(
        "conflict",
        "warning" if many else "note",
        f"{format_share(share)} of the training examples have the inputs of another "
        "one and a different target: no model can be right on both.",
        "Look at them: wrong labels, or inputs that lack what decides.",
        figure=share,
        details={"num_groups": int((answers > 1).sum())},
    )


def _leak(
    distinct: np.ndarray, validation: RowHashes, *, few: bool, about: str
) -> Iterator[Finding]:
    """Validation examples that were trained on."""
    share = float(np.isin(validation.keys, distinct).mean())
    if not share:
        return
    count = round(share * validation.num_rows)
    if few or share < _MIN_LEAK:
        severity = "note"
    else:
        severity = "error" if share >= _LARGE_LEAK else "warning"
    yield Finding(
        "leak",
        severity,  # type: ignore[arg-type]
        f"{about}{format_share(share)} of the validation examples ({about}{count:,} of "
        f"{validation.num_rows:,}) have inputs that are in the training data: the "
        "validation score is better than new data will give"
        + (
            ", though equal inputs are natural with so few distinct ones."
            if few
            else "."
        ),
        "Split by a hash of the inputs, or by what belongs together (person, day).",
        figure=share,
        details={"num_examples": count},
    )
