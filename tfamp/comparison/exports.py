"""Exports of the reference's trained model to other runtimes, in a fresh process.

`python -m tfamp.comparison.exports FOLDER POLICY SEED TOLERANCE NAME...` is that
process: it builds model and data as a run does, takes the weights that the run left,
and adds a record of each export as it is done.
"""

import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

import tfamp
from tfamp.records.checks import short_error
from tfamp.records.record import Record
from tfamp.serving.exports.choosing import Export, advice
from tfamp.serving.exports.request import named
from tfamp.serving.exports.source import first_inputs
from tfamp.trials import child, processes, storage
from tfamp.trials.intervals import Interval
from tfamp.trials.processes import end_with_parent
from tfamp.trials.run_records import Latency, Run
from tfamp.trials.storage import FILE as JOB
from tfamp.trials.storage import Job
from tfamp.trials.variant import Variant, in_force

FILE = "exports.json"
# Why an export is missing that Ctrl-C ended; the comparison itself is done by then.
STOPPED = "stopped by Ctrl-C; `resume` does the rest"
_CHILD = "tfamp.comparison.exports"
# No float32 of runtimes that nobody asked for is written to be timed against.
_BUDGET_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class ExportedModel(Record):
    """A trained model that was exported, and compared with itself in float32.

    Args:
        name: Format, dtype and scheme, such as "onnx int8 dynamic".
        policy: What it was trained under.
        seed: Of that run.
        verdict: "as good and faster", "as good, not faster", "worse" or "undecided";
            "failed" where `error` says why it could not be exported.
        reason: Why, in a sentence or two.
        error: Why it could not be exported, "" if it could.
        metric: What it was judged by, "" where only outputs were compared.
        float32_metric: That of the model in float32.
        exported_metric: That of the exported one.
        worsening: By how much it is worse.
        bound: The true worsening is below, but for a chance of 5 %.
        num_examples: Examples that both answered.
        flipped: Predicted classes that are others than float32's.
        size_bytes: Of all its files.
        float32_bytes: Of the weights in float32.
        cold_start_seconds: From the start of a process to the first answer.
        peak_bytes: The most that this process held.
        latencies: At batch 1 and at the largest of the timed batches.
        speedups: "SavedModel, batch 1" -> its median seconds over the exported one's.
        kept: Layers of an integer export that stay in float32.
    """

    name: str
    policy: str
    seed: int
    verdict: str
    reason: str = ""
    error: str = ""
    metric: str = ""
    float32_metric: float | None = None
    exported_metric: float | None = None
    worsening: float | None = None
    bound: float | None = None
    num_examples: int = 0
    flipped: int = 0
    size_bytes: int | None = None
    float32_bytes: int | None = None
    cold_start_seconds: float | None = None
    peak_bytes: int | None = None
    latencies: tuple[Latency, ...] = ()
    speedups: dict[str, Interval] = dataclasses.field(default_factory=dict, hash=False)
    kept: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Exports(Record):
    """The exports of a comparison that are done, as they lie in its folder."""

    models: tuple[ExportedModel, ...] = ()


def checked_exports(names: Sequence[str] | str) -> tuple[str, ...]:
    """Returns different names of exports in full, of which all packages are here."""
    requests = [named(each) for each in ([names] if isinstance(names, str) else names)]
    found = tuple(request.name for request in requests)
    if len({*found}) < len(found):
        raise ValueError(
            f"`exports` is {found!r}; expected different ones. Name each once."
        )
    if lacking := advice([*dict.fromkeys(request.format for request in requests)]):
        raise ImportError(" ".join(lacking))
    return found


def exported(
    folder: Path,
    job: Job,
    reference: str,
    runs: Sequence[Run],
    names: Sequence[str],
    *,
    tolerance: float,
) -> tuple[ExportedModel, ...]:
    """Exports the reference's model of the first seed, and returns what came of it.

    Those that a comparison that goes on has done already are not done again. `names`
    are those of `checked_exports`; the metric may be worse by `tolerance`.
    """
    policy, seed = reference, job.seeds[0]
    is_there = any(
        (run.policy, run.seed) == (policy, seed) and run.is_finished for run in runs
    )
    if not names or not is_there:
        return ()
    path = folder / FILE
    done = Exports.from_json(path).models if path.is_file() else ()
    kept = {
        each.name: each
        for each in done
        if (each.policy, each.seed, each.error) == (policy, seed, "")
    }
    asked = [name for name in names if name not in kept]
    why = ""
    if asked and not storage.model_of(folder, policy, seed).is_file():
        why = "the trained model is not there any more; compare in another folder"
    elif asked:
        Exports(tuple(kept.values())).to_json(path)
        words = [str(folder), policy, str(seed), repr(tolerance), *asked]
        why = _run(words, folder / "exports.log")
        kept = {each.name: each for each in Exports.from_json(path).models}
    return tuple(
        kept.get(name) or ExportedModel(name, policy, seed, "failed", error=why)
        for name in names
    )


def _run(words: list[str], log: Path) -> str:
    """Runs the process that exports, and returns why it ended if not well."""
    process = processes.start(_CHILD, words, log)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        return STOPPED
    finally:
        processes.close_input(process)
        processes.end(process)
    last = processes.tail(log).splitlines()[-1:]
    return "" if not status else ": ".join([processes.why_ended(status), *last])


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
    for request in map(named, names):
        origin = (request.name, policy, seed)
        with tempfile.TemporaryDirectory(prefix="tfamp-compare-") as place:
            try:
                found = tfamp.export(
                    *(model, Path(place, "model")),
                    format=request.format,
                    dtype=request.dtype,
                    scheme=request.scheme or None,
                    calibration=train if request.scheme == "static" else None,
                    validation=data,
                    tolerance=tolerance,
                    batch_size=max(job.latency_batch_sizes, default=1),
                    budget_seconds=_BUDGET_SECONDS,
                    write_failed=True,
                )
            except Exception as error:  # noqa: BLE001 - converters raise anything
                own = ExportedModel(*origin, "failed", error=short_error(error))
            else:
                own = _record_of(found, *origin)
        done = Exports.from_json(folder / FILE).models
        Exports((*done, own)).to_json(folder / FILE)
    return 0


def _record_of(found: Export, name: str, policy: str, seed: int) -> ExportedModel:
    """Returns what a comparison keeps of an export."""
    parity = found.parity
    if parity is None:
        raise ValueError(f"{name} was not compared; expected validation data.")
    own = [each for each in parity.processes if each.name == parity.runtime]
    worst = max(parity.metrics, key=lambda each: each.bound, default=None)
    return ExportedModel(
        *(name, policy, seed, parity.verdict, parity.reason),
        metric="" if worst is None else worst.name,
        float32_metric=None if worst is None else worst.reference,
        exported_metric=None if worst is None else worst.exported,
        worsening=None if worst is None else worst.worsening,
        bound=None if worst is None else worst.bound,
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


if __name__ == "__main__":
    end_with_parent()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main(sys.argv[1:]))
