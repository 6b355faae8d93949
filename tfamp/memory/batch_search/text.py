"""A search for the batch size as text and picture: choice, trials, advice."""

import os
import textwrap
from typing import Any

from tfamp.records import checks, console
from tfamp.records.units import format_bytes, format_rate, format_seconds, format_share

_BLUE, _RED, _GREEN, _GREY = "#4c78a8", "#e45756", "#54a24b", "#888888"
_GIB = 2**30
_WHY = {
    "memory": "a larger one does not fit",
    "time": "a larger one takes too long to try",
    "max_batch_size": "`max_batch_size` allows no more",
    "target_batch_size": "`target_batch_size` asks for no more",
    "data": "the data has no more examples",
}


def plot(found: Any, path: str | os.PathLike[str]) -> None:
    """Draws two panels, one below the other: examples/s, and peak memory.

    Raises:
        ImportError: matplotlib is not installed.
    """
    checks.require("matplotlib", extra="report", purpose="`BatchSearch.plot`")
    from matplotlib.figure import Figure

    # Without pyplot, which keeps figures and picks a display.
    figure = Figure(figsize=(8.0, 6.5), layout="constrained")
    speed, memory = figure.subplots(2, 1, sharex=True)
    _draw_speed(speed, found)
    _draw_memory(memory, found)
    sizes = sorted({trial.batch_size for trial in found.trials})
    memory.set_xscale("log", base=2)
    memory.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
    memory.minorticks_off()
    memory.set_xlabel("batch size")
    for axes in (speed, memory):
        axes.axvline(
            found.batch_size,
            color=_GREEN,
            label=f"chosen: {found.batch_size:,} (ended by {found.stopped_by})",
        )
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small", loc="lower right")
    title = f"{found.model}, {found.policy}"
    if found.accumulation_steps > 1:
        title += f": {found.accumulation_steps} steps of {found.batch_size:,} an update"
    speed.set_title(title, loc="left")
    figure.savefig(path, dpi=120)


def _draw_speed(axes: Any, found: Any) -> None:
    points = sorted(
        (trial.batch_size, trial.examples_per_second)
        for trial in found.trials
        if trial.fits and trial.examples_per_second is not None
    )
    sizes, speeds = zip(*points, strict=True)
    axes.plot(sizes, speeds, color=_BLUE, marker="o", label="examples/s")
    if found.min_gain is not None:
        # Whatever lies above it is as good as the best.
        axes.axhline(
            (1 - found.min_gain) * max(speeds),
            color=_GREY,
            linestyle=":",
            label=f"within {found.min_gain:.0%} of the best",
        )
    axes.set_ylabel("examples/s")


def _draw_memory(axes: Any, found: Any) -> None:
    known = sorted(
        (trial.batch_size, trial.peak_bytes / _GIB, trial.fits)
        for trial in found.trials
        if trial.peak_bytes is not None
    )
    fitting = [(size, peak) for size, peak, fits in known if fits]
    axes.plot(*zip(*fitting, strict=True), color=_BLUE, marker="o", label="peak memory")
    allowed = found.allowed_bytes
    highest = max(peak for _, peak in fitting)
    is_over = any(trial.outcome == "over the limit" for trial in found.trials)
    # A limit far above all that was held would press the curve flat.
    if allowed is not None and (is_over or allowed / _GIB < 4 * highest):
        highest = allowed / _GIB
        axes.axhline(
            found.limit.free_bytes / _GIB,
            color=_RED,
            linestyle=":",
            label=f"limit: {found.limit.source}",
        )
        axes.axhline(
            highest, color=_RED, linestyle="--", label=f"less {found.margin:.0%} margin"
        )
    # A trial that was ended had no peak yet: it stands at the limit.
    failed = sorted({trial.batch_size for trial in found.trials if not trial.fits})
    if failed:
        axes.plot(
            failed,
            [highest] * len(failed),
            color=_RED,
            marker="x",
            linestyle="",
            label="does not fit",
        )
    axes.set_ylabel("peak memory in GiB")


