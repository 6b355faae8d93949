"""Puts a model back after a failure, and applies what may keep it from the next."""

from collections.abc import Callable
from typing import Any

import keras
from absl import logging

from tfamp.callbacks.nan_recovery import remedies as _remedies
from tfamp.callbacks.nan_recovery.course import Course
from tfamp.callbacks.nan_recovery.records import Recovery, RecoveryError, append, table
from tfamp.callbacks.nan_recovery.signs import Sign
from tfamp.stepping.snapshots.state import State, put

# A snapshot that did not help so often is passed over for an older one.
_MAX_RESTORES = 2


class Attempts:
    """The recoveries of one `fit`.

    Args:
        model: The model.
        course: Its training.
        triage: Takes the model and a batch, gives what has `cause`, `layer` and
            `remedy`; None for tfamp's own.
        remedies: Those that may be used.
        max_recoveries: After how many training is stopped.
        factor: What a cut leaves of the learning rate.
        stops_quietly: Whether training is stopped without an error.
        clock: Gives seconds.

    Attributes:
        done: What was done so far.
    """

    def __init__(
        self,
        model: keras.Model,
        course: Course,
        *,
        triage: Callable[[Any, Any], Any] | None,
        remedies: tuple[str, ...],
        max_recoveries: int,
        factor: float,
        stops_quietly: bool,
        clock: Callable[[], float],
    ) -> None:
        self.done: list[Recovery] = []
        self._model, self._course = model, course
        self._triage, self._remedies = triage, remedies
        self._max_recoveries, self._factor = max_recoveries, factor
        self._stops_quietly, self._clock = stops_quietly, clock
        self._num_guessed = 0
        self._restores: dict[int, int] = {}

    def recover(self, sign: Sign) -> None:
        """Puts the model back and applies a remedy.

        Raises:
            RecoveryError: No recovery is left, and training is not stopped quietly.
        """
        start = self._clock()
        course, memory = self._course, self._course.memory
        if memory is None:
            return
        is_growing = sign.kind == "loss scale" or memory.is_growing(
            course.last_logs.get("loss")
        )
        memory.forget()
        state = self._state()
        self._restore(state)
        verdict = self._verdict(state)
        cause = str(getattr(verdict, "cause", "") or "")
        layer = getattr(verdict, "layer", None)
        wanted = _remedies.in_order(
            cause,
            num_tried=self._num_guessed,
            is_growing=is_growing,
            allowed=self._remedies,
        )
        remedy, detail = "stop", ""
        if len(self.done) < self._max_recoveries:
            for each in wanted:
                applied = self._apply(each, state, verdict)
                if applied is not None:
                    remedy, detail = each, applied
                    break
        self._num_guessed += cause in ("", "none")
        memory.begin(memory.good)
        recovery = Recovery(
            number=len(self.done) + 1,
            epoch=course.epoch,
            step=course.step,
            sign=sign.text,
            cause=cause,
            layer=None if layer is None else str(layer),
            remedy=remedy,
            detail=detail,
            restored_step=int(state.counters["step"]),
            seconds=self._clock() - start,
        )
        append(recovery, course.slots.directory)
        if remedy == "stop":
            self._stop(recovery, verdict)
            return
        self.done.append(recovery)
        logging.warning("%s", recovery.line())

    def resume(self, state: State) -> None:
        """Begins with a state from disk, and with what was changed until then."""
        course, counters = self._course, state.counters
        needs_trace = False
        for path in counters.get("kept_float32", []):
            layer = _remedies.find_layer(self._model, path)
            if layer is not None and _remedies.keep_float32(self._model, layer):
                needs_trace = True
        put(self._model, state, metrics=False)
        course.step = int(counters["step"])
        course.run = str(counters["run"])
        course.rate_factor = float(counters["rate_factor"])
        course.kept_layers = tuple(counters.get("kept_float32", []))
        if course.rate_factor != 1:
            rates = _remedies.multiply_rates(
                self._model, held=1.0, factor=course.rate_factor
            )
            needs_trace = needs_trace or rates.needs_trace
        if needs_trace:
            course.trace_anew()
        logging.info("Resumed from the good snapshot of step %d.", course.step)

    def _state(self) -> State:
        """Returns the state to go back to: the good one, or one before it.

        One that was gone back to again and again, with no later one that was good,
        may have been on its way to the failure.
        """
        memory = self._course.memory
        if memory is None:
            raise RuntimeError("No training is under way.")
        state, run = memory.good, self._course.run
        step = int(state.counters["step"])
        if self._restores.get(step, 0) >= _MAX_RESTORES:
            self._course.writer.finish()
            older = self._course.slots.load(
                lambda c: c.get("run") == run and c["step"] < step
            )
            if older is not None:
                memory.good = state = older
                step = int(state.counters["step"])
        self._restores[step] = self._restores.get(step, 0) + 1
        return state

    def _restore(self, state: State) -> None:
        course = self._course
        try:
            put(self._model, state, metrics=state.counters["epoch"] == course.epoch)
        except ValueError as error:
            raise RecoveryError(
                "Training failed before there was a snapshot of all its variables; "
                "expected one good step first, since the model makes some of them in "
                "it. Build the model and its optimizers before `fit`.",
                self.done,
            ) from error
        held = course.rate_factor / state.counters["rate_factor"]
        if held != 1:
            _remedies.multiply_rates(self._model, held=held, factor=course.rate_factor)

    def _verdict(self, state: State) -> Any:
        """Asks the triage, on the weights from before the failure."""
        batch = self._course.failing_batch()
        triage = self._triage
        if triage is None and batch is not None:
            triage = _own_triage()
        if triage is None:
            return None
        try:
            verdict = triage(self._model, batch)
        except Exception as error:  # recovery must go on without it
            logging.warning(
                "The triage failed (%s: %s), so remedies are tried in turn.",
                type(error).__name__,
                str(error).split("\n")[0],
            )
            verdict = None
        self._restore(state)
        return verdict

    def _apply(self, remedy: str, state: State, verdict: Any) -> str | None:
        """Applies a remedy; returns its numbers, None where it changes nothing."""
        course, model = self._course, self._model
        if remedy == _remedies.RATE:
            return self._cut_rates(getattr(verdict, "rate_factor", None))
        if remedy == _remedies.SCALE:
            raises = "raise" in str(getattr(verdict, "remedy", "")).lower()
            other = _remedies.with_other_scale(
                model,
                state,
                raises=raises,
                wanted=getattr(verdict, "loss_scale", None),
            )
            if other is None or course.memory is None:
                return None
            course.memory.good = other[0]
            self._restore(other[0])
            return other[1]
        if remedy == _remedies.FLOAT32:
            return self._keep(verdict)
        return ""

    def _keep(self, verdict: Any) -> str | None:
        """Keeps the layers in float32 that a verdict is about."""
        course = self._course
        paths = getattr(verdict, "layers", ()) or (getattr(verdict, "layer", None),)
        changed = []
        for path in paths:
            layer = _remedies.find_layer(self._model, path)
            if layer is not None and _remedies.keep_float32(self._model, layer):
                changed.append(str(path))
        if not changed:
            return None
        course.kept_layers = (*course.kept_layers, *changed)
        course.trace_anew()
        return ", ".join(map(repr, changed))

    def _cut_rates(self, factor: float | None) -> str | None:
        """Cuts the rates by what the triage found to help, by the setting without."""
        course = self._course
        factor = self._factor if factor is None else factor
        rates = _remedies.multiply_rates(
            self._model, held=factor, factor=course.rate_factor * factor
        )
        if not rates.text:
            return None
        course.rate_factor *= factor
        if rates.needs_trace:
            course.trace_anew()
        return rates.text

    def _stop(self, last: Recovery, verdict: Any) -> None:
        why = "no remedy is left for it"
        if len(self.done) >= self._max_recoveries:
            why = f"`max_recoveries` {self._max_recoveries} are used up"
        advice = str(getattr(verdict, "remedy", "") or "").rstrip(".")
        advice = advice or (
            "Look at the failing step with `tfamp.triage(model, batch)`, lower the "
            "learning rate, or clean the data"
        )
        text = (
            f"Training was stopped at epoch {last.epoch + 1}, step {last.step}: "
            f"{last.sign}, and {why}; expected a remedy to help. The model is as it "
            f"was at step {last.restored_step}, its last good snapshot. {advice}.\n"
            f"{table([*self.done, last])}"
        )
        self.done.append(last)
        if not self._stops_quietly:
            raise RecoveryError(text, self.done)
        logging.error("%s", text)
        self._model.stop_training = True


def _own_triage() -> Callable[[Any, Any], Any]:
    """Returns tfamp's triage, which is loaded when something has failed."""
    from tfamp.numerics.triage.step_triage import triage

    found: Callable[[Any, Any], Any] = triage
    return found
