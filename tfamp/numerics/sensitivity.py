"""`tfamp.sensitivity`: finds the layers that low precision would spoil."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, Literal

import keras
import numpy as np

from tfamp.keras_hooks import structure
from tfamp.machine import cpus
from tfamp.numerics.magnitudes import tallied
from tfamp.numerics.passes import (
    CANNOT_RUN,
    Ran,
    Recording,
    Suspect,
    array_of,
    batches_of,
    exactly,
    forward_error,
    gradient_error,
    name_layers,
    record,
    rerun,
    run,
)
from tfamp.records import checks, console
from tfamp.records.checks import first_line
from tfamp.records.formats import FORMATS, HALF, Format, needs_loss_scale
from tfamp.records.record import Record, TableRecord
from tfamp.stepping.eager_step import Site
from tfamp.stepping.layer_calls import (
    adding_in_float32,
    as_islands,
    computing_in,
    giving_unrounded,
    how_to_keep,
    is_layer,
    set_state,
)
from tfamp.stepping.unchanged import seeds_put_back

# Errors above which a layer is guilty: of outputs relative to their spread over the
# batch, of gradients relative to their size.
FORWARD_LIMIT = {"float16": 0.1, "bfloat16": 0.25}
BACKWARD_LIMIT = {"float16": 0.25, "bfloat16": 0.4}
# Guilty layers that are verified by leaving them low, at most: each takes a step of the
# whole model for each batch.
_MAX_VERIFIED = 12
# Error of all gradients above which a model is not the same one in low precision: known
# models stay below 0.05, what amplifies rounding is above 0.87.
WHOLE_LIMIT = {"float16": 0.3, "bfloat16": 0.5}
# Errors that are no worse: so many times what is there anyway, or too small to see.
_NO_WORSE, _NOTICEABLE = 1.5, 0.01
# tfamp's first loss scale.
_FIRST_SCALE = 2.0**15

Verdict = Literal["safe", "layers", "loss scale", "amplification", "cannot run"]
# The "gradients", "outputs" and "loss" of a step, and each layer's gradients by path.
Errors = dict[str, float]


@dataclasses.dataclass(frozen=True)
class LayerSensitivity(Record):
    """What low precision does to one layer, or operation of a Functional graph, alone.

    `forward_error` is that of its outputs relative to their spread over the batch, inf
    where numbers are not finite, `backward_error` that of its gradients relative to
    their size; the worst over batches and calls. `reason` is one word, `explanation` a
    sentence with the figures, why it should stay in float32.
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

    The `verdict`, without tfamp's rules: "safe" with a loss scale or without; "layers"
    where some should stay in float32; "loss scale" where only gradients suffer and
    `loss_scale` cures them; "amplification" where each layer is fine alone and the
    whole is not; "cannot run" where the step raises. `whole_error` is that of the
    model's gradients with guilty layers in float32, NaN where it cannot run so.
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
        """The layers that should stay in float32, each with the reason."""
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
            errors = (layer.forward_error, layer.backward_error)
            texts = ("not finite" if math.isinf(e) else f"{e:.2g}" for e in errors)
            because = self.guilty.get(layer.path, "")
            rows.append((layer.path, layer.class_name, *texts, because))
        names = ("layer", "class", "outputs", "gradients", "float32 because")
        fold, right = console.FOLD, console.RIGHT
        how = (fold, fold, right, right, {**fold, "ratio": 1})
        columns = dict(zip(names, how, strict=True))
        return console.text_of(console.table(columns, rows, title=title), self.advice)


