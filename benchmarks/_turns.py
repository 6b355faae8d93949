"""Times several things in turns, and states ratios with intervals."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

CONFIDENCE = 0.90


def take_turns(steps: Sequence[Callable[[], Any]], turns: int) -> np.ndarray:
    """Returns the seconds of each step in each turn, shape (turns, steps)."""
    seconds = np.zeros((turns, len(steps)))
    for turn in range(turns):
        # Whoever goes first changes: caches and clocks favour one of them.
        for side in np.roll(range(len(steps)), turn):
            start = time.perf_counter()
            steps[side]()
            seconds[turn, side] = time.perf_counter() - start
    return seconds


def ratio(
    numerators: np.ndarray, denominators: np.ndarray, digits: int = 3
) -> dict[str, Any]:
    """Returns the median ratio over turns, and its bootstrap interval."""
    ratios = numerators / denominators
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    tails = [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)]
    low, high = np.percentile(np.median(draws, axis=1), tails)
    return {
        "ratio": round(float(np.median(ratios)), digits),
        "interval": [round(float(low), digits), round(float(high), digits)],
    }
