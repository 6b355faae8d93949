"""`tfamp.sensitivity`: finds the layers that low precision would spoil."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras

from tfamp.keras_hooks import structure
from tfamp.machine import cpus
from tfamp.numerics.magnitudes import Tallies
from tfamp.numerics.passes import Recording, batches_of, exactly, record, run
from tfamp.numerics.sensitivity.errors import (
    Errors,
    LayerSensitivity,
    Sensitivity,
    Verdict,
    errors_of,
    is_no_worse,
)
from tfamp.numerics.sensitivity.explanations import (
    FIRST_SCALE,
    advice_on,
    explain,
)
from tfamp.numerics.sensitivity.reruns import CANNOT_RUN, Suspect
from tfamp.records import checks
from tfamp.records.checks import first_line
from tfamp.records.console import progress
from tfamp.records.formats import FORMATS, HALF, needs_loss_scale
from tfamp.stepping.eager_step import Site
from tfamp.stepping.layer_calls import (
    adding_in_float32,
    as_islands,
    computing_in,
    giving_unrounded,
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
# Error of all gradients above which a model is not the same one in low precision. Of
# the models of tests/wild, healthy ones, and others with their guilty layers in
# float32, stay below 0.03 in float16 and 0.05 in bfloat16, those that amplify rounding
# are above 0.87. Between, it is where their truth counts a layer's gradients as bad.
WHOLE_LIMIT = {"float16": 0.3, "bfloat16": 0.5}


def sensitivity(
    model: keras.Model,
    data: Any,
    *,
    dtype: str = "float16",
    num_batches: int = 3,
    batch_size: int = 32,
) -> Sensitivity:
    """Finds the layers that should stay in float32, in a pass over a few batches.

    Each layer runs again alone in the low precision, forward and backward, on the
    inputs and gradients it had in a float32 step; operations of Functional graphs
    and those in the `call` of a user's own layer count as layers. Verdict and guilt are
    without tfamp's rules; `tfamp.check` tells what those keep already. Nothing is
    trained; weights, optimizers, metrics and seeds are afterwards what they were.

    Args:
        model: A compiled model, written in whatever way.
        data: What `fit` takes: a `tf.data.Dataset` of batches, a `Pipeline`, a
            `PyDataset`, a generator of batches, or arrays (x, y), with sample weights
            or without.
        dtype: "float16" or "bfloat16".
        num_batches: How many batches to look at.
        batch_size: Examples in a batch of arrays.

    Returns:
        The `Sensitivity`: `.verdict`, `.guilty` (layer path -> reason), `.layers`,
        `.table()`, and `.advice` on how to keep them in float32: layers by
        `keep_float32`, operations, which have no dtype, in a layer of their own.

    Raises:
        TypeError: `model` is not a compiled Keras model, or `data` not of these.
        ValueError: The dtype is neither; the data is empty or comes in single
            examples; or the model is not finite in float32.

    Example:
        >>> import numpy as np
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


