"""The replays of a failing step, and what they say about its cause."""

import dataclasses
import inspect
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics.triage import suspicions
from tfamp.numerics.triage.first_nonfinite import Examined, examine
from tfamp.numerics.triage.result import Blamed, Replay, Triage
from tfamp.numerics.triage.suspicions import Large, Suspicion
from tfamp.numerics.triage.updates import Update
from tfamp.records.formats import FORMATS, HALF
from tfamp.stepping.arguments import batch_of, build
from tfamp.stepping.eager_step import Site, loss_scale_of
from tfamp.stepping.layer_calls import (
    as_islands,
    how_to_keep,
    in_float32,
    state_of,
    state_restored,
)
from tfamp.stepping.unchanged import same_draws, unchanged

# How many layers are kept in float32 in turn before precision is given up.
_MAX_LAYERS = 8
_DROP = (
    "Drop such examples: `Pipeline.filter`, or ask `tfamp.data.check(dataset)` for all "
    "of them."
)
_RELABEL = "Mend the labels, or give the model an output for each of them."
_RENUMBER = "Mend the ids, or give the layer a row for each of them."
_SCALE_DATA = (
    "Scale such numbers before they reach the model, as by "
    "`tfamp.data.fit_statistics(dataset).as_layer()`, or drop the examples: "
    "`Pipeline.filter`."
)
_RESTORE = "Put the optimizer's state from before it back, or compile anew."
_GONE = (
    "Put weights from before it back: the step that wrote them is gone. A fused ReLU "
    "may have hidden it, so watch weights, not the loss alone."
)
_CHANGE_LOSS = (
    "Change the loss: a log, a root or a division in it meets 0. Losses of Keras that "
    "take logits do not."
)
_CHANGE_STEP = (
    "Change what it computes beside its layers: a log, a root or a quotient in it "
    "meets 0, or the slope of a root or a norm does."
)
_CHANGE_SCHEDULE = (
    "Mend the learning rate's schedule, which gives a number that is not finite at "
    "this step."
)
_RAISE_EPSILON = (
    "Raise the optimizer's epsilon above 0, or look at what its update divides by."
)
_CUT = (
    "Go back to weights from before and cut the learning rate, warm it up, or clip "
    "gradients by `global_clipnorm=1.0`."
)


def inquire(model: keras.Model, batch: Any) -> Triage:
    """Returns why the train step of a compiled model fails on a batch."""
    batch = batch_of(batch, name="batch_or_bundle")
    build(model, batch)
    rate = None
    if model.optimizer is not None:  # of this step, where it follows a schedule
        rate = float(tf.convert_to_tensor(model.optimizer.learning_rate))
    with unchanged(model), same_draws():
        inquiry = _Inquiry(model, batch, rate)
        try:
            return inquiry.run()
        except tf.errors.InvalidArgumentError as error:
            found = suspicions.without_a_row(error)
            if found is None:
                raise
            is_label = "label" in found.sentence
            return inquiry.answer("data", [found], _RELABEL if is_label else _RENUMBER)


