"""`check_parity`: whether an exported model is as good as float32, and faster."""

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
    FreshProcess,
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
_RECORD = "export.json"


def check_parity(
    reference: Any,
    candidate: LoadedModel,
    validation: Any,
    *,
    metric: Any = None,
    tolerance: float = 0.005,
    batch_size: int | None = None,
    baselines: Mapping[str, Any] | None = None,
    seconds: float = timings.SECONDS,
    fresh_process: bool = True,
) -> Parity:
    """Compares an exported model with the float32 one it came from.

    Both answer the same validation examples, so the bound on the metric's drop is
    paired: only examples that one of them gets right and the other wrong widen it.

    Args:
        reference: The Keras model, which computes in float32, or one that
            `tfamp.load_exported` gave.
        candidate: The exported model, loaded.
        validation: (x, y), a `tf.data.Dataset` of batches, or x alone. Without labels
            only the outputs are compared.
        metric: Name of a Keras metric, a loss, or a function of targets and outputs
            that returns a value for each example. None takes the accuracy where labels
            are classes, else the loss that `reference` was compiled with.
        tolerance: By how much the metric may be worse: in its own points for a rate
            such as an accuracy (0.005 is half a percent), as a part of float32's mean
            for a loss.
        batch_size: Timed beside batch 1; None takes that of the first validation batch.
        baselines: Further models to time against by name, such as the best float32
            export here; loaded ones, or functions of inputs.
        seconds: For timing, at both sizes together; 0 times nothing.
        fresh_process: Whether memory and cold start are measured, in a process for
            each loaded model.

    Returns:
        The comparison; `verdict` is "as good and faster", "as good, not faster",
        "worse" or "undecided". It is faster where it is so against all others at
        batch 1 or at `batch_size`, and slower than none at the other.

    Raises:
        ValueError: There are no examples, or the outputs of the two are others.

    Example:
        >>> import keras, numpy as np
        >>> from tfamp.serving.runtimes.signature import (
        ...     LoadedModel, Signature, TensorSpec)
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> class Same(LoadedModel):
        ...     runtime = "onnx"
        ...     def run(self, inputs):
        ...         return {"y": model(inputs["x"]).numpy()}
        >>> spec = Signature((TensorSpec("x", (None, 4), "float32"),),
        ...                  (TensorSpec("y", (None, 3), "float32"),))
        >>> x, y = np.ones((600, 4), "float32"), np.zeros(600, int)
        >>> parity = check_parity(model, Same(None, spec), (x, y), seconds=0)
        >>> parity.verdict, parity.flipped, round(parity.metrics[0].bound, 4)
        ('as good, not faster', 0, 0.005)
    """
    checks.fraction("tolerance", tolerance, closed=False)
    batches = _batches(validation, batch_size)
    names = [spec.name for spec in candidate.signature.outputs]
    exact = answers.outputs_of(reference, batches, names)
    exported = answers.outputs_of(candidate, batches, names)
    differences, metrics, notes = compared(
        reference, batches, exact, exported, metric, tolerance
    )
    inputs = batches[0][0]
    size = batch_size or len(tf.nest.flatten(inputs)[0])
    latencies: tuple[Latency, ...] = ()
    speedups: tuple[Speedup, ...] = ()
    if seconds:
        with timings.stock_calls(reference, inputs) as (others, left_out):
            others |= {n: _call_of(each) for n, each in (baselines or {}).items()}
            latencies, speedups, untimed = timings.measured(
                candidate.predict,
                others,
                inputs,
                sorted({1, size}),
                seconds=seconds,
            )
        notes += [*left_out, *untimed]
    processes: tuple[FreshProcess, ...] = ()
    if fresh_process:
        models = {candidate.runtime: candidate, **(baselines or {})}
        processes, failed = _in_fresh_processes(models, inputs)
        notes += failed
    verdict, reason = judged(differences, metrics, is_fast=is_faster(speedups))
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
        processes,
        size_of(candidate.path),
        _weight_bytes(reference),
        tuple(notes),
    )


def judged(
    differences: Sequence[OutputDifference],
    metrics: Sequence[MetricChange],
    *,
    is_fast: bool,
) -> tuple[Verdict, str]:
    """Returns the verdict, and why in a sentence.

    Args:
        differences: Of each output.
        metrics: Of each output that has one.
        is_fast: Whether it is faster than what it was timed against.
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


def _call_of(model: Any) -> Any:
    return model.predict if isinstance(model, LoadedModel) else model


def _in_fresh_processes(
    models: Mapping[str, Any], inputs: Any
) -> tuple[tuple[FreshProcess, ...], list[str]]:
    found, notes = [], []
    for name, model in models.items():
        if not isinstance(model, LoadedModel):
            continue
        if model.path is None or not Path(model.path, _RECORD).is_file():
            notes.append(f"No memory and cold start of {name}: it has no files.")
            continue
        one = model.prepared(timings.rows(inputs, 1))
        try:
            found.append(timings.in_fresh_process(model.path, one, name))
        except RuntimeError as error:
            notes.append(f"No memory and cold start of {name}: {error}")
    return tuple(found), notes


def _weight_bytes(model: Any) -> int | None:
    if isinstance(model, keras.Model):
        return int(structure.bytes_of(model.weights))
    return size_of(model.path) if isinstance(model, LoadedModel) else None
