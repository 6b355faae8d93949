"""A search for the batch size as text: the choice, the trials, and what to do."""

import textwrap
from typing import Any

from tfamp.records import console
from tfamp.records.units import format_bytes, format_rate, format_seconds, format_share

_WHY = {
    "memory": "a larger one does not fit",
    "time": "a larger one takes too long to try",
    "max_batch_size": "`max_batch_size` allows no more",
    "target_batch_size": "`target_batch_size` asks for no more",
    "data": "the data has no more examples",
}


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
