"""A measurement of replicas as text for a terminal."""

from tfamp.comparison.replicas.records import Findings, ScalingPoint
from tfamp.records import console
from tfamp.records.units import format_bytes, format_seconds, format_share
from tfamp.trials.intervals import Interval

_MISSING = "-"


def table(found: Findings) -> str:
    """Returns figures, verdict and advice as text of at most 110 columns."""
    columns = {
        "scaling": console.WHOLE,
        "n": console.RIGHT,
        "batch": console.RIGHT,
        "step": console.RIGHT,
        "efficiency": console.RIGHT,
        "communication": console.RIGHT,
        "slowest": console.RIGHT,
        "input": console.RIGHT,
        "sent": console.RIGHT,
    }
    parts: list[object] = []
    if found.points:
        parts.append(console.table(columns, rows(found), title=title_of(found)))
    else:
        parts.append(title_of(found))
    parts.append(f"Verdict: {found.verdict}. {found.reason}")
    parts += [f"{i}. {line}" for i, line in enumerate(advice_of(found), 1)]
    parts += one_device_lines(found)
    parts += equality_lines(found)
    parts += [f"Note: {note}" for note in found.notes]
    return console.text_of(*parts)


def rows(found: Findings) -> list[tuple[str, ...]]:
    """Returns a row for one device and for each point; none where nothing was timed."""
    if not found.points:
        return []
    waits = found.one_device.input.possible_gain
    first = (
        *("one device", "1", f"{found.batch_size:,}", seconds_of(found)),
        *("1.00", _MISSING, _MISSING, format_share(waits), _MISSING),
    )
    weak, strong = found.of_mode("weak"), found.of_mode("strong")
    return [first, *map(_row, (*weak, *strong))]


def title_of(found: Findings) -> str:
    """Returns what was measured, in words."""
    devices = ", ".join(dict.fromkeys(found.devices))
    return f"{found.model}, {found.policy}, on {found.kind} ({devices})"


def seconds_of(found: Findings) -> str:
    """Returns the step of one device in words."""
    seconds = found.one_device.step_seconds
    return _MISSING if seconds is None else format_seconds(seconds)


def advice_of(found: Findings) -> list[str]:
    """Returns advice without numbers of its own."""
    return [line.lstrip("0123456789. ") for line in found.advice]


def one_device_lines(found: Findings) -> list[str]:
    """Returns what one device says."""
    one = found.one_device
    return [
        f"One device: {format_share(one.half_share_of_flops)} of the products in half "
        f"precision; the input: {one.input.verdict}, {one.input.reason}."
    ]


def equality_lines(found: Findings) -> list[str]:
    """Returns for each number of replicas whether its first steps are right."""
    words = {True: "equal", False: "NOT equal", None: "not known to be equal"}
    return [
        f"First {each.num_steps} steps of {each.replicas} replicas: "
        f"{words[each.is_equal]} to those of one device; "
        + ", ".join(
            f"{name} {distance:.1e} apart (rounding allows {each.tolerances[name]:.1e})"
            for name, distance in each.distances.items()
        )
        + "."
        for each in found.equality
    ]


def cells(point: ScalingPoint) -> tuple[str, ...]:
    """Returns the figures of a point, from the efficiency on."""
    slow = point.slow_worker_share
    return (
        f"{point.efficiency.estimate:.2f} "
        f"[{point.efficiency.low:.2f}, {point.efficiency.high:.2f}]",
        _share(point.communication_share),
        _MISSING if slow is None else _share(slow),
        format_share(point.input_share),
        _MISSING if point.sent_bytes is None else format_bytes(point.sent_bytes),
    )


def _row(point: ScalingPoint) -> tuple[str, ...]:
    return (
        *(point.mode, str(point.replicas), f"{point.batch_size:,}"),
        format_seconds(point.step_seconds),
        *cells(point),
    )


def _share(found: Interval) -> str:
    """Returns a share in percent with its interval.

    Example:
        >>> _share(Interval(0.4, 0.35, 0.45))
        '40 % [35, 45]'
    """
    return (
        f"{100 * found.estimate:.0f} % [{100 * found.low:.0f}, {100 * found.high:.0f}]"
    )
