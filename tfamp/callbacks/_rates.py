"""Rates of training out of windows of steps: plain numbers in and out."""

from collections.abc import Sequence
from typing import NamedTuple


class Window(NamedTuple):
    """Some steps in a row, between two moments at which the device was idle.

    Attributes:
        seconds: How long they took.
        batches: Their number.
        examples: Examples in them; None where they cannot be counted.
        wait_seconds: How much of it they waited for batches; None where that is not
            to be seen.
    """

    seconds: float
    batches: int
    examples: int | None
    wait_seconds: float | None


class Rates(NamedTuple):
    """What windows come to; None where it is not known.

    Attributes:
        examples_per_second: All examples over all of the time.
        step_seconds: The median step, each window standing for its steps.
        input_wait: Part of the time spent waiting for batches, in [0, 1].
        model_flops_utilisation: Part of the device's peak that the model's FLOPs take.
    """

    examples_per_second: float | None
    step_seconds: float
    input_wait: float | None
    model_flops_utilisation: float | None

    def known(self) -> dict[str, float]:
        """Returns the values that are there, by name."""
        named = self._asdict().items()
        return {name: value for name, value in named if value is not None}


def rates_of(
    windows: Sequence[Window],
    *,
    flops_per_example: float | None = None,
    peak_flops: float | None = None,
) -> Rates | None:
    """Returns the rates of windows, None where they hold no time.

    Args:
        windows: Windows of steps.
        flops_per_example: Of a training step, forward and backward.
        peak_flops: Most FLOPs a second, of all devices that train.

    Example:
        >>> slow, fast = Window(3.0, 10, 320, 1.0), Window(1.0, 10, 320, 0.0)
        >>> rates_of([slow, fast, fast])  # 960 examples in 5 s, 1 s of it waited
        ... # doctest: +NORMALIZE_WHITESPACE
        Rates(examples_per_second=192.0, step_seconds=0.1, input_wait=0.2,
            model_flops_utilisation=None)

    Source: Chowdhery et al., PaLM, 2022, appendix B (model FLOPs utilisation).
    """
    windows = [window for window in windows if window.batches and window.seconds > 0]
    if not windows:
        return None
    seconds = sum(window.seconds for window in windows)
    examples = [window.examples for window in windows if window.examples is not None]
    per_second = sum(examples) / seconds if len(examples) == len(windows) else None
    waits = [w.wait_seconds for w in windows if w.wait_seconds is not None]
    utilisation = None
    if per_second is not None and flops_per_example and peak_flops:
        utilisation = per_second * flops_per_example / peak_flops
    return Rates(
        examples_per_second=per_second,
        step_seconds=_median_step(windows),
        input_wait=min(1.0, sum(waits) / seconds)
        if len(waits) == len(windows)
        else None,
        model_flops_utilisation=utilisation,
    )


def _median_step(windows: Sequence[Window]) -> float:
    """Returns the time of a step that half of all steps do not exceed.

    Of a window only the mean is known, which stands for each of its steps.
    """
    half, seen = sum(window.batches for window in windows) / 2, 0
    median = 0.0
    for seconds, batches in sorted((w.seconds / w.batches, w.batches) for w in windows):
        if seen < half:
            median = seconds
        seen += batches
    return median
