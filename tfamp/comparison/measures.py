"""The measures of a run by name: what each is, its unit, and which way is better."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from tfamp.records import checks
from tfamp.trials.run_records import Run

Unit = Literal["per second", "seconds", "bytes", "joules", "count"]


@dataclasses.dataclass(frozen=True)
class Measure:
    """One figure of a run: all that tables, pages and `ratio` know of it.

    `of` gives the value of a finished run, None where it was not measured.
    `answered_by` names the measure that answers the same question for it, such as the
    median of a latency for its other percentiles; `tile` says in words what a large
    figure at the top of a page is of.
    """

    name: str
    label: str
    unit: Unit
    more_is_better: bool
    of: Callable[[Run], float | None]
    group: str = "Training"
    answered_by: str = ""
    tile: str = ""


def memory_of(name: str) -> Callable[[Run], float | None]:
    """Returns what gives a peak of memory of a run, of the process above its start.

    Libraries alone are some 500 MiB.
    """

    def of(run: Run) -> float | None:
        found = None if run.memory is None else getattr(run.memory, name)
        if found is None or run.memory is None or name.startswith("device"):
            return found
        return float(max(found - run.memory.start_bytes, 0))

    return of


_SIZE = "Memory and size"
_SPEED = Measure(
    *("examples_per_second", "training", "per second", True),
    lambda run: run.examples_per_second or None,
    tile="training speed",
)
_FIXED = (
    _SPEED,
    Measure(
        *("step_seconds", "training step", "seconds", False),
        lambda run: None if run.step is None else run.step.median,
        answered_by=_SPEED.name,
    ),
    Measure(
        *("first_step_seconds", "time to first step", "seconds", False),
        lambda run: run.first_step_seconds or None,
    ),
    Measure(
        *("training_bytes", "peak memory", "bytes", False),
        memory_of("training_bytes"),
        _SIZE,
        tile="peak memory",
    ),
    Measure(
        *("device_bytes", "peak GPU memory", "bytes", False),
        memory_of("device_bytes"),
        _SIZE,
        tile="peak GPU memory",
    ),
    Measure(
        *("energy_joules", "energy", "joules", False),
        lambda run: run.energy_joules,
        tile="energy",
    ),
    Measure(
        *("file_bytes", "saved model", "bytes", False),
        lambda run: run.file_bytes,
        _SIZE,
        tile="size of the saved model",
    ),
    Measure(
        *("largest_batch", "largest batch", "count", True),
        lambda run: run.largest_batch,
        _SIZE,
    ),
)


def _of_latency(size: int) -> tuple[Measure, ...]:
    def value(name: str) -> Callable[[Run], float | None]:
        def of(run: Run) -> float | None:
            found = run.latency(size)
            return None if found is None else float(getattr(found, name))

        return of

    median = f"latency_p50_batch_{size}"
    percentiles = tuple(
        Measure(
            f"latency_{name}_batch_{size}",
            f"{name}, batch {size}",
            "seconds",
            False,
            value(f"{name}_seconds"),
            "Inference",
            answered_by="" if name == "p50" else median,
            tile=f"latency at batch {size}" if name == "p50" else "",
        )
        for name in ("p50", "p90", "p99")
    )
    rate = Measure(
        f"inference_examples_per_second_batch_{size}",
        f"rate, batch {size}",
        "per second",
        True,
        value("examples_per_second"),
        "Inference",
        answered_by=median,
    )
    return (*percentiles, rate)


def measures_of(runs: Sequence[Run]) -> tuple[Measure, ...]:
    """Returns the measures that at least one of the runs has.

    Example:
        >>> run = Run("float32", 0, examples_per_second=10.0)
        >>> [measure.name for measure in measures_of([run])]
        ['examples_per_second']
    """
    sizes = sorted({each.batch_size for run in runs for each in run.latencies})
    every = [*_FIXED, *(measure for size in sizes for measure in _of_latency(size))]
    finished = [run for run in runs if run.is_finished]
    return tuple(m for m in every if any(m.of(run) is not None for run in finished))


def find(name: str, runs: Sequence[Run]) -> Measure:
    """Returns the measure of a name.

    A ValueError that lists them where no run has it.
    """
    by_name = {measure.name: measure for measure in measures_of(runs)}
    if not by_name:
        raise ValueError(
            f"No run has a `measure` {name!r}, since none has finished; expected one "
            "finished run at least. Look at the errors in `.runs`."
        )
    return by_name[checks.choice("measure", name, by_name)]