def sensitivity(
    model: keras.Model,
    data: Any,
    *,
    dtype: str = "float16",
    num_batches: int = 3,
    batch_size: int = 32,
) -> Sensitivity:
    """Finds the layers that should stay in float32, in a pass over a few batches.

    Each layer, and each operation of a Functional graph, runs again alone in the low
    precision, forward and backward, on the inputs and gradients it had in a float32
    step. Verdict and guilt are without tfamp's rules; `tfamp.check` tells what those
    keep already. The model is afterwards what it was.

    Args:
        model: A compiled model, written in whatever way.
        data: What `fit` takes: batches in a dataset or generator, or arrays (x, y).
        dtype: "float16" or "bfloat16".
        num_batches: How many batches to look at.
        batch_size: Examples in a batch of arrays.

    Raises:
        TypeError: `model` is not a compiled Keras model, or `data` not of these.
        ValueError: The data is empty, or the model is not finite in float32.

    Example:
        >>> keras.utils.set_random_seed(0)
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.float32([[1, 2], [3, 4]])
        >>> sensitivity(model, (x, x[:, :1])).verdict
        'safe'
    """
    checks.choice("dtype", dtype, HALF)
    cpus.avoid_broken_amx()
    with seeds_put_back():
        batches = batches_of(model, data, num_batches, batch_size)
        with exactly(model) as sites:
            recordings = [record(model, sites, batch) for batch in batches]
            return Search(model, sites, recordings, dtype).run()