class NotFiniteError(ValueError):
    """Raised where a model fails in float32 already."""


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
        self._sites = sites
        self._suspects = {site.path: Suspect(site) for site in sites}
        self._limits = FORWARD_LIMIT[dtype], BACKWARD_LIMIT[dtype], WHOLE_LIMIT[dtype]
        self._failure = ""

    def run(self) -> Sensitivity:
        """Reruns the layers, verifies those that look guilty, and tells."""
        if not all(each.ran.step.is_finite for each in self._recordings):
            raise NotFiniteError(
                f"Loss or gradients of {self._model.name!r} are not finite in "
                "float32; expected a healthy step to begin with. Ask "
                "`tfamp.triage(model, batch)` for the cause."
            )
        scale = self._best_scale()
        suffering = self._suffering(scale)
        looking_bad = [
            each
            for each in self._suspects.values()
            if self._spoils_outputs(each) or each in suffering
        ]
        guilty, error = self._needed(looking_bad, scale)
        verdict: Verdict = "layers" if guilty else "safe"
        if not guilty and math.isnan(error):
            verdict = "cannot run"
        elif not guilty and not error <= self._limits[2]:
            verdict = "amplification"
        elif not guilty and self._suffering(1.0):
            verdict = "loss scale"
        failure = self._failure
        found = Sensitivity(
            self._model.name,
            self._dtype,
            verdict,
            tuple(
                self._layer(each, scale, is_guilty=each in guilty)
                for each in self._suspects.values()
            ),
            scale,
            error,
            len(self._recordings),
            advice="",
        )
        unscaled = [s.site.path for s in self._suffering(1.0)]
        advice = advice_on(
            found, [s.site for s in guilty], unscaled=unscaled, failure=failure
        )
        return dataclasses.replace(found, advice=advice)

    def _best_scale(self) -> float:
        """Reruns all layers without a scale and with tfamp's first one.

        Where layers suffer at that, the one that `tfamp.ranges` calls best is tried.
        """
        if not needs_loss_scale(FORMATS[self._dtype]):
            self._measure(1.0)
            return 1.0
        self._measure(1.0, FIRST_SCALE)
        if not self._suffering(FIRST_SCALE):
            return FIRST_SCALE
        tallies = Tallies(self._sites)
        for recording in self._recordings:
            tallies.add(recording)
        best = tallies.ranges(self._model.name).best_loss_scale
        self._measure(best)
        scales = (FIRST_SCALE, best, 1.0)
        return min(scales, key=lambda scale: len(self._suffering(scale)))

    def _measure(self, *loss_scales: float) -> None:
        calls = [call for recording in self._recordings for call in recording.calls]
        what = f"Rerunning layers in {self._dtype}"
        with progress(what, len(calls), unit="calls") as done:
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
            and not suspect.backward.get(scale, 0.0) <= self._limits[1]
        ]

    def _spoils_outputs(self, suspect: Suspect) -> bool:
        return bool(suspect.failure) or not suspect.forward <= self._limits[0]

    def _needed(
        self, guilty: Sequence[Suspect], scale: float
    ) -> tuple[list[Suspect], float]:
        """Returns the guilty layers but for those that may stay low after all.

        A layer alone may look bad and do no harm in its place: a sum that takes a mask
        beyond range to a softmax, or what nothing depends on. With them comes the error
        of all gradients that is left.
        """
        forward, backward, whole = self._limits
        needed, errors = list(guilty), self._errors(guilty, scale)
        if errors is None:
            return needed, math.nan
        left = errors["gradients"]
        if not left <= whole:
            return needed, left
        # Those who take bad numbers come after those who make them: they go first.
        tried = guilty[: -_MAX_VERIFIED - 1 : -1]
        with progress("Verifying guilty layers", len(tried), unit="layers") as done:
            for number, suspect in enumerate(tried):
                rest = [each for each in needed if each is not suspect]
                without = self._errors(rest, scale)
                if without is not None and is_no_worse(
                    without, errors, forward=forward, backward=backward
                ):
                    needed, left = rest, without["gradients"]
                done(number + 1)
        return needed, left

    def _errors(self, guilty: Sequence[Suspect], scale: float) -> Errors | None:
        """Returns how far the model is off, with the guilty layers in float32.

        None where it cannot run so; else the worst over the batches.
        """
        layers = [layer for _, layer, _ in structure.walk(self._model)]
        kept = [s.site.layer for s in guilty] + self._random()
        worst: Errors = {}
        with (
            computing_in(layers, self._dtype),
            as_islands(_outermost(kept), self._dtype),
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
                errors = errors_of(self._model, low, recording.ran)
                for name, value in errors.items():
                    worst[name] = max(worst.get(name, 0.0), value)
        return worst

    def _random(self) -> list[Any]:
        return [each.site.layer for each in self._suspects.values() if each.is_random]

    def _layer(
        self, suspect: Suspect, scale: float, *, is_guilty: bool
    ) -> LayerSensitivity:
        reason = text = ""
        if is_guilty:
            reason, text = explain(
                suspect,
                FORMATS[self._dtype],
                forward_limit=self._limits[0],
                loss_scale=scale,
            )
        return LayerSensitivity(
            suspect.site.path,
            suspect.site.class_name,
            suspect.forward,
            suspect.backward.get(scale, 0.0),
            is_guilty,
            reason,
            text,
        )


def _outermost(layers: Sequence[Any]) -> list[Any]:
    """Returns the layers that lie in none of the others; operations as they are."""
    layers = list({id(layer): layer for layer in layers}.values())
    inside = {
        id(child)
        for layer in layers
        if isinstance(layer, keras.layers.Layer)
        for _, child, parent in structure.walk(layer)
        if parent is not None
    }
    return [layer for layer in layers if id(layer) not in inside]
