"""`Export`, what `tfamp.export` returns: what was written, what was tried."""

import dataclasses
from typing import Any

from tfamp.records import console
from tfamp.records.record import Record, TableRecord
from tfamp.records.units import format_bytes, format_seconds
from tfamp.serving.parity import Parity
from tfamp.serving.runtimes import load_exported
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.trials.run_records import Latency

_COLUMNS: dict[str, dict[str, Any]] = {
    "candidate": console.WHOLE,
    "size": console.RIGHT,
    "batch 1": console.RIGHT,
    "largest difference": console.RIGHT,
    "what became of it": console.FOLD,
}


@dataclasses.dataclass(frozen=True)
class Tried(Record):
    """A file that was written to see how good and how fast it is.

    Attributes:
        name: Format, dtype and scheme, such as "onnx int8 dynamic".
        outcome: "chosen", "passed", "failed" or "left out".
        reason: Why, in a sentence; "" where there is nothing to say.
        size_bytes: Of all its files.
        seconds: Of a batch of one, the median, measured in turns with the others.
        difference: The largest from float32, over the spread of the outputs.
    """

    name: str
    outcome: str
    reason: str = ""
    size_bytes: int | None = None
    seconds: float | None = None
    difference: float | None = None


@dataclasses.dataclass(frozen=True)
class Export(TableRecord):
    """A model that was exported; `str` is a table.

    Attributes:
        path: The folder.
        format: "saved_model", "litert", "onnx" or "openvino".
        dtype: "float32", "float16", "bfloat16" or "int8".
        scheme: "dynamic" or "static"; "" for floats.
        verdict: "as good and faster", "as good, not faster", "worse" or "undecided".
        difference: The largest difference of an output from the float32 model's, over
            the spread of that output in the batch that was tried.
        size_bytes: Of all files.
        float32_bytes: Of the model's weights in float32.
        kept: Layer that stays in float32 -> why.
        parity: The comparison on validation data; None without any.
        tried: All that was written to be compared.
        threads: Of a prediction, 1 where that was faster here; None for all cores.
    """

    path: str
    format: str
    dtype: str
    scheme: str
    verdict: str
    difference: float
    size_bytes: int
    float32_bytes: int
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    parity: Parity | None = None
    tried: tuple[Tried, ...] = ()
    threads: int | None = None

    @property
    def latency(self) -> tuple[Latency, ...]:
        """How long calls take, by batch size; empty without validation data."""
        return self.parity.latencies if self.parity else ()

    def load(self, *, threads: int | None = None) -> LoadedModel:
        """Returns the model, as `tfamp.load_exported` does."""
        return load_exported(self.path, threads=threads)

    def table(self) -> str:
        """Returns what was tried, what was written, and the verdict."""
        rows = [
            (
                each.name,
                "" if each.size_bytes is None else format_bytes(each.size_bytes),
                "" if each.seconds is None else format_seconds(each.seconds),
                "" if each.difference is None else f"{each.difference:.1e}",
                ": ".join(filter(None, (each.outcome, each.reason))),
            )
            for each in self.tried
        ]
        told = [
            f"{self.path}: {format_bytes(self.size_bytes)} for "
            f"{format_bytes(self.float32_bytes)} of float32 weights; {self.verdict}."
        ]
        told += [f"{path} stays in float32: {why}." for path, why in self.kept.items()]
        if self.threads is not None:
            told.append("One thread was faster here than all cores, and is taken.")
        if self.parity is None:
            told.append(
                "Only outputs were compared: pass `validation=(x, y)` for a verdict."
            )
        else:
            told.append(str(self.parity))
        return console.text_of(console.table(_COLUMNS, rows), *told)
