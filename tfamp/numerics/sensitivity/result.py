"""What `tfamp.sensitivity` found: the layers low precision would spoil, and why."""

import dataclasses
import math
from typing import Literal

from tfamp.records import console
from tfamp.records.record import Record, TableRecord

Verdict = Literal["safe", "layers", "loss scale", "amplification", "cannot run"]


@dataclasses.dataclass(frozen=True)
class LayerSensitivity(Record):
    """What low precision does to one layer alone.

    Args:
        path: The layer, or the operation of a Functional graph.
        class_name: Its class.
        forward_error: Error of its outputs relative to their spread over the batch, the
            worst over batches and calls; inf where numbers are not finite.
        backward_error: Error of its gradients relative to their size, at
            `loss_scale` of the whole.
        is_guilty: Whether it should stay in float32.
        reason: Why, in one word; "" if it need not.
        explanation: Why, in one sentence with the figures.
        rule: The default rule that keeps it in float32 under `tfamp.enable`, "its own
            dtype" where the layer was made with one, "" if none does.
    """

    path: str
    class_name: str
    forward_error: float
    backward_error: float
    is_guilty: bool = False
    reason: str = ""
    explanation: str = ""
    rule: str = ""


@dataclasses.dataclass(frozen=True)
class Sensitivity(TableRecord):
    """Which layers of a model low precision would spoil.

    Args:
        model: The model's name.
        dtype: The low precision.
        verdict: Without tfamp's rules: "safe" with a loss scale or without; "layers"
            where some should stay in float32; "loss scale" where only gradients suffer
            and a scale cures them, `loss_scale`; "amplification" where each layer is
            fine alone and the whole is not; "cannot run" where the step raises, by no
            layer of its own.
        layers: What was measured of each layer.
        loss_scale: The scale that gradients were judged at, the best that was tried.
        whole_error: Error of the gradients of the whole model in the low precision,
            guilty layers kept in float32; NaN if it cannot run so.
        num_batches: Batches that were looked at.
        num_evaluations: Steps of the whole model that were run.
        advice: What to do, in one sentence.
        errors_by_rules: Errors of the "gradients", "outputs" and "loss" of the whole
            model with what tfamp's default rules keep in float32, in place of the
            guilty layers; empty if it cannot run so.
    """

    model: str
    dtype: str
    verdict: Verdict
    layers: tuple[LayerSensitivity, ...]
    loss_scale: float
    whole_error: float
    num_batches: int
    num_evaluations: int
    advice: str
    errors_by_rules: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def guilty(self) -> dict[str, str]:
        """The layers that should stay in float32, each with the reason.

        Judged without tfamp's rules.
        """
        return {
            layer.path: f"{layer.reason}: {layer.explanation}"
            for layer in self.layers
            if layer.is_guilty
        }

    @property
    def left(self) -> dict[str, str]:
        """Those of `guilty` that no default rule keeps under `tfamp.enable`."""
        kept = {layer.path for layer in self.layers if layer.rule}
        return {path: why for path, why in self.guilty.items() if path not in kept}

    def table(self) -> str:
        """Returns verdict, advice and a line for each layer, at most 110 columns."""
        title = f"{self.model} in {self.dtype} without tfamp's rules: {self.verdict}"
        rows = []
        for layer in self.layers:
            because = f"{layer.reason}: {layer.explanation}" if layer.is_guilty else ""
            if because and layer.rule:
                because += f" Kept so already: {layer.rule}."
            row = (
                layer.path,
                layer.class_name,
                _error_text(layer.forward_error),
                _error_text(layer.backward_error),
                because,
            )
            rows.append(row)
        columns = {
            "layer": console.FOLD,
            "class": console.FOLD,
            "outputs": console.RIGHT,
            "gradients": console.RIGHT,
            "float32 because": {**console.FOLD, "ratio": 1},
        }
        return console.text_of(console.table(columns, rows, title=title), self.advice)


def _error_text(error: float) -> str:
    if math.isnan(error):
        return "-"
    return "not finite" if math.isinf(error) else f"{error:.2g}"
