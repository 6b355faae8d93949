"""Times several things in turns, and states ratios with intervals."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

CONFIDENCE = 0.90
UNTIMED_STEPS = 10
WARM_UP = 2
# What a turn of `fit` gives: seconds of a step as the median and as the mean, and the
# processor's seconds of a step.
MEDIAN, MEAN, PROCESSOR = 0, 1, 2
Side = Callable[[], Any]


def timed(work: Callable[[], Any], repetitions: int = 1) -> tuple[float, float]:
    """Returns the seconds of one repetition on the clock and on the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(repetitions):
        work()
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    return clock / repetitions, processor / repetitions


def take_turns(sides: Sequence[Side], turns: int) -> np.ndarray:
    """Returns what each side told in each turn, its seconds: (turns, sides, figures).

    Whoever goes first changes from turn to turn: caches and clocks favour one of them.
    """
    found: list[list[Any]] = [[None] * len(sides) for _ in range(turns)]
    for turn in range(turns):
        for index in np.roll(range(len(sides)), turn):
            found[turn][index] = np.atleast_1d(sides[index]())
    return np.array(found)


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


class Timer(keras.callbacks.Callback):
    """Takes the time of steps of `fit`, those at the beginning left out."""

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


def fit_side(
    model: keras.Model,
    dataset: Any,
    callbacks: list[Any],
    steps: int,
    untimed: int = UNTIMED_STEPS,
) -> Side:
    """Returns a turn of `fit` with callbacks, some steps at its beginning untimed."""
    timer = Timer(untimed)
    callbacks = [*callbacks, timer]

    def turn() -> tuple[float, float, float]:
        model.fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=callbacks)
        return timer.seconds()

    return turn


def compare_fits(sides: Mapping[str, Side], turns: int, *, what: int) -> dict[str, Any]:
    """Returns the step of each side over that of the first one.

    Args:
        sides: From `fit_side`, by name.
        turns: How many of each, after two that do not count.
        what: `MEDIAN` or `MEAN`, the step that counts.
    """
    take_turns(list(sides.values()), WARM_UP)
    seconds = take_turns(list(sides.values()), turns)
    found: dict[str, Any] = {
        name: {
            **ratio(seconds[:, index, what], seconds[:, 0, what]),
            "processor": ratio(seconds[:, index, PROCESSOR], seconds[:, 0, PROCESSOR]),
        }
        for index, name in enumerate(sides)
        if index
    }
    milliseconds = round(1e3 * float(np.median(seconds[:, 0, what])), 3)
    return {"step_milliseconds": milliseconds, "turns": turns, **found}
