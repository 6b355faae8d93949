"""Figures of runs: the measures by name, and how their values are written.

A measure says what a figure is, its unit and which way is better; a format gives all
figures of one row one unit and as many decimals.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from tfamp.records import checks
from tfamp.trials.run_records import Run
from tfamp.trials.statistics import Interval

Unit = Literal["per second", "seconds", "bytes", "joules", "count"]
# In the place of a figure that there is not.
MISSING = "–"
_MINUS = "\u2212"
_SCALES: dict[Unit, tuple[tuple[float, str], ...]] = {
    "seconds": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "bytes": (
        *((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB")),
        *((2.0**10, "KiB"), (1.0, "bytes")),
    ),
    "joules": ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")),
    "per second": ((1.0, "examples/s"),),
    "count": ((1.0, ""),),
}
_PLAIN = str.maketrans({_MINUS: "-", "×": "x", "µ": "u", "–": "-", "…": "~"})
# More decimals than this are written with an exponent.
_MAX_DECIMALS = 6


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
    """Returns percentiles and rate of calls, for all of which the median answers."""

    def measure(name: str, label: str, field: str, unit: Unit) -> Measure:
        def of(run: Run) -> float | None:
            found = run.latency(size)
            return None if found is None else float(getattr(found, field))

        words = (f"{name}_batch_{size}", f"{label}, batch {size}")
        own = Measure(*words, unit, unit == "per second", of, "Inference")
        if label == "p50":
            return dataclasses.replace(own, tile=f"latency at batch {size}")
        return dataclasses.replace(own, answered_by=f"latency_p50_batch_{size}")

    return (
        *(
            measure(f"latency_{each}", each, f"{each}_seconds", "seconds")
            for each in ("p50", "p90", "p99")
        ),
        measure(
            *("inference_examples_per_second", "rate", "examples_per_second"),
            "per second",
        ),
    )


def measures_of(runs: Sequence[Run]) -> tuple[Measure, ...]:
    """Returns the measures that at least one of the runs has."""
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


@dataclasses.dataclass(frozen=True)
class Format:
    """How the figures of one row are written.

    `factor` is one unit in the unit they come in; None for `decimals` gives four
    significant digits.

    Example:
        >>> Format(1e-3, "ms", 1)(0.0123), Format(1.0, "", 0)(-1234.0)
        ('12.3', '−1,234')
    """

    factor: float
    unit: str
    decimals: int | None

    def __call__(self, value: float | None, *, sign: bool = False) -> str:
        """Returns a figure without its unit; `sign` writes a plus too."""
        if value is None or not math.isfinite(value):
            return MISSING
        if self.decimals is None:
            text = f"{value / self.factor:{'+' if sign else ''}.4g}"
        else:
            # Without this, -0.0001 is written as -0.00.
            rounded = round(value / self.factor, self.decimals) + 0.0
            sign = sign and rounded != 0
            text = f"{rounded:{'+' if sign else ''},.{self.decimals}f}"
        return text.replace("-", _MINUS)

    def with_unit(self, value: float | None) -> str:
        """Returns a figure with its unit."""
        text = self(value)
        return text if text == MISSING or not self.unit else f"{text} {self.unit}"


def format_for(unit: Unit, values: Iterable[float | None]) -> Format:
    """Returns the format in which the least of some figures has three digits."""
    sizes = [abs(v) for v in values if v is not None and math.isfinite(v) and v]
    scales = _SCALES[unit]
    if not sizes:
        return Format(*scales[-1], 0)
    last = len(scales) - 1
    place = next(
        (i for i, (size, _) in enumerate(scales) if max(sizes) >= 0.9995 * size), last
    )
    # 0.296 and 1.02 GiB are easier to compare as 303 and 1,044 MiB.
    size = scales[place][0]
    if min(sizes) < size and max(sizes) < 10 * size and place < last:
        place += 1
    factor, sign = scales[place]
    form = Format(factor, sign, 0)
    return form if unit == "count" or sign == "bytes" else finer(form, sizes)


def finer(form: Format, values: Iterable[float]) -> Format:
    """Returns a format in the same unit that gives the least value three digits.

    Example:
        >>> finer(Format(1e-3, "ms", 3), [0.0109, 0.0231])(0.0109)
        '10.9'
    """
    sizes = [abs(value) for value in values if math.isfinite(value) and value]
    least = min(sizes, default=form.factor)
    decimals = 2 - math.floor(math.log10(least / form.factor) + 1e-9)
    return dataclasses.replace(form, decimals=min(max(decimals, 0), 3))


def metric_format(tolerance: float, *, digits: int = 2) -> Format:
    """Returns the format of a metric, fine enough for the digits of its tolerance."""
    if not (math.isfinite(tolerance) and tolerance > 0):
        return Format(1.0, "", 4)
    decimals = max(digits - 1 - math.floor(math.log10(tolerance)), 0)
    return Format(1.0, "", decimals if decimals <= _MAX_DECIMALS else None)


def ratio(value: float) -> str:
    """Returns a ratio with three digits at least.

    Example:
        >>> ratio(1.9234), ratio(0.0513), ratio(123.4)
        ('1.92', '0.051', '123')
    """
    if not math.isfinite(value):
        return MISSING
    if value and abs(value) < 0.095:
        return f"{value:.3f}"
    return f"{value:.2f}" if abs(value) < 99.5 else f"{value:,.0f}"


def ends(found: Interval) -> str:
    """Returns the ends of a ratio's interval, "" where they are not known.

    Example:
        >>> ends(Interval(2.0, 1.9, 2.1)), ends(Interval(2.0, 0.0, math.inf))
        ('1.90 to 2.10', '')
    """
    if not is_known(found):
        return ""
    return f"{ratio(found.low)} to {ratio(found.high)}"


def is_known(found: Interval) -> bool:
    """States whether an interval has two ends: one seed gives none."""
    return all(map(math.isfinite, (found.estimate, found.low, found.high)))


def plain(text: str) -> str:
    """Returns a text with signs that any terminal can print.

    Example:
        >>> plain("1.92× in 3 µs")
        '1.92x in 3 us'
    """
    return text.translate(_PLAIN)
