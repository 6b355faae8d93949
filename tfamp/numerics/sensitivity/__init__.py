"""`tfamp.sensitivity`: finds the layers that low precision would spoil."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras

from tfamp.dtypes.settings import make_settings
from tfamp.keras_hooks import structure
from tfamp.machine import cpus
from tfamp.numerics.sensitivity.errors import (
    Errors,
    LayerSensitivity,
    Sensitivity,
    Verdict,
    errors_of,
    run_with_outputs,
)
from tfamp.numerics.sensitivity.explanations import (
    FIRST_SCALE,
    advice_on,
    explain,
    given_dtypes,
    rules_of,
    under_rules,
)
from tfamp.numerics.sensitivity.shadow import CANNOT_RUN, Shadow, Suspect
from tfamp.records import checks
from tfamp.records.checks import first_line
from tfamp.records.console import progress
from tfamp.records.formats import FORMATS, needs_loss_scale
from tfamp.stepping.arguments import build, check_model, dataset_of, first_batch
from tfamp.stepping.eager_step import run_step
from tfamp.stepping.layer_calls import (
    adding_in_float32,
    as_islands,
    computing_in,
    giving_unrounded,
    in_float32,
)
from tfamp.stepping.unchanged import same_draws, seeds_put_back, unchanged

_DTYPES = ("float16", "bfloat16")
# Those that tfamp's first loss scale may come to.
_OTHER_SCALES = (2.0**20, 2.0**24, 2.0**10, 2.0**5)
# Errors above which a layer is guilty: of outputs relative to their spread over the
# batch, of gradients relative to their size.
FORWARD_LIMIT = {"float16": 0.1, "bfloat16": 0.25}
BACKWARD_LIMIT = {"float16": 0.25, "bfloat16": 0.4}
# Guilty layers that are verified by leaving them low, at most: each takes a step of the
# whole model for each batch.
_MAX_VERIFIED = 12
# Error of all gradients above which a model is not the same one in low precision. Of
# the models of benchmarks/faults, healthy ones, and others with their guilty layers in
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
    without tfamp's rules; beside them it tells which default rule keeps a guilty layer
    under `tfamp.enable`, and how far the model is off then. Nothing is trained;
    weights, optimizers, metrics and seeds are afterwards what they were.

    Args:
        model: A compiled model, written in whatever way.
        data: What `fit` takes: a `tf.data.Dataset` of batches, a `Pipeline`, a
            `PyDataset`, a generator of batches, or arrays (x, y), with sample weights
            or without.
        dtype: "float16" or "bfloat16".
        num_batches: How many batches to look at.
        batch_size: Examples in a batch of arrays.

    Returns:
        The `Sensitivity`: `.verdict`, `.guilty` (layer path -> reason), `.left`
        (those that no default rule keeps), `.layers`, `.table()`, and `.advice` on how
        to keep what is left in float32: layers by `keep_float32`, operations, which
        have no dtype, in a layer of their own.

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
    checks.choice("dtype", dtype, _DTYPES)
    checks.positive_int("num_batches", num_batches)
    check_model(model)
    cpus.avoid_broken_amx()
    with seeds_put_back():
        dataset = dataset_of(data, batch_size)
        build(model, first_batch(dataset))
        batches = list(dataset.take(num_batches))
        given = given_dtypes(model)
        with in_float32(model), unchanged(model), same_draws():
            return _Search(model, batches, dtype, given).run()


class _Search:
    """The search for guilty layers."""

    def __init__(
        self,
        model: keras.Model,
        batches: Sequence[Any],
        dtype: str,
        given: dict[int, keras.DTypePolicy],
    ) -> None:
        self._model, self._batches, self._dtype = model, batches, dtype
        self._given = given
        self._format = FORMATS[dtype]
        self._shadow = Shadow(model, dtype)
        self._num_evaluations = 0
        self._failure = ""

    def run(self) -> Sensitivity:
        for batch in self._batches:
            step = self._shadow.record(batch)
            self._num_evaluations += 1
            if not step.is_finite:
                raise ValueError(
                    f"Loss or gradients of {self._model.name!r} are not finite in "
                    "float32; expected a healthy step to begin with. Ask "
                    "`tfamp.triage(model, batch)` for the cause."
                )
        scale = self._best_scale()
        suffering = self._suffering(scale)
        guilty, error = self._needed(
            [s for s in self._suspects() if self._spoils_outputs(s) or s in suffering],
            scale,
        )
        verdict: Verdict = "layers" if guilty else "safe"
        if not guilty and math.isnan(error):
            verdict = "cannot run"
        elif not guilty and not error <= WHOLE_LIMIT[self._dtype]:
            verdict = "amplification"
        elif not guilty and self._suffering(1.0):
            verdict = "loss scale"
        failure = self._failure
        rules, by_rules = self._under_rules(scale)
        layers = tuple(
            self._layer(suspect, scale, rules, is_guilty=suspect in guilty)
            for suspect in self._suspects()
        )
        found = Sensitivity(
            self._model.name,
            self._dtype,
            verdict,
            layers,
            scale,
            error,
            len(self._batches),
            self._num_evaluations,
            advice="",
            errors_by_rules=by_rules,
        )
        left = [s.site for s in guilty if s.site.path in found.left]
        unscaled = [s.site.path for s in self._suffering(1.0)]
        advice = advice_on(found, left, unscaled=unscaled, failure=failure)
        return dataclasses.replace(found, advice=advice)

    def _suspects(self) -> list[Suspect]:
        return list(self._shadow.suspects.values())

    def _best_scale(self) -> float:
        """Reruns all layers without a scale, with the first one, and more if need be.

        It is the scale that the fewest layers suffer at, the first one if in doubt.
        """
        if not needs_loss_scale(self._format):
            self._shadow.measure(1.0)
            return 1.0
        self._shadow.measure(1.0, FIRST_SCALE)
        if not self._suffering(FIRST_SCALE):
            return FIRST_SCALE
        self._shadow.measure(*_OTHER_SCALES)
        scales = (FIRST_SCALE, *_OTHER_SCALES, 1.0)
        return min(scales, key=lambda scale: len(self._suffering(scale)))

    def _suffering(self, scale: float) -> list[Suspect]:
        """Returns the layers whose gradients are spoiled, and not their outputs."""
        limit = BACKWARD_LIMIT[self._dtype]
        return [
            suspect
            for suspect in self._suspects()
            if not self._spoils_outputs(suspect)
            and not suspect.backward.get(scale, 0.0) <= limit
        ]

    def _spoils_outputs(self, suspect: Suspect) -> bool:
        return bool(suspect.failure) or not (
            suspect.forward <= FORWARD_LIMIT[self._dtype]
        )

    def _needed(
        self, guilty: Sequence[Suspect], scale: float
    ) -> tuple[list[Suspect], float]:
        """Returns the guilty layers but for those that may stay low after all.

        A layer alone may look bad and do no harm in its place: a sum that takes a mask
        beyond range to a softmax, or what nothing depends on. With them comes the error
        of all gradients that is left.
        """
        needed, errors = list(guilty), self._errors(guilty, scale)
        if errors is None:
            return needed, math.nan
        left = errors.of_all["gradients"]
        if not left <= WHOLE_LIMIT[self._dtype]:
            return needed, left
        # Those who take bad numbers come after those who make them: they go first.
        tried = guilty[: -_MAX_VERIFIED - 1 : -1]
        with progress("Verifying guilty layers", len(tried), unit="layers") as done:
            for number, suspect in enumerate(tried):
                rest = [each for each in needed if each is not suspect]
                without = self._errors(rest, scale)
                if without is not None and without.is_no_worse(
                    errors,
                    forward=FORWARD_LIMIT[self._dtype],
                    backward=BACKWARD_LIMIT[self._dtype],
                ):
                    needed, left = rest, without.of_all["gradients"]
                done(number + 1)
        return needed, left

    def _errors(self, guilty: Sequence[Suspect], scale: float) -> Errors | None:
        """Returns how far the model is off, with the guilty layers in float32.

        None where it cannot run so.
        """
        layers = [layer for _, layer, _ in structure.walk(self._model)]
        kept = _outermost([s.site.layer for s in guilty] + self._shadow.random)
        with (
            computing_in(layers, self._dtype),
            as_islands(kept, self._dtype),
            giving_unrounded(self._model),
            adding_in_float32(layers),
        ):
            return self._errors_now(scale)

    def _errors_now(self, scale: float) -> Errors | None:
        """Returns how far the model is off as it computes now."""
        worst = None
        for number, exact in enumerate(self._shadow.steps):
            self._shadow.begin_again(number)
            try:
                batch = self._batches[number]
                low = run_with_outputs(self._model, batch, loss_scale=scale)
            except CANNOT_RUN as error:
                self._failure = first_line(error)
                return None
            self._num_evaluations += 1
            errors = errors_of(self._model, low, exact)
            worst = errors if worst is None else worst.worst(errors)
        return worst

    def _under_rules(self, scale: float) -> tuple[dict[str, str], dict[str, float]]:
        """Returns the default rules by the paths they keep, and the errors left."""
        with (
            under_rules(
                self._model, make_settings(f"mixed_{self._dtype}"), self._given
            ),
            as_islands(_outermost(self._shadow.random), self._dtype),
        ):
            # A step for nothing: a first call finds the heads of some models.
            self._shadow.begin_again(0)
            with contextlib.suppress(*CANNOT_RUN):
                run_step(self._model, self._batches[0])
            errors = self._errors_now(scale)
            rules = rules_of(self._model, [s.site for s in self._suspects()])
        return rules, {} if errors is None else errors.of_all

    def _layer(
        self, suspect: Suspect, scale: float, rules: dict[str, str], *, is_guilty: bool
    ) -> LayerSensitivity:
        reason = text = ""
        if is_guilty:
            limit = FORWARD_LIMIT[self._dtype]
            reason, text = explain(
                suspect, self._format, forward_limit=limit, loss_scale=scale
            )
        return LayerSensitivity(
            suspect.site.path,
            suspect.site.class_name,
            suspect.forward,
            suspect.backward.get(scale, 0.0),
            is_guilty,
            reason,
            text,
            rules.get(suspect.site.path, ""),
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
