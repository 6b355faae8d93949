"""`tfamp.triage`: replays a failing step and says what is to blame."""

import dataclasses
import inspect
import math
import os
import re
from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics import evidence as suspects
from tfamp.numerics.evidence import Examined, NoRowError, Suspicion, examine
from tfamp.records import checks, console
from tfamp.records.formats import FORMATS, HALF
from tfamp.records.record import TableRecord
from tfamp.stepping import snapshots
from tfamp.stepping.arguments import batch_of, build, check_model
from tfamp.stepping.eager_step import Site, loss_scale_of
from tfamp.stepping.layer_calls import (
    as_islands,
    how_to_keep,
    in_float32,
    state_of,
    state_restored,
)
from tfamp.stepping.snapshot_files import read_bundle
from tfamp.stepping.unchanged import same_draws, seeds_put_back, unchanged

Blamed = Literal[
    "data", "model", "learning rate", "optimizer", "loss scale", "precision", "none"
]
# How many layers are kept in float32 in turn before precision is given up.
_MAX_LAYERS = 8
# How an operation on a CPU says that nothing stands for an id or a label.
_WITHOUT_A_ROW = re.compile(
    r"indices\S* = -?\d+ is not in \[0, \d+\)"
    r"|label value of -?\d+ which is outside the valid range of \[0, \d+\)"
)
_DROP = (
    "Drop such examples: `Pipeline.filter`, or scale huge numbers by "
    "`tfamp.data.fit_statistics(dataset).as_layer()`; `tfamp.data.check(dataset)` "
    "finds all of them."
)
_RELABEL = "Mend the labels, or give the model an output for each of them."
_RENUMBER = "Mend the ids, or give the layer a row for each of them."
_GONE = (
    "Put weights from before it back: the step that wrote them is gone. A fused ReLU "
    "may have hidden it, so watch weights, not the loss alone."
)
_CHANGE = (
    "Change {}: keep what it takes the log, root or quotient of away from 0, as by "
    "adding a small constant, and clip what it raises."
)


@dataclasses.dataclass(frozen=True)
class Triage(TableRecord):
    """Why a step failed.

    `layer` is the first one that made a bad number of good ones, forward or backward,
    `layers` all that the remedy is about, `source` file and line of the layer's `call`
    where it is the user's own. `rate_factor` is what to multiply the learning rate by,
    `loss_scale` one at which the step is finite, None where they are not to blame.
    """

    model: str
    cause: Blamed
    layer: str | None
    evidence: tuple[str, ...]
    remedy: str
    layers: tuple[str, ...] = ()
    source: str = ""
    rate_factor: float | None = None
    loss_scale: float | None = None

    @property
    def documentation(self) -> str:
        """Where it is explained how this cause is told from others."""
        return checks.address(f"triage#cause-{self.cause.replace(' ', '-')}")

    def table(self) -> str:
        """Returns cause, evidence and remedy, at most 110 columns wide."""
        place = "" if self.layer is None else f", layer {self.layer!r}"
        source = f" ({self.source})" if self.source else ""
        return console.text_of(
            f"{self.model}: the cause is {self.cause}{place}{source}",
            *(f"  - {sentence}" for sentence in self.evidence),
            f"Remedy: {self.remedy}",
            f"See {self.documentation}",
        )


def triage(model: keras.Model, batch_or_bundle: Any, y: Any = None) -> Triage:
    """Replays a step and says why it failed.

    The train step runs eagerly with every layer watched: in the model's policy at its
    loss scale, in float32, and in the policy at scale 1. The model is afterwards what
    it was.

    Args:
        model: A compiled model with the weights of the failing step.
        batch_or_bundle: The batch of the step, the first of what `fit` takes; or the
            path of a bundle of `tfamp.callbacks.NanRecovery`, whose state the model
            gets meanwhile.
        y: The targets, where the batch is x alone.

    Raises:
        TypeError: `model` is not a compiled Keras model, or the batch is none.
        ValueError: The bundle cannot be read, or is of another model.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> import numpy as np
        >>> bad = np.float32([[1, np.nan], [3, 4]])
        >>> found = triage(model, (bad, np.float32([[0], [0]])))
        >>> found.cause, found.evidence[0]  # doctest: +NORMALIZE_WHITESPACE
        ('data', '`x` holds 1 number that is inf or NaN, in 1 of 2 examples
        (number 0).')
    """
    check_model(model)
    batch = batch_or_bundle if y is None else (batch_or_bundle, y)
    with seeds_put_back():
        if not isinstance(batch, (str, os.PathLike)):
            return _asked(model, batch)
        _, state, batch = read_bundle(batch)
        snapshots.built_from(model, batch)
        before = snapshots.take(model)
        try:
            snapshots.put(model, state)
            return _asked(model, batch)
        finally:
            snapshots.put(model, before)