class Search:
    """The search for guilty layers among sites, after recordings inside `exactly`."""

    def __init__(
        self,
        model: keras.Model,
        sites: Sequence[Site],
        recordings: Sequence[Recording],
        dtype: str,
    ) -> None:
        self._model, self._recordings, self._dtype = model, recordings, dtype
        self._sites, self._format = sites, FORMATS[dtype]
        self._suspects = {site.path: Suspect(site) for site in sites}
        self._forward_limit = FORWARD_LIMIT[dtype]
        self._backward_limit = BACKWARD_LIMIT[dtype]
        self._failure = ""

    def run(self) -> Sensitivity:
        """Reruns the layers, verifies those that look guilty, and tells."""
        if not all(each.ran.step.is_finite for each in self._recordings):
            raise ValueError(
                f"Loss or gradients of {self._model.name!r} are not finite in float32; "
                "expected a healthy step to begin with. Ask `tfamp.triage(model, "
                "batch)` for the cause."
            )
        scale = self._best_scale()
        suffering, unscaled = self._suffering(scale), self._suffering(1.0)
        suspects = self._suspects.values()
        looking_bad = [s for s in suspects if self._spoils_outputs(s) or s in suffering]
        guilty, error = self._needed(looking_bad, scale)
        if error > WHOLE_LIMIT[self._dtype] and suffering == looking_bad:
            guilty = []  # their gradients grow on the way to them, whatever they are in
        verdict: Verdict = "loss scale" if unscaled else "safe"
        if guilty:
            verdict = "layers"
        elif math.isnan(error):
            verdict = "cannot run"
        elif not error <= WHOLE_LIMIT[self._dtype]:
            verdict = "amplification"
        layers = tuple(
            LayerSensitivity(
                each.site.path,
                each.site.class_name,
                each.forward,
                each.backward.get(scale, 0.0),
                each in guilty,
                *(_reason(each, self._format, scale) if each in guilty else ("", "")),
            )
            for each in suspects
        )
        advice = how_to_keep([each.site for each in guilty])
        return Sensitivity(
            self._model.name,
            self._dtype,
            verdict,
            layers,
            scale,
            error,
            len(self._recordings),
            advice or self._advice(verdict, scale, error, unscaled),
        )

    def _best_scale(self) -> float:
        """Reruns all layers without a scale and with tfamp's first one.

        Where layers suffer at that, the one that `tfamp.ranges` calls best is tried.
        """
        if not needs_loss_scale(self._format):
            self._measure(1.0)
            return 1.0
        self._measure(1.0, _FIRST_SCALE)
        if not self._suffering(_FIRST_SCALE):
            return _FIRST_SCALE
        found = tallied(self._model.name, self._sites, self._recordings)
        self._measure(best := found.best_loss_scale)
        scales = (_FIRST_SCALE, best, 1.0)
        return min(scales, key=lambda scale: len(self._suffering(scale)))

    def _measure(self, *loss_scales: float) -> None:
        calls = [call for recording in self._recordings for call in recording.calls]
        with console.progress("Rerunning layers", len(calls), unit="calls") as done:
            for number, call in enumerate(calls, start=1):
                suspect = self._suspects[call.site.path]
                suspect.measure(call, self._dtype, loss_scales)
                done(number)

    def _suffering(self, scale: float) -> list[Suspect]:
        """Returns the layers whose gradients are spoiled, and not their outputs."""
        return [
            suspect
            for suspect in self._suspects.values()
            if not self._spoils_outputs(suspect)
            and not suspect.backward.get(scale, 0.0) <= self._backward_limit
        ]

    def _spoils_outputs(self, suspect: Suspect) -> bool:
        return bool(suspect.failure) or not suspect.forward <= self._forward_limit

    def _needed(
        self, guilty: Sequence[Suspect], scale: float
    ) -> tuple[list[Suspect], float]:
        """Returns the guilty layers but for those that do no harm in their place.

        So a sum that takes a mask beyond range to a softmax. With them comes the error
        of all gradients that is left.
        """
        needed, errors = list(guilty), self._errors(guilty, scale)
        if errors is None:
            return needed, math.nan
        left = errors["gradients"]
        if not left <= WHOLE_LIMIT[self._dtype]:
            return needed, left
        # Those who take bad numbers come after those who make them: they go first.
        for suspect in guilty[: -_MAX_VERIFIED - 1 : -1]:
            rest = [each for each in needed if each is not suspect]
            without = self._errors(rest, scale)
            if without is not None and self._is_no_worse(without, errors):
                needed, left = rest, without["gradients"]
        return needed, left

    def _errors(self, guilty: Sequence[Suspect], scale: float) -> Errors | None:
        """Returns how far the model is off, with the guilty layers in float32.

        None where it cannot run so; else the worst over the batches.
        """
        layers = [layer for _, layer, _ in structure.walk(self._model)]
        random = [each.site.layer for each in self._suspects.values() if each.is_random]
        kept = [each.site.layer for each in guilty] + random
        inside = {  # of another one that is kept
            id(child)
            for layer in filter(is_layer, kept)
            for _, child, parent in structure.walk(layer)
            if parent is not None
        }
        outermost = [each for each in dict.fromkeys(kept) if id(each) not in inside]
        worst: Errors = {}
        with (
            computing_in(layers, self._dtype),
            as_islands(outermost, self._dtype),
            giving_unrounded(self._model),
            adding_in_float32(layers),
        ):
            for recording in self._recordings:
                set_state(recording.state)
                try:
                    low = run(self._model, recording.batch, loss_scale=scale)
                except CANNOT_RUN as error:
                    self._failure = first_line(error)
                    return None
                for name, value in _errors_of(self._model, low, recording.ran).items():
                    worst[name] = max(worst.get(name, 0.0), value)
        return worst

    def _is_no_worse(self, these: Errors, than: Errors) -> bool:
        """States whether a step does as well as one with a layer more in float32.

        A layer with a small part of the gradients may be wholly wrong, so it counts by
        its own, and by what the model gives.
        """
        limits = dict.fromkeys(these, self._backward_limit)
        limits |= dict.fromkeys(("outputs", "loss"), self._forward_limit)
        limits["gradients"] = than["gradients"] + _NOTICEABLE
        usual = {name: _NO_WORSE * than.get(name, 0.0) for name in these}
        return all(these[name] <= max(usual[name], limits[name]) for name in these)

    def _advice(
        self, verdict: Verdict, scale: float, error: float, unscaled: list[Suspect]
    ) -> str:
        """Returns what to do where no layer is guilty."""
        paths = name_layers([each.site.path for each in unscaled])
        power = f"'initial_scale': 2.0**{math.log2(scale):.0f}"
        is_usual = scale == _FIRST_SCALE
        how = f"passed to `tfamp.enable` as `loss_scale_options={{{power}}}`"
        how = "as `tfamp.enable` brings it" if is_usual else how
        off_by = f"gradients that are off by {error:.2g} times their size"
        return {
            "safe": f"Nothing to do: {self._dtype} gives {off_by}.",
            "loss scale": f"It needs a loss scale of about {scale:g}, {how}: without "
            f"one the gradients of {paths} are spoiled.",
            "cannot run": f"The step raises in {self._dtype}: {self._failure}. "
            "`tfamp.enable` keeps a layer in float32 whose `call` does; a `train_step` "
            "is to cast to the dtype of the outputs.",
            "amplification": "Each layer is fine alone, and the model as a whole gives "
            f"{off_by}. Train it in float32, or normalize between its layers.",
        }[verdict]


