"""The replays of a failing step, and what they say about its cause."""

import dataclasses
import inspect
import math
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics.triage import evidence
from tfamp.numerics.triage.evidence import Suspicion, Update
from tfamp.numerics.triage.first_nonfinite import Examined, examine
from tfamp.numerics.triage.result import Blamed, Replay, Triage
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
_CHANGE = "Change {}: a log, a root or a quotient in it meets 0, or its slope does."
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
            found = evidence.without_a_row(error)
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
        self._scale = loss_scale_of(model)
        halves = sorted(structure.compute_dtypes(model) & {*HALF})
        self._dtype = halves[0] if halves else "float16"
        self._is_exact = not halves and self._scale == 1
        self._policy = model.dtype_policy.name
        self._state = state_of(model)
        self._masks: frozenset[str] | None = None

    def run(self) -> Triage:
        """Replays as often as it takes, and answers."""
        model, batch = self._model, self._batch
        if lost := evidence.bad_ids(model, batch):
            return self.answer("data", lost, _RENUMBER)
        weights = list(evidence.bad_weights(model))
        found = list(evidence.bad_data(batch))
        if found and (weights or self._is_mended_by(evidence.mended(batch))):
            return self.answer("data", found, _DROP)
        if weights:
            # Of a learning rate that would throw fresh weights as far.
            return self._of_thrown(weights[:3]) or self.answer(
                "model", [*weights, *self._large()], _GONE
            )
        if found := list(evidence.bad_slots(model)):
            return self.answer("optimizer", found, _RESTORE)
        if found := list(evidence.bad_labels(model, batch)):
            return self.answer("data", found, _RELABEL)
        own = None if self._is_exact else self._examine(self._scale)
        exact = self._in_float32(quiet=True)
        if own is not None and exact.step.is_finite and not own.step.is_finite:
            # -inf that is there in float32, too, is meant; any other overflowed.
            self._masks = exact.masks
            own = self._examine(self._scale)
        if own is not None:
            self._tell(self._policy, own, self._scale)
        self._tell("float32", exact)
        if not exact.step.is_finite:
            return self._of_float32(exact)
        if own is not None and not own.step.is_finite:
            return self._of_precision(own, exact)
        return self._of_the_update(exact)

    def _examine(self, scale: float = 1.0, batch: Any = None) -> Examined:
        """Runs the step on the state that the model had: with the same dropout."""
        with state_restored(self._state):
            return examine(
                self._model,
                self._batch if batch is None else batch,
                loss_scale=scale,
                is_exact=not structure.compute_dtypes(self._model) & {*HALF},
                masks=self._masks,
            )

    def _tell(self, name: str, found: Examined, scale: float = 1.0) -> None:
        """Adds a replay to the answer."""
        name = name if scale == 1 else f"{name}, loss scale {scale:g}"
        is_finite, origin = found.step.is_finite, found.origin
        if is_finite or origin is None:
            way = "" if is_finite else "loss"
            replay = Replay(name, is_finite, found.loss, None, way)  # type: ignore[arg-type]
        else:
            replay = Replay(name, False, found.loss, origin.path, origin.way)
        self._replays.append(replay)

    def _in_float32(
        self, batch: Any = None, what: str = "", *, quiet: bool = False
    ) -> Examined:
        with in_float32(self._model):
            found = self._examine(1.0, batch)
        if not quiet:
            self._tell(f"float32{what}", found)
        return found

    def _is_mended_by(self, batch: Any, what: str = "means for what is not") -> bool:
        """States whether the step is finite with another batch, and not with its own.

        A model may take NaN for what is missing, and mean it.
        """
        if self._in_float32(quiet=True).step.is_finite:
            return False
        return self._in_float32(batch, f", {what} finite").step.is_finite

    def _large(self) -> list[Suspicion]:
        """Returns sentences on large weights: evidence beside a cause, never one."""
        found = evidence.large_weights(self._model).values()
        return [Suspicion(None, each.sentence) for _, each in [*found][:3]]

    def _of_thrown(self, found: list[Suspicion]) -> Triage | None:
        """Blames the learning rate where an update throws weights of a fresh size.

        Large weights may be meant. Where this learning rate throws fresh ones away, it
        has made them large; where weights are large already, a rise that a lower rate
        does not make is enough.
        """
        large = evidence.large_weights(self._model)
        if self._rate is None or not (found or large):
            return None
        with evidence.tamed(self._model):
            exact = self._in_float32(quiet=True)
            before = exact.loss
            if not exact.step.is_finite or before is None:
                return None
            update = Update(self._model, self._batch, exact, self._rate)
            if not (update.is_all and update.begin_anew()):
                return None
            after = update.loss_after()
            if after is None:
                return None
            if not update.is_jump(before, after):
                rises = not after - before <= max(abs(before), 1e-3)
                if not (large and rises and update.softer(before)):
                    return None
        thrown = Suspicion(
            None,
            "With weights of the size that initializers make, one update takes the "
            f"loss from {before:.4g} to {after:.4g}.",
        )
        layers = [each for _, each in [*large.values()][:3]]
        return self.answer("learning rate", [*found, thrown, *layers], _CUT)

    def _of_float32(self, exact: Examined) -> Triage:
        """Blames what fails in float32 too: precision is out of it."""
        if huge := list(evidence.huge(self._batch)):
            small = evidence.shrunk(self._batch)
            what = ", numbers of size one for huge ones"
            if self._in_float32(small, what).step.is_finite:
                return self.answer("data", huge, _SCALE_DATA)
        if thrown := self._of_thrown([]):
            return thrown
        origin = exact.origin
        if origin is None:
            return self._of_the_loss(exact)
        of_layer = Suspicion(
            origin.path,
            f"{origin.path!r} makes a number that is not finite of finite ones in "
            f"float32 too, on the way {origin.way}.",
        )
        remedy = (
            f"Change {origin.path!r}: keep what it takes the log, root or quotient of "
            "away from 0, as by adding a small constant, and clip what it raises."
        )
        return self.answer("model", [of_layer, *self._large()], remedy, exact)

    def _of_the_loss(self, exact: Examined) -> Triage:
        """Blames what is computed past all layers."""
        added = evidence.bad_losses(self._model)
        if added is not None:
            remedy = _CHANGE.format(f"what {added.layer!r} adds to the loss")
            return self.answer("model", [added, *self._large()], remedy)
        is_slope = exact.loss is not None and math.isfinite(exact.loss)
        what = "The gradient of the loss" if is_slope else "The loss"
        sentence = f"{what} is not finite in float32, while all that the layers give is"
        remedy = _CHANGE.format("the loss")
        remedy += " Losses of Keras that take logits do not."
        source, step = "", type(self._model).train_step
        if step is not keras.Model.train_step:
            name = f"`{type(self._model).__name__}.train_step`"
            sentence += f": {name} makes it so, beside its layers"
            remedy = _CHANGE.format("what it computes beside its layers")
            source = _place(step)
        found = [Suspicion(None, f"{sentence}."), *self._large()]
        return dataclasses.replace(self.answer("model", found, remedy), source=source)

    def _of_precision(self, own: Examined, exact: Examined) -> Triage:
        """Blames the loss scale or the precision: float32 is finite."""
        if thrown := self._of_thrown([]):
            return thrown
        if self._scale != 1:
            once = self._examine()
            self._tell(self._policy, once)
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
            with as_islands([site.layer for site in kept], self._dtype):
                found = self._examine()
            shown = ", ".join(repr(site.path) for site in kept)
            self._tell(f"{self._policy}, {shown} in float32", found)
            if found.step.is_finite:
                break
        paths = tuple(site.path for site in kept)
        text = f"The step is finite in float32 and not in {self._policy}."
        sentences = [Suspicion(paths[0] if paths else None, text)]
        if own.origin is not None:
            path, way = own.origin.path, own.origin.way
            what = "outputs" if way == "forward" else "gradients"
            largest = exact.largest(path, way)
            text = f"In float32 the {what} of {path!r} reach {largest:.4g}; "
            text += f"{self._dtype} holds {FORMATS[self._dtype].max:.6g}."
            sentences.append(Suspicion(path, text))
        remedy = how_to_keep(kept)
        if not found.step.is_finite:
            remedy = (
                "Train it in float32: keeping the layers found so far "
                f"({', '.join(map(repr, paths)) or 'none'}) was not enough."
            )
        return self.answer("precision", sentences, remedy, own, layers=paths)

    def _of_loss_scale(self, own: Examined) -> Triage:
        scale = self._scale
        while scale > 1:
            scale /= min(2.0**3, scale)
            if self._examine(scale).step.is_finite:
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
        update = None
        if self._rate is not None:
            update = Update(self._model, self._batch, exact, self._rate)
        if update is not None and update.is_all:
            bad = update.bad_weight()
            if bad is not None and (constrained := update.bad_constraint()) is not None:
                remedy = (
                    f"Change the constraint of {constrained.layer!r}: keep what it "
                    "divides by, or takes the root of, away from 0."
                )
                return self.answer("model", [constrained], remedy)
            if bad is not None:
                return self.answer("optimizer", [bad], _RAISE_EPSILON)
            before = math.inf if exact.loss is None else exact.loss
            after = update.loss_after()
            if after is not None and update.is_jump(before, after):
                return self._of_a_jump(update, before, after)
        if thrown := self._of_thrown([]):
            return thrown
        nothing = "Nothing is wrong with this step: loss and gradients are finite."
        return self.answer("none", self._large(), nothing)

    def _of_a_jump(self, update: Update, before: float, after: float) -> Triage:
        """Blames the learning rate, and names one that lowers the loss."""
        found = f"One update takes the loss from {before:.4g} to {after:.4g}."
        softer = update.softer(before)
        remedy, factor = _CUT, None
        if softer is not None:
            factor, loss = softer
            remedy = (
                "Go back to weights from before and cut the learning rate from "
                f"{update.rate:.3g} to {update.rate * factor:.3g}, at which one "
                f"update takes the loss to {loss:.4g}; or warm it up."
            )
        large = [each for _, each in evidence.large_weights(self._model).values()]
        told = [Suspicion(None, found), *large[:3]]
        answer = self.answer("learning rate", told, remedy)
        return dataclasses.replace(answer, rate_factor=factor)

    def answer(
        self,
        cause: Blamed,
        found: list[Suspicion],
        remedy: str,
        examined: Examined | None = None,
        *,
        layers: tuple[str, ...] = (),
    ) -> Triage:
        """Returns the answer, with the layer of the evidence or of the first number."""
        layer = next((each.layer for each in found if each.layer is not None), None)
        origin = None if examined is None else examined.origin
        source = ""
        if origin is not None:
            layer = origin.path if layer is None else layer
            is_keras = type(origin.layer).__module__.split(".")[0] == "keras"
            if layer == origin.path and not is_keras:
                source = _place(getattr(type(origin.layer), "call", None))
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


def _place(function: Any) -> str:
    """Returns file and line of a function, "" where it has none."""
    try:
        code = inspect.unwrap(function).__code__
    except AttributeError:
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"
