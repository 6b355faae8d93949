"""What a comparison keeps of exports of its reference's trained model, as records."""

import dataclasses

from tfamp.records.record import Record
from tfamp.trials.intervals import Interval
from tfamp.trials.run_records import Latency

FILE = "exports.json"


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
    """The exports of a comparison that are done, as they lie in its folder.

    Args:
        models: In the order in which they were asked for.
    """

    models: tuple[ExportedModel, ...] = ()
