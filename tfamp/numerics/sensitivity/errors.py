"""How far low precision is off, and the record of what `tfamp.sensitivity` found."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics.passes import Ran
from tfamp.records import console
from tfamp.records.record import Record, TableRecord

# A spread of less than this part of the magnitude is that of a constant.
_CONSTANT = 1e-6
# Errors that are no worse: so many times what is there anyway, or too small to see.
_NO_WORSE, _NOTICEABLE = 1.5, 0.01

Verdict = Literal["safe", "layers", "loss scale", "amplification", "cannot run"]
# The "gradients", "outputs" and "loss" of a step, and each layer's gradients by path.
Errors = dict[str, float]


def deviation(values: np.ndarray) -> float:
    """Returns how much numbers of shape (batch, ...) differ over the batch.

    That root mean square is what the next layers learn from: of values around 1000 that
    differ by 1 an error of 1 is all of it. Where nothing differs, or there is one
    example, it is the magnitude.
    """
    magnitude = _rms(values)
    if values.ndim < 1 or len(values) < 2:
        return magnitude
    around = _rms(values - values.mean(axis=0))
    return around if around > _CONSTANT * magnitude else magnitude


def forward_error(low: np.ndarray, exact: np.ndarray) -> float:
    """Returns the error of outputs relative to their spread over the batch.

    inf where a number is not finite that is so in float32, 0 where nothing is wrong;
    numbers that are not finite in float32 either are left out.

    Example:
        >>> exact = np.array([[999.0], [1001.0]])
        >>> forward_error(exact + 0.5, exact), forward_error(exact * np.inf, exact)
        (0.5, inf)
    """
    low, exact = low.astype(np.float64), exact.astype(np.float64)
    usable = np.isfinite(exact)
    if not np.isfinite(low[usable]).all():
        return math.inf
    if not usable.all():
        low, exact = np.where(usable, low, 0.0), np.where(usable, exact, 0.0)
    scale = deviation(exact)
    # Against outputs that are all 0 nothing can be said to be large.
    return _rms(low - exact) / scale if scale else 0.0


def gradient_error(
    low: Sequence[np.ndarray | None], exact: Sequence[np.ndarray | None]
) -> float:
    """Returns the error of a layer's gradients, all of them together.

    One that is 0 by its nature, such as that of a bias ahead of a normalization, is
    noise on both sides and counts for nothing beside the others.
    """
    pairs = [
        (a.astype(np.float64), b.astype(np.float64))
        for a, b in zip(low, exact, strict=True)
        if a is not None and b is not None and np.isfinite(b).all()
    ]
    if not all(np.isfinite(a).all() for a, _ in pairs):
        return math.inf
    error = sum(float(np.square(a - b).sum()) for a, b in pairs)
    size = sum(float(np.square(b).sum()) for _, b in pairs)
    return math.sqrt(error / size) if size else 0.0


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def errors_of(model: keras.Model, low: Ran, exact: Ran) -> Errors:
    """Returns how far a step of the whole model is off."""
    found = {id(variable): gradient for variable, gradient in low.step.gradients}
    pairs = {
        id(variable): (_array(found.get(id(variable))), _array(gradient))
        for variable, gradient in exact.step.gradients
    }
    errors = {
        "gradients": gradient_error(*_sides(list(pairs.values()))),
        "outputs": max(map(forward_error, low.outputs, exact.outputs), default=0.0),
        "loss": 0.0,
    }
    if low.step.loss is not None and exact.step.loss is not None:
        losses = (np.asarray(ran.step.loss) for ran in (low, exact))
        errors["loss"] = forward_error(*losses)
    for path, layer, _ in structure.walk(model):
        own = [pairs[id(w)] for w in structure.own_weights(layer) if id(w) in pairs]
        if own:
            errors[f"layer {path}"] = gradient_error(*_sides(own))
    return errors


def is_no_worse(
    these: Errors, than: Errors, *, forward: float, backward: float
) -> bool:
    """States whether a step does as well as one with a layer more in float32.

    A layer with a small part of the gradients may be wholly wrong, so it counts by its
    own, and by what the model gives. Errors of outputs and loss up to `forward`, and of
    a layer's gradients up to `backward`, do no harm.
    """
    limits = {"outputs": forward, "loss": forward}
    limits["gradients"] = than["gradients"] + _NOTICEABLE
    return all(
        error <= max(_NO_WORSE * than.get(name, 0.0), limits.get(name, backward))
        for name, error in these.items()
    )


def _sides(pairs: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [a for a, _ in pairs], [b for _, b in pairs]


def _array(gradient: Any) -> np.ndarray | None:
    return None if gradient is None else np.asarray(tf.convert_to_tensor(gradient))


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
    """

    path: str
    class_name: str
    forward_error: float
    backward_error: float
    is_guilty: bool = False
    reason: str = ""
    explanation: str = ""


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
        loss_scale: The scale that gradients were judged at: tfamp's first one, or that
            of `tfamp.ranges` where that is better.
        whole_error: Error of the gradients of the whole model in the low precision,
            guilty layers kept in float32; NaN if it cannot run so.
        num_batches: Batches that were looked at.
        advice: What to do, in one sentence.
    """

    model: str
    dtype: str
    verdict: Verdict
    layers: tuple[LayerSensitivity, ...]
    loss_scale: float
    whole_error: float
    num_batches: int
    advice: str

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

    def table(self) -> str:
        """Returns verdict, advice and a line for each layer, at most 110 columns."""
        title = f"{self.model} in {self.dtype} without tfamp's rules: {self.verdict}"
        rows = []
        for layer in self.layers:
            because = self.guilty.get(layer.path, "")
            errors = (layer.forward_error, layer.backward_error)
            texts = ("not finite" if math.isinf(e) else f"{e:.2g}" for e in errors)
            rows.append((layer.path, layer.class_name, *texts, because))
        columns = {
            "layer": console.FOLD,
            "class": console.FOLD,
            "outputs": console.RIGHT,
            "gradients": console.RIGHT,
            "float32 because": {**console.FOLD, "ratio": 1},
        }
        return console.text_of(console.table(columns, rows, title=title), self.advice)
