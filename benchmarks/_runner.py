"""What benchmarks share: flags, processes, turns, and what a record says of itself."""

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from absl import flags

from benchmarks import _page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# glibc gives blocks of at least so many bytes back when they are freed, and so a peak
# of the resident memory is one of what is in use, as with a GPU's allocator. The one
# that TensorFlow has for oneDNN gives nothing back, so it is left out.
FREED_AT_ONCE = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
}
CONFIDENCE = 0.90
UNTIMED_STEPS = 10
WARM_UP = 2
# What a turn of `fit` gives: seconds of a step as the median and as the mean, and the
# processor's seconds of a step.
MEDIAN, MEAN, PROCESSOR = 0, 1, 2
Side = Callable[[], Any]


def run(argv: Sequence[str], benchmark: Any) -> int:
    """Runs a benchmark: prints a table and a last line of JSON.

    A benchmark is a module with a function `measure`, which gets the flags' values and
    returns figures. It may have `FLAGS` of its own, each the end of the name of absl's
    `DEFINE_...` and what that takes, and a `measure_side` for one side in a process of
    its own. Arguments begin with its name.
    """
    settings = flags.FlagValues()
    for kind, *rest in (
        ("string", "json", "", "File to write the figures to."),
        ("bool", "record", False, "Keep the figures for RESULTS.md."),
        ("bool", "smoke", False, "As little as can be; the figures mean nothing."),
        ("string", "side", None, "JSON of a side, measured here."),
        *getattr(benchmark, "FLAGS", ()),
    ):
        getattr(flags, f"DEFINE_{kind}")(*rest, flag_values=settings)
    settings(argv)
    if settings.side:
        print(json.dumps(benchmark.measure_side(**json.loads(settings.side))))
        return 0
    found = benchmark.measure(settings)
    result = {"benchmark": argv[0], **about(argv), **found}
    for title, columns, rows in _page.of(argv[0], result):
        _show(title, columns, rows)
    if settings.record:
        record(argv[0], result)
    if settings.json:
        Path(settings.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))
    return 0


def about(argv: Sequence[str]) -> dict[str, Any]:
    """Returns command, commit, date, device and versions of this run."""
    import tensorflow as tf

    import tfamp
    from tfamp.machine import cpus

    words = [word for word in argv if not word.startswith(("--record", "--json"))]
    device = tfamp.status().devices[0]
    return {
        "command": " ".join(["python -m benchmarks", *words]),
        "commit": _page.git("rev-parse", "--short", "HEAD"),
        "date": datetime.date.today().isoformat(),
        "device": f"{device.name}, {len(os.sched_getaffinity(0))} cores",
        "instructions": [
            *cpus.instruction_sets(),
            *([cpus.BROKEN_AMX] if cpus.is_amx_broken() else []),
        ],
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "tfamp": tfamp.__version__,
        },
    }


def record(name: str, result: dict[str, Any]) -> None:
    """Keeps a result for RESULTS.md; of a list of results that of the same device."""
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text()) if path.is_file() else {}
    kept: Any = result
    if isinstance(before, list):
        others = [each for each in before if each["device"] != result["device"]]
        kept = [*others, result]
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def in_a_process(name: str, side: dict[str, Any], **environment: str) -> Any:
    """Returns what a benchmark's function for a side tells in a fresh process."""
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, f"--side={json.dumps(side)}"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if completed.returncode:
        raise RuntimeError(completed.stderr)
    return json.loads(completed.stdout.splitlines()[-1])


def _show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from tfamp.records import console

    shown = dict.fromkeys(columns, console.FOLD)
    print(console.text_of(console.table(shown, rows, title=title), width=140))


# Turns


def timed(work: Callable[[], Any], repetitions: int = 1) -> tuple[float, float]:
    """Returns the seconds of one repetition on the clock and on the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(repetitions):
        work()
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    return clock / repetitions, processor / repetitions


def take_turns(sides: Sequence[Side], turns: int) -> np.ndarray:
    """Returns what each side told in each turn, its seconds: (turns, sides, figures).

    Whoever goes first changes from turn to turn: caches and clocks favor one of them.
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

    Sides are from `fit_side`; what counts is the `MEDIAN` or the `MEAN` step. Two turns
    of each come ahead and do not count.
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
