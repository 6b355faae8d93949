"""What a range test of learning rates found."""

import dataclasses
import os
from typing import Any

from tfamp.records import checks, console
from tfamp.records import checks as _checks
from tfamp.records.record import Record


@dataclasses.dataclass(frozen=True)
class LearningRates(Record):
    """The losses of steps at growing learning rates.

    Args:
        model: The model's name.
        rates: Of each step.
        losses: Of each step's batch, before its update.
        smoothed: The same, averaged over the steps before.
        suggestion: Where the smoothed loss falls fastest; None where it never falls.
        highest: A tenth of the rate at which the loss was lowest; None as above.
        why_it_ended: "it diverged", "a loss is not finite" or "all rates were tried".
        why: What the suggestion rests on, in one sentence.
    """

    model: str
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None
    highest: float | None
    why_it_ended: str
    why: str

    def __str__(self) -> str:
        return f"{self.why}\n{self.table()}"

    def table(self, rows: int = 12) -> str:
        """Returns some of the steps as a table, evenly spread.

        Args:
            rows: How many at most.
        """
        _checks.positive_int("rows", rows)
        every = max(1, -(-len(self.rates) // rows))
        columns = (self.rates, self.losses, self.smoothed)
        shown = [
            (f"{rate:.3g}", f"{loss:.4g}", f"{smoothed:.4g}")
            for rate, loss, smoothed in list(zip(*columns, strict=True))[::every]
        ]
        names = ("learning rate", "loss", "smoothed")
        title = f"{self.model}: {len(self.rates)} steps, then {self.why_it_ended}"
        table = console.table(dict.fromkeys(names, console.RIGHT), shown, title=title)
        return console.text_of(table, width=100)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the losses against the rates, with the suggestion.

        Args:
            path: An image file; its ending says its kind.

        Raises:
            ImportError: matplotlib is not installed.
        """
        checks.require("matplotlib", extra="report", purpose="`LearningRates.plot`")
        from matplotlib.figure import Figure

        # Without pyplot, which keeps figures and picks a display.
        figure = Figure(figsize=(8.0, 4.5), layout="constrained")
        axes: Any = figure.subplots()
        axes.plot(self.rates, self.losses, color="#bbbbbb", label="loss of a batch")
        axes.plot(self.rates, self.smoothed, color="#4c78a8", label="smoothed")
        for rate, label, line in (
            (self.suggestion, "suggestion", "-"),
            (self.highest, "highest", ":"),
        ):
            if rate is not None:
                text = f"{label}: {rate:.2g}"
                axes.axvline(rate, color="#e45756", linestyle=line, label=text)
        axes.set_xscale("log")
        low, high = min(self.smoothed), max(self.smoothed[: len(self.rates) // 2 + 1])
        axes.set_ylim(low - 0.1 * (high - low), high + 0.3 * (high - low) + 1e-12)
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.set_title(f"{self.model}: range test of the learning rate")
        axes.legend()
        figure.savefig(path, dpi=120)
