"""Windows of timed steps: which are steady, and the loss curve in them."""

import dataclasses
import math
from collections.abc import Sequence

from tfamp.records import units
from tfamp.trials.run_records import MAX_POINTS

# Of short trainings the first part warms up: caches, threads, clock rates.
_WARMUP_PART = 0.1
_MAX_WARMUP_STEPS = 50
# Of the windows that count so many at either end are left out of the rate: a machine
# that stalls for seconds, as virtual ones do, says nothing about a policy.
_TRIMMED_PART = 0.05
_MIN_WINDOWS_TO_TRIM = 8
# Stalls of this part of the time are told.
_MANY_STALLS = 0.1
# With so many epochs the first is left out: it traces, and fills caches of the input.
_MIN_EPOCHS = 3


@dataclasses.dataclass(frozen=True)
class Window:
    """Some training steps that were timed together.

    Args:
        epoch: Number of the epoch, from 0.
        last_step: Number of the last step of the window, over all epochs, from 1.
        steps: How many steps it holds.
        step_in_epoch: Number of its last step within the epoch, from 1.
        seconds: What they took.
        loss: What was logged last; None where no loss is logged.
        is_mean: Whether that is the mean since the epoch began, or that of a step.
        is_steady: Whether its time counts; not just after a wait.
    """

    epoch: int
    last_step: int
    steps: int
    step_in_epoch: int
    seconds: float
    loss: float | None
    is_mean: bool = True
    is_steady: bool = True


def steady(
    windows: Sequence[Window], *, num_epochs: int
) -> tuple[tuple[Window, ...], int]:
    """Returns the windows after the warm-up, and how many steps that had.

    Example:
        >>> windows = [Window(0, step, 1, step, 1.0, None) for step in range(1, 21)]
        >>> kept, warmup_steps = steady(windows, num_epochs=1)
        >>> len(kept), warmup_steps
        (18, 2)
    """
    if num_epochs >= _MIN_EPOCHS and windows[-1].epoch > 0:
        kept = tuple(window for window in windows if window.epoch > 0)
    else:
        last = min(_WARMUP_PART * windows[-1].last_step, _MAX_WARMUP_STEPS)
        # The first window holds the first step, which traces and compiles.
        kept = tuple(window for window in windows[1:] if window.last_step > last)
    kept = tuple(window for window in kept if window.is_steady) or kept
    kept = kept or tuple(windows[-1:])
    return kept, kept[0].last_step - kept[0].steps


def seconds_per_step(windows: Sequence[Window]) -> tuple[float, str]:
    """Returns the mean time of a step, and what a reader should know of it.

    Of eight windows the slowest and the fastest are left out, of forty two of each, of
    more a twentieth of each. What happens more often is in the mean, such as waits
    for the input.

    Example:
        >>> windows = [Window(1, step, 2, step, 0.2, None) for step in range(2, 40, 2)]
        >>> stalled = Window(1, 40, 2, 40, 16.2, None)
        >>> seconds, note = seconds_per_step([*windows, stalled])
        >>> round(seconds, 3), note
        (0.1, 'Stalls of 16.0 s in 1 of 20 windows of steps do not count.')
    """
    ordered = sorted(windows, key=lambda window: window.seconds / window.steps)
    num_left_out = max(
        int(_TRIMMED_PART * len(ordered)), int(len(ordered) >= _MIN_WINDOWS_TO_TRIM)
    )
    kept = ordered[num_left_out : len(ordered) - num_left_out]
    mean = sum(window.seconds for window in kept) / sum(w.steps for w in kept)
    slow = ordered[len(ordered) - num_left_out :]
    lost = sum(window.seconds - mean * window.steps for window in slow)
    total = sum(window.seconds for window in windows)
    if lost < _MANY_STALLS * total:
        return mean, ""
    return mean, (
        f"Stalls of {units.format_seconds(lost)} in {len(slow)} of {len(ordered)} "
        "windows of steps do not count."
    )


def curve(
    windows: Sequence[Window], max_points: int = MAX_POINTS
) -> tuple[tuple[int, float], ...]:
    """Returns last step and loss of windows, neighbours joined to `max_points`.

    `fit` logs the mean since the epoch began, so a window's own loss is the difference
    of two sums.

    Example:
        >>> first, second = Window(0, 2, 2, 2, 1, 3.0), Window(0, 4, 2, 4, 1, 2.0)
        >>> curve([first, second])
        ((2, 3.0), (4, 1.0))
    """
    points: list[tuple[int, int, float]] = []
    total, seen, epoch = 0.0, 0, -1
    for window in windows:
        if window.epoch != epoch:
            total, seen, epoch = 0.0, 0, window.epoch
        if window.loss is None:
            continue
        steps = window.step_in_epoch - seen
        if not window.is_mean:
            points.append((window.last_step, steps, window.loss))
            continue
        whole = window.loss * window.step_in_epoch
        points.append((window.last_step, steps, (whole - total) / steps))
        total, seen = (whole, window.step_in_epoch)
        if not math.isfinite(total):
            total = 0.0
    group = max(1, math.ceil(len(points) / max_points))
    joined = []
    for start in range(0, len(points), group):
        part = points[start : start + group]
        weight = sum(steps for _, steps, _ in part)
        loss = sum(steps * loss for _, steps, loss in part) / weight
        joined.append((part[-1][0], loss))
    return tuple(joined)
