"""Times steps of `fit` with and without callbacks, which take turns in one process."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
from _turns import ratio, take_turns

UNTIMED_STEPS = 10
WARM_UP = 2
# What a turn gives: seconds of a step as the median and as the mean, and the
# processor's seconds of a step.
MEDIAN, MEAN, PROCESSOR = 0, 1, 2


class Timer(keras.callbacks.Callback):
    """Takes the time of steps, those at the beginning left out.

    Args:
        untimed: How many are left out.
    """

    def __init__(self, untimed: int) -> None:
        super().__init__()
        self.untimed = untimed

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets the last turn."""
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the time."""
        if batch + 1 == self.untimed:
            self.processor = time.process_time()
        if batch + 1 >= self.untimed:
            self.times.append(time.perf_counter())

    def seconds(self) -> tuple[float, float, float]:
        """Returns the median step, the mean one, and the processor's time of a step."""
        processor = time.process_time() - self.processor
        steps = np.diff(self.times)
        return float(np.median(steps)), float(np.mean(steps)), processor / len(steps)


Side = Callable[[], tuple[float, float, float]]


def side(
    model: keras.Model,
    dataset: Any,
    callbacks: list[Any],
    steps: int,
    untimed: int = UNTIMED_STEPS,
) -> Side:
    """Returns a turn of a side: it trains and returns what `Timer.seconds` does.

    Args:
        model: What is trained.
        dataset: On what.
        callbacks: What is measured.
        steps: Steps of a turn.
        untimed: How many of them, at the beginning, are not timed.
    """
    timer = Timer(untimed)
    callbacks = [*callbacks, timer]

    def turn() -> tuple[float, float, float]:
        model.fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=callbacks)
        return timer.seconds()

    return turn


def cells(figures: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Returns the ratios of some sides as cells of a table."""
    return [
        f"{figures[name]['ratio']:.3f} {figures[name]['interval']}\nprocessor "
        f"{figures[name]['processor']['ratio']:.3f}"
        for name in names
    ]


def measure(sides: Mapping[str, Side], turns: int, *, what: int) -> dict[str, Any]:
    """Returns each side's step over that of the first one.

    Args:
        sides: Turns by name.
        turns: How many of each.
        what: `MEDIAN` or `MEAN`, the step that counts.
    """
    names = list(sides)
    times: list[list[tuple[float, float, float]]] = [[] for _ in names]

    def timed(index: int) -> Callable[[], Any]:
        return lambda: times[index].append(sides[names[index]]())

    steps = [timed(index) for index in range(len(names))]
    take_turns(steps, WARM_UP)
    for each in times:
        each.clear()
    take_turns(steps, turns)
    seconds = np.array(times)
    found: dict[str, Any] = {
        name: {
            **ratio(seconds[index, :, what], seconds[0, :, what]),
            "processor": ratio(seconds[index, :, PROCESSOR], seconds[0, :, PROCESSOR]),
        }
        for index, name in enumerate(names)
        if index
    }
    milliseconds = round(1e3 * float(np.median(seconds[0, :, what])), 3)
    return {"step_milliseconds": milliseconds, "turns": turns, **found}