def _asked(model: keras.Model, batch: Any) -> Triage:
    """Returns why the train step of a compiled model fails on a batch."""
    batch = batch_of(batch, name="batch_or_bundle")
    build(model, batch)
    inquiry = _Inquiry(model, batch)
    with unchanged(model), same_draws():
        try:
            return inquiry.run()
        except NoRowError as error:
            return inquiry.answer("data", [Suspicion(str(error))], _RENUMBER)
        except tf.errors.InvalidArgumentError as error:
            found = _WITHOUT_A_ROW.search(str(error))
            if found is None:
                raise
            told = Suspicion(f"The step raises an error: {found[0]}.")
            remedy = _RELABEL if "label" in found[0] else _RENUMBER
            return inquiry.answer("data", [told], remedy)


class _Inquiry:
    """The replays of one step, and what they say."""

    def __init__(self, model: keras.Model, batch: Any) -> None:
        self._model, self._batch = model, batch
        self._rate, self._scale = suspects.rate_of(model), loss_scale_of(model)
        halves = sorted(structure.compute_dtypes(model) & {*HALF})
        self._dtype = halves[0] if halves else ""
        self._state = state_of(model)

    def run(self) -> Triage:
        """Replays as often as it takes, and answers."""
        model, batch = self._model, self._batch
        data, mended = suspects.bad_data(batch)
        if weights := suspects.bad_weights(model):
            if data:
                return self.answer("data", data, _DROP)
            # Of a learning rate that would throw fresh weights as far.
            thrown = self._of_thrown(weights[:3])
            return thrown or self.answer("model", weights, _GONE)
        if slots := suspects.bad_slots(model):
            remedy = "Put the optimizer's state from before it back, or compile anew."
            return self.answer("optimizer", slots, remedy)
        if labels := suspects.bad_labels(model, batch):
            return self.answer("data", [labels], _RELABEL)
        exact = self._in_float32(batch)
        if not exact.step.is_finite:
            # A model may take NaN for what is missing, and mean it.
            if data and self._in_float32(mended).step.is_finite:
                return self.answer("data", data, _DROP)
            return self._of_thrown() or self._of_float32(exact)
        if self._dtype or self._scale != 1:
            own = self._replay(self._scale, exact.harmless)
            if not own.step.is_finite:
                return self._of_thrown() or self._of_precision(own, exact)
        return self._of_the_update(exact)

    def _replay(
        self, scale: float = 1.0, harmless: frozenset[str] = frozenset()
    ) -> Examined:
        """Runs the step on the state that the model had: with the same dropout."""
        options: Any = {"is_exact": not self._dtype, "harmless": harmless}
        with state_restored(self._state):
            return examine(self._model, self._batch, loss_scale=scale, **options)

    def _in_float32(self, batch: Any) -> Examined:
        with in_float32(self._model), state_restored(self._state):
            return examine(self._model, batch, is_exact=True)

    def _of_thrown(self, found: Sequence[Suspicion] = ()) -> Triage | None:
        """Blames the learning rate where an update throws weights of a fresh size.

        Large weights may be meant. Where this learning rate throws fresh ones away, it
        has made them large; where weights are large already, it is enough that it lifts
        the loss, and by more than a tenth of it does.
        """
        large = list(suspects.large_weights(self._model).values())
        update = None
        if found or large:
            with suspects.tamed(self._model):
                exact = self._in_float32(self._batch)
                if exact.step.is_finite:
                    update = suspects.one_update(
                        self._model, self._batch, exact, self._rate, is_fresh=True
                    )
        if update is None or not (update.is_jump or (large and update.rises)):
            return None
        thrown = Suspicion(
            "With weights of the size that initializers make, one update takes the "
            f"loss from {update.before:.4g} to {update.after:.4g}."
        )
        told = [*found, thrown, *large[:3]]
        return self.answer("learning rate", told, suspects.CUT.format(""))

    def _of_float32(self, exact: Examined) -> Triage:
        """Blames what fails in float32 too: precision is out of it."""
        if exact.origin is not None:
            path, _, way = exact.origin
            made = f"{path!r} makes a number that is not finite of finite ones in "
            told = Suspicion(f"{made}float32 too, on the way {way}.", path)
            return self.answer("model", [told], _CHANGE.format(repr(path)), exact)
        if added := suspects.bad_added_loss(self._model):
            remedy = _CHANGE.format(f"what {added.layer!r} adds to the loss")
            return self.answer("model", [added], remedy)
        is_slope = exact.loss is not None and math.isfinite(exact.loss)
        text = "The gradient of the loss" if is_slope else "The loss"
        text += " is not finite in float32, while all that the layers give is"
        step, what, source = type(self._model).train_step, "the loss", ""
        if step is not keras.Model.train_step:
            text += f": `{type(self._model).__name__}.train_step` makes it so"
            what, source = "what it computes beside its layers", _place(step)
        told = Suspicion(f"{text}.")
        return self.answer("model", [told], _CHANGE.format(what), source=source)

    def _of_precision(self, own: Examined, exact: Examined) -> Triage:
        """Blames the loss scale or the precision: float32 is finite."""
        if self._scale != 1:
            once = self._replay(1.0, exact.harmless)
            if once.step.is_finite:
                scale = max(self._scale / 8, 1.0)
                while scale > 1 and not self._replay(scale).step.is_finite:
                    scale = max(scale / 8, 1.0)
                text = f"The step is finite at a loss scale of {scale:g} and not at "
                only = Suspicion(f"{text}{self._scale:g}.")
                remedy = f"Lower the scale to {scale:g} at most, or let it be dynamic: "
                remedy += "a dynamic one comes down by itself after a skipped step."
                return self.answer("loss scale", [only], remedy, own, loss_scale=scale)
            own = once
        kept: list[Site] = []
        found = own
        while found.origin is not None and len(kept) < _MAX_LAYERS:
            path, layer, _ = found.origin
            if any(site.layer is layer for site in kept):
                break
            kept.append(Site(path, layer))
            with as_islands([site.layer for site in kept], self._dtype):
                found = self._replay(1.0, exact.harmless)
            if found.step.is_finite:
                break
        policy = self._model.dtype_policy.name
        told = [Suspicion(f"The step is finite in float32 and not in {policy}.")]
        if own.origin is not None:
            path, _, way = own.origin
            largest, limit = exact.largest(path, way), FORMATS[self._dtype].max
            what = "outputs" if way == "forward" else "gradients"
            inside = "" if largest > limit else " only, and a number inside is larger"
            text = f"In float32 the {what} of {path!r} reach {largest:.4g}{inside}; "
            told.append(Suspicion(f"{text}{self._dtype} holds {limit:.6g}.", path))
        paths = tuple(site.path for site in kept)
        remedy = how_to_keep(kept)
        if not found.step.is_finite:
            remedy = "Train it in float32: keeping the layers found so far "
            remedy += f"({', '.join(map(repr, paths)) or 'none'}) was not enough."
        return self.answer("precision", told, remedy, own, layers=paths)

    def _of_the_update(self, exact: Examined) -> Triage:
        """Looks for the cause in the update: the step itself is finite."""
        if not math.isfinite(self._rate):
            told = Suspicion(f"The learning rate of this step is {self._rate:g}.")
            remedy = "Mend the learning rate's schedule, which gives it at this step."
            return self.answer("learning rate", [told], remedy)
        update = suspects.one_update(self._model, self._batch, exact, self._rate)
        if update is not None and update.bad is not None:
            text, layer = update.bad.sentence.replace(" already", ""), update.bad.layer
            if update.is_by_constraint:
                told = Suspicion(f"By a constraint, not the update, {text}", layer)
                remedy = _CHANGE.format(f"the constraint of {layer!r}")
                return self.answer("model", [told], remedy)
            made = "Loss and gradients are finite, and the update makes weights that "
            told = Suspicion(f"{made}are not: {text}", layer)
            remedy = "Raise the optimizer's epsilon above 0, or look at what its "
            remedy += "update divides by."
            return self.answer("optimizer", [told], remedy)
        if update is None or not update.is_jump:
            nothing = "Nothing is wrong with this step: loss and gradients are finite."
            return self._of_thrown() or self.answer("none", [], nothing)
        text, remedy = suspects.words_of_jump(update, self._rate)
        large = list(suspects.large_weights(self._model).values())
        found = [Suspicion(text), *large[:3]]
        return self.answer("learning rate", found, remedy, rate_factor=0.1)

    def answer(
        self,
        cause: Blamed,
        found: Sequence[Suspicion],
        remedy: str,
        examined: Examined | None = None,
        **more: Any,
    ) -> Triage:
        """Returns the answer, with the layer of the evidence or of the first number."""
        layer = next((each.layer for each in found if each.layer is not None), None)
        if examined is not None and examined.origin is not None:
            origin = examined.origin
            layer = origin.path if layer is None else layer
            is_keras = type(origin.layer).__module__.split(".")[0] == "keras"
            if layer == origin.path and not is_keras:
                more["source"] = _place(getattr(type(origin.layer), "call", None))
        more.setdefault("layers", () if layer is None else (layer,))
        evidence = tuple(each.sentence for each in found)
        return Triage(self._model.name, cause, layer, evidence, remedy, **more)


def _place(function: Any) -> str:
    """Returns file and line of a function, "" where it has none."""
    code = getattr(inspect.unwrap(function) if function else None, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