def _errors_of(model: keras.Model, low: Ran, exact: Ran) -> Errors:
    """Returns how far a step of the whole model is off."""
    found, known = (
        {id(v): None if g is None else array_of(g) for v, g in ran.step.gradients}
        for ran in (low, exact)
    )

    def error(ids: Collection[int]) -> float:
        return gradient_error([found.get(i) for i in ids], [known.get(i) for i in ids])

    errors = {
        "gradients": error(known),
        "outputs": max(map(forward_error, low.outputs, exact.outputs), default=0.0),
        "loss": 0.0,
    }
    if low.step.loss is not None and exact.step.loss is not None:
        losses = (np.asarray(ran.step.loss) for ran in (low, exact))
        errors["loss"] = forward_error(*losses)
    for path, layer, _ in structure.walk(model):
        own = [id(weight) for weight in structure.own_weights(layer)]
        errors[f"layer {path}"] = error(own)
    return errors


def _reason(suspect: Suspect, format: Format, scale: float) -> tuple[str, str]:
    """Returns why a layer is guilty: a word, and a sentence with the figures."""
    name, limit = format.name, FORWARD_LIMIT[format.name]
    if suspect.failure:
        return "cannot run", f"it cannot run in {name}: {suspect.failure}"
    if suspect.forward <= limit:
        error = suspect.backward.get(scale, math.nan)
        off = f"are off by {error:.2g} times their size"
        off = "overflow" if math.isinf(error) else off
        at = "" if scale == 1 else f" at a loss scale of {scale:g}"
        return "backward", f"its gradients {off} in {name}{at}; its outputs are fine"
    recorded: Any = suspect.worst
    holds = f"{name} holds {format.max:.6g}"
    # The smallest number that is rounded to inf.
    too_large = format.max * (1 + format.epsilon / 4)
    exact, low = (rerun(recorded, each)[0].outputs for each in ("float32", name))
    largest_in = _largest([np.asarray(x, np.float32) for x in recorded.float_inputs])
    largest_out = _largest(exact)
    if largest_in >= too_large:
        return "overflow", f"its inputs reach {largest_in:.3g}, {holds}"
    if math.isinf(suspect.forward):
        reach = f"its outputs reach {largest_out:.3g}"
        if largest_out < too_large:
            reach = f"a number on the way is beyond range, while {reach} only"
        return "overflow", f"{reach}, {holds}"
    vanished = 0.0
    for a, b in zip(low, exact, strict=True):
        is_gone = (a == 0) & (b != 0)
        if forward_error(a[~is_gone], b[~is_gone]) <= limit:  # the rest is fine
            vanished = max(vanished, float(np.mean(is_gone)))
    # A format with float32's range lets nothing vanish that is not rounded away.
    if vanished > limit and needs_loss_scale(format):
        return "underflow", f"{vanished:.0%} of its outputs become 0 in {name}"
    return "digits", (
        f"its inputs reach {largest_in:.4g}, its outputs are off by "
        f"{suspect.forward:.2g} times their spread over the batch"
    )


def _largest(values: list[np.ndarray]) -> float:
    finite = [np.abs(each[np.isfinite(each)]) for each in values]
    return max((float(each.max()) for each in finite if each.size), default=0.0)
