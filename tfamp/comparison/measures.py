"""The measures of a run by name: what each is, its unit, and which way is better."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from tfamp.records import checks
from tfamp.trials.run_records import Run

Unit = Literal["per second", "seconds", "bytes", "joules", "count"]


@dataclasses.dataclass(frozen=True)
class Measure:
    """One figure of a run.

    Args:
        name: As `Comparison.ratio` takes it.
        label: For a table.
        unit: What it is counted in.
        more_is_better: Whether a larger value is.
        of: Gives the value of a finished run, None where it was not measured.
        answered_by: Name of the measure that answers the same question for it, such as
            the median of a latency for its other percentiles; "" where it is its own.
    """

    name: str
    label: str
    unit: Unit
    more_is_better: bool
    of: Callable[[Run], float | None]
    answered_by: str = ""


def _step_seconds(run: Run) -> float | None:
    return None if run.step is None else run.step.median


def _training_bytes(run: Run) -> float | None:
    """What training added to the process: libraries alone are some 500 MiB."""
    if run.memory is None:
        return None
    return max(run.memory.training_bytes - run.memory.start_bytes, 0)


def _device_bytes(run: Run) -> float | None:
    return None if run.memory is None else run.memory.device_bytes


_FIXED = (
    Measure(
        "examples_per_second",
        "training",
        "per second",
        True,
        lambda run: run.examples_per_second or None,
    ),
    Measure(
        "step_seconds",
        "training step",
        "seconds",
        False,
        _step_seconds,
        answered_by="examples_per_second",
    ),
    Measure(
        "first_step_seconds",
        "time to first step",
        "seconds",
        False,
        lambda run: run.first_step_seconds or None,
    ),
    Measure("training_bytes", "peak memory", "bytes", False, _training_bytes),
    Measure("device_bytes", "peak GPU memory", "bytes", False, _device_bytes),
    Measure("energy_joules", "energy", "joules", False, lambda run: run.energy_joules),
    Measure("file_bytes", "saved model", "bytes", False, lambda run: run.file_bytes),
    Measure("largest_batch", "largest batch", "count", True, lambda r: r.largest_batch),
)


def _of_latency(batch_size: int) -> tuple[Measure, ...]:
    def value(name: str) -> Callable[[Run], float | None]:
        def of(run: Run) -> float | None:
            found = run.latency(batch_size)
            return None if found is None else float(getattr(found, name))

        return of

    where, median = f"batch {batch_size}", f"latency_p50_batch_{batch_size}"
    percentiles = tuple(
        Measure(
            f"latency_{name}_batch_{batch_size}",
            f"inference {name}, {where}",
            "seconds",
            False,
            value(f"{name}_seconds"),
            answered_by="" if name == "p50" else median,
        )
        for name in ("p50", "p90", "p99")
    )
    rate = Measure(
        f"inference_examples_per_second_batch_{batch_size}",
        f"inference, {where}",
        "per second",
        True,
        value("examples_per_second"),
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