class _Inquiry:
    """The replays of one step, and what they say.

    `rate` is the learning rate of an update, None without an optimizer.
    """

    def __init__(self, model: keras.Model, batch: Any, rate: float | None) -> None:
        self._model, self._batch, self._rate = model, batch, rate
        self._replays: list[Replay] = []
        self._exact: Examined | None = None
        self._scale = loss_scale_of(model)
        halves = sorted(structure.compute_dtypes(model) & {*HALF})
        self._is_half = bool(halves)
        self._dtype = halves[0] if halves else "float16"
        self._policy = model.dtype_policy.name
        self._state = state_of(model)
        self._masks: frozenset[str] | None = None

    def run(self) -> Triage:
        """Replays as often as it takes, and answers."""
        model, batch = self._model, self._batch
        if lost := suspicions.bad_ids(model, batch):
            return self.answer("data", lost, _RENUMBER)
        found = list(suspicions.bad_data(batch))
        if found and self._is_spoiled_by_data():
            return self.answer("data", found, _DROP)
        if found := list(suspicions.bad_weights(model)):
            return self._of_bad_weights(found)
        if found := list(suspicions.bad_slots(model)):
            return self.answer("optimizer", found, _RESTORE)
        if found := list(suspicions.bad_labels(model, batch)):
            return self.answer("data", found, _RELABEL)
        place = len(self._replays)
        own = self._replay(self._policy, self._scale)
        exact = self._in_float32() if self._is_half or self._scale != 1 else own
        if exact is not own and exact.step.is_finite and not own.step.is_finite:
            # -inf that is there in float32, too, is meant; any other overflowed.
            self._masks = exact.health.masks
            own = own.knowing(model, self._masks)
            self._replays[place] = _replay_of(self._replays[place].name, own)
        if not exact.step.is_finite:
            return self._of_float32(exact)
        if not own.step.is_finite:
            return self._of_precision(own, exact)
        return self._of_the_update(exact)

    def _of_bad_weights(self, found: list[Suspicion]) -> Triage:
        """Blames the learning rate where it would throw fresh weights as far."""
        large = suspicions.large_weights(self._model)
        thrown = self._thrown(large)
        if thrown is not None:
            return self._of_the_rate([*found[:3], thrown], large)
        return self.answer("model", [*found, *_beside(large)], _GONE)

    def _is_spoiled_by_data(self) -> bool:
        """States whether bad numbers in the batch are to blame.

        A model may take NaN for what is missing, and mean it.
        """
        if next(suspicions.bad_weights(self._model), None) is not None:
            return True  # by the step, it seems; there is nothing left to try
        if self._in_float32().step.is_finite:
            return False
        with in_float32(self._model):
            mended = suspicions.mended(self._batch)
            again = self._replay("float32, means for what is not finite", 1.0, mended)
        return again.step.is_finite

    def _in_float32(self) -> Examined:
        if self._exact is None:
            with in_float32(self._model):
                self._exact = self._replay("float32", 1.0)
        return self._exact

    def _replay(self, policy: str, scale: float, batch: Any = None) -> Examined:
        found = self._examine(self._batch if batch is None else batch, scale)
        name = policy if scale == 1 else f"{policy}, loss scale {scale:g}"
        self._replays.append(_replay_of(name, found))
        return found

    def _examine(self, batch: Any, scale: float) -> Examined:
        """Runs the step on the state that the model had: with the same dropout."""
        with state_restored(self._state):
            is_exact = not structure.compute_dtypes(self._model) & {*HALF}
            found = examine(self._model, batch, loss_scale=scale, is_exact=is_exact)
        masks = self._masks
        return found if masks is None else found.knowing(self._model, masks)

    def _thrown(self, large: list[Large]) -> Suspicion | None:
        """Returns what an update does to weights as small as fresh ones, if too much.

        Large weights may be meant. Where this learning rate throws fresh ones away, it
        has made them large; where weights are large already, a rise that a lower rate
        does not make is enough.
        """
        if self._rate is None:
            return None
        with suspicions.tamed(self._model):
            with in_float32(self._model):
                exact = self._examine(self._batch, 1.0)
            if not exact.step.is_finite or exact.step.loss is None:
                return None
            update = Update.of(
                self._model, self._batch, exact, self._rate, is_fresh=True
            )
            if update is None:
                return None
            before, after = float(exact.step.loss), update.loss_after()
            if after is None or not (
                update.is_jump(before, after)
                or (large and update.overshoots(before, after))
            ):
                return None
        return Suspicion(
            None,
            "With weights of the size that initializers make, one update takes the "
            f"loss from {before:.4g} to {after:.4g}.",
        )

    def _of_the_rate(self, found: list[Suspicion], large: list[Large]) -> Triage:
        layers = [Suspicion(each.path, each.sentence) for each in large[:3]]
        return self.answer("learning rate", [*found, *layers], _CUT)

    def _of_float32(self, exact: Examined) -> Triage:
        """Blames what fails in float32 too: precision is out of it."""
        left_out = suspicions.outliers(self._batch)
        if left_out.any() and not left_out.all():
            rest = suspicions.without(self._batch, left_out)
            with in_float32(self._model):
                again = self._replay("float32 without outliers", 1.0, rest)
            if again.step.is_finite:
                rows = ", ".join(map(str, np.flatnonzero(left_out)[:5]))
                outlying = Suspicion(
                    None,
                    f"Without {int(left_out.sum())} examples (number {rows}) that are "
                    "a thousand times as large as the others the step is finite.",
                )
                return self.answer("data", [outlying], _DROP)
        if huge := list(suspicions.huge(self._batch)):
            small = suspicions.shrunk(self._batch)
            with in_float32(self._model):
                name = "float32, numbers of size one for huge ones"
                again = self._replay(name, 1.0, small)
            if again.step.is_finite:
                return self.answer("data", huge, _SCALE_DATA)
        large = suspicions.large_weights(self._model)
        if large and (thrown := self._thrown(large)) is not None:
            return self._of_the_rate([thrown], large)
        if exact.origin is None:
            return self._of_the_loss(exact, large)
        origin = exact.origin
        of_layer = Suspicion(
            origin.path,
            f"{origin.path!r} makes a number that is not finite of finite ones in "
            f"float32 too, on the way {origin.way}.",
        )
        remedy = (
            f"Change {origin.path!r}: keep what it takes the log, root or quotient of "
            "away from 0, as by adding a small constant, and clip what it raises."
        )
        return self.answer("model", [of_layer, *_beside(large)], remedy, exact)

    def _of_the_loss(self, exact: Examined, large: list[Large]) -> Triage:
        """Blames what is computed past all layers."""
        beside = _beside(large)
        added = suspicions.bad_losses(self._model)
        if added is not None:
            remedy = f"Change what {added.layer!r} adds to the loss: a log, a root or "
            remedy += "a division in it meets 0."
            return self.answer("model", [added, *beside], remedy)
        loss = exact.step.loss
        is_slope = loss is not None and bool(tf.math.is_finite(loss))
        what = "The gradient of the loss" if is_slope else "The loss"
        sentence = (
            f"{what} is not finite in float32, while all that the layers give is."
        )
        remedy, source, step = _CHANGE_LOSS, "", type(self._model).train_step
        if step is not keras.Model.train_step:
            name = f"`{type(self._model).__name__}.train_step`"
            sentence = f"{sentence[:-1]}: {name} makes it so, beside its layers."
            remedy, source = _CHANGE_STEP, _place(step)
        answer = self.answer("model", [Suspicion(None, sentence), *beside], remedy)
        return dataclasses.replace(answer, source=source)

    def _of_precision(self, own: Examined, exact: Examined) -> Triage:
        """Blames the loss scale or the precision: float32 is finite."""
        large = suspicions.large_weights(self._model)
        if large and (thrown := self._thrown(large)) is not None:
            return self._of_the_rate([thrown], large)
        if self._scale != 1:
            once = self._replay(self._policy, 1.0)
            if once.step.is_finite:
                return self._of_loss_scale(own)
            own = once
        kept: list[Site] = []
        found = own
        while found.origin is not None and len(kept) < _MAX_LAYERS:
            origin = found.origin
            if any(site.layer is origin.layer for site in kept):
                break
            kept.append(Site(origin.path, origin.layer))
            shown = ", ".join(repr(site.path) for site in kept)
            with as_islands([site.layer for site in kept], self._dtype):
                found = self._replay(f"{self._policy}, {shown} in float32", 1.0)
            if found.step.is_finite:
                break
        paths = tuple(site.path for site in kept)
        sentence = f"The step is finite in float32 and not in {self._policy}."
        sentences = [Suspicion(paths[0] if paths else None, sentence)]
        if paths:
            sentences.append(self._range_of(own, exact))
        if found.step.is_finite:
            remedy = how_to_keep(kept)
        else:
            remedy = (
                "Train it in float32: keeping the layers found so far "
                f"({', '.join(map(repr, paths)) or 'none'}) was not enough."
            )
        return self.answer("precision", sentences, remedy, own, layers=paths)

    def _range_of(self, own: Examined, exact: Examined) -> Suspicion:
        origin = own.origin
        path = origin.path if origin is not None else ""
        seen, what = exact.health.largest_gradient, "gradients"
        if origin is not None and origin.way == "forward":
            seen, what = exact.health.largest, "outputs"
        return Suspicion(
            path,
            f"In float32 the {what} of {path!r} reach {seen.get(path, math.nan):.4g}; "
            f"{self._dtype} holds {FORMATS[self._dtype].max:.6g}.",
        )

    def _of_loss_scale(self, own: Examined) -> Triage:
        scale = self._scale
        while scale > 1:
            scale /= 2.0**3 if scale >= 2.0**3 else scale
            if self._examine(self._batch, scale).step.is_finite:
                break
        found = Suspicion(
            None if own.origin is None else own.origin.path,
            f"The step is finite at a loss scale of {scale:g} and not at "
            f"{self._scale:g}.",
        )
        remedy = (
            f"Lower the scale to {scale:g} at most, or let it be dynamic: a dynamic "
            "one comes down by itself after a skipped step."
        )
        answer = self.answer("loss scale", [found], remedy, own)
        return dataclasses.replace(answer, loss_scale=scale)

    def _of_the_update(self, exact: Examined) -> Triage:
        """Looks for the cause in the update: the step itself is finite."""
        if self._rate is not None and not math.isfinite(self._rate):
            at = Suspicion(None, f"The learning rate of this step is {self._rate:g}.")
            return self.answer("learning rate", [at], _CHANGE_SCHEDULE)
        update = Update.of(self._model, self._batch, exact, self._rate)
        if update is not None:
            bad = update.bad_weight()
            if bad is not None and (constrained := update.bad_constraint()) is not None:
                remedy = (
                    f"Change the constraint of {constrained.layer!r}: keep what it "
                    "divides by, or takes the root of, away from 0."
                )
                return self.answer("model", [constrained], remedy)
            if bad is not None:
                return self.answer("optimizer", [bad], _RAISE_EPSILON)
            before = math.inf if exact.step.loss is None else float(exact.step.loss)
            after = update.loss_after()
            if after is not None and update.is_jump(before, after):
                return self._of_a_jump(update, before, after)
        large = suspicions.large_weights(self._model)
        if large and (thrown := self._thrown(large)) is not None:
            return self._of_the_rate([thrown], large)
        nothing = "Nothing is wrong with this step: loss and gradients are finite."
        return self.answer("none", _beside(large), nothing)

    def _of_a_jump(self, update: Update, before: float, after: float) -> Triage:
        """Blames the learning rate, and names one that lowers the loss."""
        found = f"One update takes the loss from {before:.4g} to {after:.4g}."
        softer = update.softer(before)
        remedy, factor = _CUT, None
        if softer is not None:
            factor = softer.factor
            remedy = (
                "Go back to weights from before and cut the learning rate from "
                f"{update.rate:.3g} to {update.rate * factor:.3g}, at which one "
                f"update takes the loss to {softer.loss:.4g}; or warm it up."
            )
        large = suspicions.large_weights(self._model)
        answer = self._of_the_rate([Suspicion(None, found)], large)
        return dataclasses.replace(answer, remedy=remedy, rate_factor=factor)

    def answer(
        self,
        cause: Blamed,
        found: list[Suspicion],
        remedy: str,
        examined: Examined | None = None,
        *,
        layers: tuple[str, ...] = (),
    ) -> Triage:
        layer = next((each.layer for each in found if each.layer is not None), None)
        origin = None if examined is None else examined.origin
        source = ""
        if origin is not None:
            layer = origin.path if layer is None else layer
            if layer == origin.path:
                source = _source(origin.layer)
        return Triage(
            self._model.name,
            cause,
            layer,
            tuple(each.sentence for each in found),
            remedy,
            layers or (() if layer is None else (layer,)),
            tuple(self._replays),
            source,
        )


def _beside(large: list[Large]) -> list[Suspicion]:
    """Returns what is told of large weights where they are not to blame."""
    return [Suspicion(None, each.sentence) for each in large[:3]]


def _replay_of(name: str, found: Examined) -> Replay:
    loss = None if found.step.loss is None else float(found.step.loss)
    if found.step.is_finite:
        return Replay(name, True, loss)
    if found.origin is None:
        return Replay(name, False, loss, on_the_way="loss")
    return Replay(name, False, loss, found.origin.path, found.origin.way)


def _source(layer: Any) -> str:
    """Returns file and line of a layer's `call`, "" for layers of Keras's own."""
    if type(layer).__module__.split(".")[0] == "keras":
        return ""
    return _place(getattr(type(layer), "call", None))


def _place(function: Any) -> str:
    """Returns file and line of a function, "" where it has none."""
    try:
        code = inspect.unwrap(function).__code__
    except AttributeError:
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"
