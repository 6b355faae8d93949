"""Which pieces of a model to compute again so that a step fits into a target."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from absl import logging

from tfamp.memory.remat.savings import Savings, peak_bytes, read_savings
from tfamp.records.units import format_bytes, format_share

# A piece saves less than it keeps, since its own gradient needs it once.
_MAX_ROUNDS = 6

Pieces = Sequence[Sequence[keras.layers.Layer]]


def fit_into(
    model: keras.Model,
    pieces: Pieces,
    put: Callable[[set[int]], None],
    *,
    max_memory_bytes: int,
    batch_size: int,
    data: Any = None,
) -> set[int]:
    """Has the pieces computed again that save most for the time they take.

    Args:
        model: A compiled model, of which nothing is computed again yet.
        pieces: The layers of each piece.
        put: Has pieces, by number, computed again, and no others.
        max_memory_bytes: What the step may hold in all.
        batch_size: Examples of a step.
        data: As for `estimate_memory`.

    Returns:
        The numbers of the pieces.

    Raises:
        ValueError: The step does not fit with all of them either; nothing is changed.
    """
    savings = read_savings(model, batch_size, data)
    order = ranked(model, savings, pieces)
    chosen: set[int] = set()
    peak = savings.peak_bytes
    count = 0
    for _ in range(_MAX_ROUNDS):
        if peak <= max_memory_bytes or count == len(order):
            break
        count = _next(savings, model, pieces, order, count, peak - max_memory_bytes)
        chosen = set(order[:count])
        put(chosen)
        peak = peak_bytes(model, batch_size, data)
    if peak > max_memory_bytes and count < len(order):
        count, chosen = len(order), set(order)
        put(chosen)
        peak = peak_bytes(model, batch_size, data)
    if peak > max_memory_bytes:
        put(set())
        raise ValueError(
            f"`max_memory_bytes` is {format_bytes(max_memory_bytes)}, and a batch of "
            f"{batch_size:,} takes {format_bytes(peak)} with all {len(order)} pieces "
            f"computed again ({format_bytes(savings.peak_bytes)} without); expected a "
            "target that can be met. Take a smaller batch, which "
            "`tfamp.find_batch_size` finds, or more pieces by `segments`."
        )
    _tell(model, savings, pieces, chosen, peak)
    return chosen


def ranked(model: keras.Model, savings: Savings, pieces: Pieces) -> list[int]:
    """Returns the pieces that keep anything, most bytes for the time first."""

    def worth(number: int) -> float:
        kept, cost = savings.of(model, pieces[number])
        return kept / cost if cost else 0.0

    saving = [n for n in range(len(pieces)) if savings.of(model, pieces[n])[0] > 0]
    return sorted(saving, key=worth, reverse=True)


def _next(
    savings: Savings,
    model: keras.Model,
    pieces: Pieces,
    order: Sequence[int],
    count: int,
    missing: int,
) -> int:
    """Returns how many pieces, of the best ones, keep what is missing."""
    while count < len(order) and missing > 0:
        missing -= savings.of(model, pieces[order[count]])[0]
        count += 1
    return count


def _tell(
    model: keras.Model, savings: Savings, pieces: Pieces, chosen: set[int], peak: int
) -> None:
    cost = sum(savings.of(model, pieces[number])[1] for number in chosen)
    forward = sum(savings.cost.values()) or 1.0
    logging.info(
        "tfamp.remat: %d of %d pieces of %r are computed again in the backward pass: "
        "%s instead of %s (predicted), for %s of a forward pass.",
        len(chosen),
        len(pieces),
        model.name,
        format_bytes(peak),
        format_bytes(savings.peak_bytes),
        format_share(cost / forward),
    )
