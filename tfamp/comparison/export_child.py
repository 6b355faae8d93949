"""The process that exports: `python -m ... FOLDER POLICY SEED TOLERANCE NAME...`.

It builds model and data as a run does, takes the weights that the run left, and adds a
record of each export as it is done.
"""

import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfamp
from tfamp.comparison.exported_models import FILE, ExportedModel, Exports
from tfamp.records.checks import short_error
from tfamp.serving.exports.record import Export
from tfamp.serving.exports.request import Request, named
from tfamp.serving.exports.samples import first_inputs
from tfamp.trials import storage
from tfamp.trials.job import FILE as JOB
from tfamp.trials.job import Job
from tfamp.trials.run import child
from tfamp.trials.turns import end_with_parent
from tfamp.trials.variant import Variant, in_force

# No float32 of runtimes that nobody asked for is written to be timed against.
_BUDGET_SECONDS = 1.0


def main(arguments: Sequence[str]) -> int:
    """Exports to each of the names."""
    folder, policy, seed = Path(arguments[0]), arguments[1], int(arguments[2])
    tolerance, names = float(arguments[3]), arguments[4:]
    job = Job.from_json(folder / JOB)
    variant = Variant.parse(policy)
    with in_force(variant):
        model, train, validation = child.build(folder, job, variant, seed)
        data = train if validation is None else validation
        if not model.built:
            model(tf.nest.map_structure(tf.convert_to_tensor, first_inputs(data)))
        model.load_weights(storage.model_of(folder, policy, seed))
    for name in names:
        found = measured(
            model,
            named(name),
            data,
            calibration=train,
            tolerance=tolerance,
            batch_size=max(job.latency_batch_sizes, default=1),
        )
        done = Exports.from_json(folder / FILE).models
        own = dataclasses.replace(found, policy=policy, seed=seed)
        Exports((*done, own)).to_json(folder / FILE)
    return 0


def measured(
    model: keras.Model,
    request: Request,
    data: Any,
    *,
    calibration: Any,
    tolerance: float,
    batch_size: int,
) -> ExportedModel:
    """Returns what came of one export, under no policy and seed yet."""
    with tempfile.TemporaryDirectory(prefix="tfamp-compare-") as folder:
        try:
            found = tfamp.export(
                *(model, Path(folder, "model")),
                format=request.format,
                dtype=request.dtype,
                scheme=request.scheme or None,
                calibration=calibration if request.scheme == "static" else None,
                validation=data,
                tolerance=tolerance,
                batch_size=batch_size,
                budget_seconds=_BUDGET_SECONDS,
                write_failed=True,
            )
        except Exception as error:  # noqa: BLE001 - converters raise anything
            return ExportedModel(
                request.name, "", 0, verdict="failed", error=short_error(error)
            )
    return record_of(request.name, found)


def record_of(name: str, found: Export) -> ExportedModel:
    """Returns what a comparison keeps of an export."""
    parity = found.parity
    if parity is None:
        raise ValueError(f"{name} was not compared; expected validation data.")
    own = [each for each in parity.processes if each.name == parity.runtime]
    record = ExportedModel(
        *(name, "", 0, parity.verdict, parity.reason),
        num_examples=parity.num_examples,
        flipped=parity.flipped,
        size_bytes=found.size_bytes,
        float32_bytes=found.float32_bytes,
        cold_start_seconds=own[0].cold_start_seconds if own else None,
        peak_bytes=own[0].peak_bytes if own else None,
        latencies=parity.latencies,
        speedups={
            f"{each.against}, batch {each.batch_size}": each.p50
            for each in parity.speedups
        },
        kept=tuple(found.kept),
    )
    if not parity.metrics:
        return record
    worst = max(parity.metrics, key=lambda each: each.bound)
    return dataclasses.replace(
        record,
        metric=worst.name,
        float32_metric=worst.reference,
        exported_metric=worst.exported,
        worsening=worst.worsening,
        bound=worst.bound,
    )


if __name__ == "__main__":
    end_with_parent()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main(sys.argv[1:]))