def render(found: Any) -> str:
    """Returns what a `BatchSearch` chose and why, the trials, and the advice."""
    lines = [*_wrapped(_choice(found)), found.table()]
    for sentence in found.advice:
        lines += _wrapped(f"- {sentence}", indent=2)
    return "\n".join(lines)


def table(found: Any) -> str:
    """Returns a row for each trial, by batch size."""
    limit = ""
    if found.limit is not None and found.allowed_bytes is not None:
        limit = (
            f"; limit {format_bytes(found.allowed_bytes)}: {found.limit.source}, "
            f"{format_bytes(found.limit.free_bytes)} less {format_share(found.margin)}"
        )
    columns = dict.fromkeys(
        ("batch size", "examples/s", "step", "peak memory"), console.RIGHT
    )
    trials = sorted(found.trials, key=lambda trial: trial.batch_size)
    rows = [_row(trial, found) for trial in trials]
    shown = console.table({**columns, "outcome": console.FOLD}, rows)
    title = _wrapped(f"{found.model}, {found.policy}{limit}")
    return "\n".join([*title, console.text_of(shown)])


def advice(found: Any) -> tuple[str, ...]:
    """Returns what to change in the training script."""
    lines = [f"Make batches of {_batches(found)}, as by `.batch({found.batch_size})`."]
    steps, effective = found.accumulation_steps, found.effective_batch_size
    if steps > 1:
        keras_way = (
            f", or Keras's own `gradient_accumulation_steps={steps}`"
            if found.replicas == 1
            else ""
        )
        lines.append(
            f"Add up {steps} of them to one update of {effective:,} examples: "
            f"`tfamp.LossScaleOptimizer(optimizer, accumulation_steps={steps})`"
            f"{keras_way}."
        )
    if found.target_batch_size not in (None, effective):
        lines.append(
            f"An update then has {effective:,} examples, not "
            f"{found.target_batch_size:,}: no batch that fits goes into that evenly."
        )
    base = found.data_batch_size
    if base is not None and base != effective:
        lines.append(
            f"The learning rate belongs to updates of {base:,} examples. Take "
            f"`tfamp.training.scale_learning_rate(learning_rate, batch_size={effective}"
            f', base_batch_size={base})`, with `rule="sqrt"` for Adam.'
        )
    return tuple(lines)


def _choice(found: Any) -> str:
    chosen = found.chosen
    words = [f"Batch size {_batches(found)}"]
    if found.accumulation_steps > 1:
        words.append(f" in {found.accumulation_steps} steps an update")
    words.append(f": {format_rate(chosen.examples_per_second or 0.0)}")
    if chosen.peak_bytes is not None:
        words.append(f", peak {format_bytes(chosen.peak_bytes)}")
    fitting = [trial for trial in found.trials if trial.fits]
    most = max(trial.batch_size for trial in fitting)
    if found.stopped_by == "knee":
        why = f"doubling it gains less than {format_share(found.min_gain)}"
    elif found.batch_size < most and not found.target_batch_size:
        why = (
            f"of those up to {most:,} none is more than "
            f"{format_share(found.min_gain)} faster"
        )
    else:
        why = _WHY[found.stopped_by]
    return "".join(words) + f"; {why}."


def _batches(found: Any) -> str:
    if found.replicas == 1:
        return f"{found.batch_size:,}"
    return (
        f"{found.batch_size:,} ({found.per_replica_batch_size:,} on each of "
        f"{found.replicas} replicas)"
    )


def _row(trial: Any, found: Any) -> tuple[str, ...]:
    outcome: str = trial.outcome
    if trial is found.chosen:
        outcome = "fits, chosen"
    elif trial.batch_size == found.largest_that_fits:
        outcome = "fits, the largest"
    if trial.num_runs > 1:
        outcome += f" ({trial.num_runs} runs)"
    speed, step = trial.examples_per_second, trial.step_seconds
    return (
        f"{trial.batch_size:,}",
        "" if speed is None else format_rate(speed).removesuffix(" examples/s"),
        "" if step is None else format_seconds(step),
        "" if trial.peak_bytes is None else format_bytes(trial.peak_bytes),
        outcome,
    )


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text, console.WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False
    )
