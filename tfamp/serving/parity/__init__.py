"""The gate: an exported model against the float32 one it came from."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.records import checks
from tfamp.serving.parity import answers, timings
from tfamp.serving.parity.metrics import compared
from tfamp.serving.parity.result import (
    MetricChange,
    OutputDifference,
    Parity,
    Speedup,
    Verdict,
    is_faster,
    speed_text,
)
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.stepping.arguments import dataset_of
from tfamp.trials.run_records import Latency

_DEFAULT_BATCH = 32


@dataclasses.dataclass(frozen=True)
class Expected:
    """Validation examples, and what the float32 model answers to them, by batch."""

    batches: list[tuple[Any, Any]]
    outputs: list[answers.Outputs]


def expected(
    reference: keras.Model,
    validation: Any,
    names: Sequence[str],
    batch_size: int | None = None,
) -> Expected:
    """Returns what a float32 model answers to validation data, read and predicted once.

    Args:
        reference: Computes in float32.
        validation: As for `check_parity`.
        names: Of its outputs.
        batch_size: Of arrays; None takes 32.

    Raises:
        ValueError: There are no examples.
    """
    batches = _batches(validation, batch_size)
    return Expected(batches, answers.outputs_of(reference, batches, names))


def check_parity(
    reference: keras.Model,
    candidate: LoadedModel,
    validation: Any,
    *,
    metric: Any = None,
    tolerance: float = 0.005,
    batch_size: int | None = None,
    baselines: Mapping[str, LoadedModel] | None = None,
    seconds: float = timings.SECONDS,
    known: Expected | None = None,
) -> Parity:
    """Compares an exported model with the float32 one it came from.

    Both answer the same validation examples, so the bound on the metric's drop is
    paired: only examples that one of them gets right and the other wrong widen it.

    Args:
        reference: Computes in float32.
        candidate: The exported model.
        validation: (x, y), a `tf.data.Dataset` of batches, or x alone. Without labels
            only the outputs are compared.
        metric: Name of a Keras metric, a loss, or a function of targets and outputs
            that returns a value for each example. None takes the accuracy where labels
            are classes, else the loss that `reference` was compiled with.
        tolerance: By how much the metric may be worse: in its own points for a rate
            such as an accuracy (0.005 is half a percent), as a part of float32's mean
            for a loss.
        batch_size: Timed beside batch 1; None takes that of the first validation batch.
        baselines: Further models to time against, such as the best float32 export.
        seconds: For timing, at both sizes together; 0 measures no speed.
        known: What `expected` gave, where several candidates are compared.

    Returns:
        The comparison. It is faster where it is so against all others at batch 1 or at
        `batch_size`, and slower than none at the other.

    Raises:
        ValueError: There are no examples, or the outputs of the two are others.
    """
    checks.fraction("tolerance", tolerance, closed=False)
    names = [spec.name for spec in candidate.signature.outputs]
    if known is None:
        known = expected(reference, validation, names, batch_size)
    batches = known.batches
    differences, metrics, notes, untold = compared(
        *(reference, batches, known.outputs),
        answers.outputs_of(candidate, batches, names),
        *(metric, tolerance),
    )
    inputs = batches[0][0]
    size = batch_size or len(tf.nest.flatten(inputs)[0])
    latencies: tuple[Latency, ...] = ()
    speedups: tuple[Speedup, ...] = ()
    if seconds:
        with timings.stock_calls(reference, inputs) as (others, left_out):
            others.update(baselines or {})
            latencies, speedups, untimed = timings.measured(
                candidate, others, inputs, sorted({1, size}), seconds=seconds
            )
        notes += [*left_out, *untimed]
    verdict, reason = judged(
        differences, metrics, is_fast=is_faster(speedups), untold=untold
    )
    reason = " ".join(filter(None, (reason, speed_text(speedups))))
    return Parity(
        verdict,
        reason,
        candidate.runtime,
        sum(len(tf.nest.flatten(x)[0]) for x, _ in batches),
        tuple(differences),
        tuple(metrics),
        latencies,
        speedups,
        (),
        size_of(candidate.path),
        int(structure.bytes_of(reference.weights)),
        tuple(notes),
    )


def judged(
    differences: Sequence[OutputDifference],
    metrics: Sequence[MetricChange],
    *,
    is_fast: bool,
    untold: Sequence[str] = (),
) -> tuple[Verdict, str]:
    """Returns the verdict of all outputs together, and why in a sentence.

    Args:
        differences: Of each output.
        metrics: Of each output.
        is_fast: Whether it is faster than what it was timed against.
        untold: Why labels tell nothing, of outputs of which that is so: by them nothing
            is "as good", and only outputs that are far off show it to be "worse".
    """
    broken = [d.name for d in differences if not np.isfinite(d.relative)]
    if broken:
        return "worse", (
            f"Outputs {tuple(broken)!r} hold numbers that are not finite, which are so "
            "in float32, or that differ where float32's are all alike."
        )
    for found in metrics:
        if found.fails:
            return "worse", (
                f"The {found.name} of {found.output!r} is worse by "
                f"{found.worsening:.3%}, and by more than {found.low:.3%} with "
                f"certainty; allowed are {found.tolerance:.3%}."
            )
    if untold:
        return "undecided", " ".join(untold)
    open_ones = [each for each in metrics if not each.holds]
    if open_ones:
        return "undecided", _undecided(open_ones)
    how = "and faster" if is_fast else "not faster"
    verdict: Verdict = "as good and faster" if is_fast else "as good, not faster"
    bounds = ", ".join(f"{each.name} at most {each.bound:.3%}" for each in metrics)
    return verdict, f"It is as good, {how}: worse in {bounds}."


def size_of(path: Any) -> int | None:
    """Returns the bytes of a file or of all files in a folder; None without any."""
    if path is None or not Path(path).exists():
        return None
    where = Path(path)
    files = [where] if where.is_file() else where.rglob("*")
    return sum(each.stat().st_size for each in files if each.is_file())


def _batches(validation: Any, batch_size: int | None) -> list[tuple[Any, Any]]:
    dataset = dataset_of(
        validation,
        batch_size or _DEFAULT_BATCH,
        needs_targets=False,
        name="validation",
    )
    found = answers.batches_of(dataset)
    if not found:
        raise ValueError(
            "`validation` holds no batches; expected at least one. Look at its source: "
            "a wrong path, split or filter leaves nothing."
        )
    return found


def _undecided(metrics: Sequence[MetricChange]) -> str:
    found = max(metrics, key=lambda each: each.bound)
    text = (
        f"The {found.name} of {found.output!r} is worse by {found.worsening:.3%}, at "
        f"most {found.bound:.3%} on {found.num_examples} examples; allowed are "
        f"{found.tolerance:.3%}."
    )
    if found.num_needed is not None:
        return f"{text} It needs {found.num_needed} examples, if the others are alike."
    return f"{text} Pass labels, a metric, or another tolerance."
