"""What `tfamp.triage` found: why a step failed, where, and what to do."""

import dataclasses
from typing import Any, Literal

from tfamp.records import checks, console
from tfamp.records.record import Record, TableRecord

Blamed = Literal[
    "data", "model", "learning rate", "optimizer", "loss scale", "precision", "none"
]


@dataclasses.dataclass(frozen=True)
class Replay(Record):
    """One replay of the step.

    Args:
        name: What it ran in, such as "mixed_float16, loss scale 32768".
        is_finite: Whether loss and gradients were finite.
        loss: The loss without a scale; None where the step passed none to the
            optimizer.
        where: The first layer that made a number that is not finite from finite ones,
            None if there is none.
        on_the_way: Whether that was "forward", "backward", or in the "loss"; "" if
            nowhere.
    """

    name: str
    is_finite: bool
    loss: float | None
    where: str | None = None
    on_the_way: Literal["", "forward", "backward", "loss"] = ""


@dataclasses.dataclass(frozen=True)
class Triage(TableRecord):
    """Why a step failed.

    Args:
        model: The model's name.
        cause: What is to blame; "none" where nothing is wrong with the step.
        layer: The first layer that made a bad number of good ones, forward or backward;
            None where no layer did.
        evidence: What speaks for it, one sentence each, with the figures.
        remedy: What to do, in one sentence.
        layers: All layers the remedy is about.
        replays: The step as it was replayed.
        source: File and line of the layer's `call`, where it is the user's own.
        rate_factor: What to multiply the learning rate by: a tenth of the largest power
            of ten at which one update does not raise the loss; None where that was not
            tried.
        loss_scale: A loss scale at which the step is finite; None where the scale is
            not to blame.
    """

    model: str
    cause: Blamed
    layer: str | None
    evidence: tuple[str, ...]
    remedy: str
    layers: tuple[str, ...] = ()
    replays: tuple[Replay, ...] = ()
    source: str = ""
    rate_factor: float | None = None
    loss_scale: float | None = None

    @property
    def documentation(self) -> str:
        """Where it is explained how this cause is told from others."""
        return checks.address(f"triage#cause-{self.cause.replace(' ', '-')}")

    def table(self) -> str:
        """Returns cause, evidence, remedy and replays, at most 110 columns wide."""
        place = "" if self.layer is None else f", layer {self.layer!r}"
        source = f" ({self.source})" if self.source else ""
        parts: list[Any] = [
            f"{self.model}: the cause is {self.cause}{place}{source}",
            *(f"  - {sentence}" for sentence in self.evidence),
            f"Remedy: {self.remedy}",
            f"See {self.documentation}",
        ]
        rows = []
        for replay in self.replays:
            where = replay.on_the_way and f"{replay.on_the_way}: {replay.where or '-'}"
            loss = "-" if replay.loss is None else f"{replay.loss:.6g}"
            rows.append((replay.name, loss, "yes" if replay.is_finite else "no", where))
        if rows:
            names = ("in", "loss", "finite", "first bad number")
            columns = dict.fromkeys(names, console.FOLD)
            parts.append(console.table(columns, rows, title="Replayed"))
        return console.text_of(*parts)
