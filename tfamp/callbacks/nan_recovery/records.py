"""What a recovery was, and the report of all of them."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from tfamp.records.record import Record

JOURNAL = "recoveries.jsonl"
_COLUMNS = ("epoch", "step", "sign", "cause", "layer", "remedy", "back to step")


@dataclasses.dataclass(frozen=True)
class Recovery(Record):
    """One failure and what was done about it.

    Attributes:
        number: Counted from 1 in each `fit`.
        epoch: As `fit` counts them, from 0.
        step: Batches that were trained before, in this and resumed `fit`s.
        sign: How the failure showed, such as "loss is nan".
        cause: What the triage named, or "" without one.
        layer: The layer it named, or None.
        remedy: What was done, such as "drop batch" or "stop".
        detail: The numbers of the remedy, such as "0.1 -> 0.05".
        restored_step: Step of the snapshot that the model was put back to.
        seconds: What it took.
    """

    number: int
    epoch: int
    step: int
    sign: str
    cause: str = ""
    layer: str | None = None
    remedy: str = ""
    detail: str = ""
    restored_step: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        """Returns the recovery as a sentence."""
        because = f" (cause: {self.cause}" if self.cause else ""
        because += f", layer {self.layer!r})" if self.layer else ")" if because else ""
        detail = f" {self.detail}" if self.detail else ""
        return (
            f"Recovery {self.number} at epoch {self.epoch + 1}, step {self.step}: "
            f"{self.sign}{because}. Back to step {self.restored_step}; remedy: "
            f"{self.remedy}{detail}."
        )


def table(recoveries: Sequence[Recovery]) -> str:
    """Returns what was tried, a line each, in columns.

    Example:
        >>> print(table([Recovery(1, 0, 7, "loss is nan", remedy="drop batch")]))
        epoch  step  sign         cause  layer  remedy      back to step
        1      7     loss is nan  -      -      drop batch  0
    """
    rows = [_COLUMNS]
    for each in recoveries:
        remedy = f"{each.remedy} {each.detail}".rstrip()
        facts = (each.sign, each.cause or "-", each.layer or "-", remedy)
        numbers = (str(each.epoch + 1), str(each.step))
        rows.append((*numbers, *facts, str(each.restored_step)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def append(recovery: Recovery, directory: Path) -> None:
    """Adds a line of JSON to the folder's journal."""
    with open(directory / JOURNAL, "a", encoding="utf-8") as file:
        file.write(json.dumps(recovery.to_dict(), allow_nan=False) + "\n")


class RecoveryError(ArithmeticError):
    """Training was stopped, for no recovery was left that might help.

    The model holds the weights and optimizer state of its last good snapshot.

    Attributes:
        recoveries: What was tried.
    """

    def __init__(self, message: str, recoveries: Sequence[Recovery] = ()) -> None:
        super().__init__(message)
        self.recoveries = tuple(recoveries)
