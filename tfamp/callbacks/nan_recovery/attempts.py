"""Puts a model back after a failure, and applies what may keep it from the next."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.callbacks._draws import parts_of, whole
from tfamp.callbacks.nan_recovery import failures
from tfamp.callbacks.nan_recovery import remedies as _remedies
from tfamp.callbacks.nan_recovery.failures import Sign
from tfamp.callbacks.nan_recovery.training import Kept, WatchedTraining
from tfamp.keras_hooks import around_training
from tfamp.keras_hooks.patches import replaced
from tfamp.models import assignment
from tfamp.plan import PrecisionPlan
from tfamp.records import checks, console
from tfamp.records.record import Record
from tfamp.records.versions import installed_versions
from tfamp.stepping import bundles
from tfamp.stepping.snapshots import State, put, take

# A snapshot that did not help so often is passed over for an older one.
_MAX_RESTORES = 2


@dataclasses.dataclass(frozen=True)
class Recovery(Record):
    """One failure and what was done about it.

    `number` counts from 1 and `epoch` from 0 in each `fit`; `step` is the batches
    trained before. `sign` says what failed, `cause` and `layer` are the triage's.
    `remedy` is what was done, or "stop", and `detail` its numbers or layers. Training
    went back to the snapshot of `restored_step`; `bundle` is the folder of the failing
    step, or "".
    """

    number: int
    epoch: int
    step: int
    sign: str
    cause: str = ""
    layer: str | None = None
    remedy: str = ""
    detail: str = ""
    restored_step: int = 0
    seconds: float = 0.0
    bundle: str = ""

    def line(self) -> str:
        """Returns the recovery as a sentence."""
        because = f" (cause: {self.cause}" if self.cause else ""
        because += f", layer {self.layer!r})" if self.layer else ")" if because else ""
        more = f" `tfamp.triage(model, {self.bundle!r})` says more."
        return (
            f"Recovery {self.number} at epoch {self.epoch + 1}, step {self.step}: "
            f"{self.sign}{because}. Back to step {self.restored_step}; remedy: "
            f"{self.remedy} {self.detail}".rstrip()
            + "."
            + more * bool(self.bundle)
        )


class RecoveryError(ArithmeticError):
    """Training was stopped, for no recovery was left that might help.

    The model holds the weights and optimizer state of its last good snapshot.

    Attributes:
        recoveries: What was tried.
    """

    def __init__(self, message: str, recoveries: Sequence[Recovery] = ()) -> None:
        super().__init__(message)
        self.recoveries = tuple(recoveries)


class _Found(NamedTuple):
    """The step that a failure is traced to.

    `sign` is how it showed again, None where no step failed again; `before` is the
    state right ahead of it.
    """

    before: State
    kept: Kept | None = None
    batch: Any = None
    sign: Sign | None = None


class Attempts:
    """The recoveries of one `fit`, listed in `done`.

    `triage` takes the model and a batch and gives what has `cause`, `layer` and
    `remedy`; None asks tfamp's own. `factor` is what a cut leaves of the learning rate.
    """

    def __init__(
        self,
        model: keras.Model,
        training: WatchedTraining,
        *,
        directory: Path,
        triage: Callable[[Any, Any], Any] | None,
        remedies: tuple[str, ...],
        max_recoveries: int,
        factor: float,
        stops_quietly: bool,
    ) -> None:
        self.done: list[Recovery] = []
        self._model, self._training, self._directory = model, training, directory
        self._triage, self._remedies = triage, remedies
        self._max_recoveries, self._factor = max_recoveries, factor
        self._stops_quietly = stops_quietly
        self._restores: dict[int, int] = {}
        self._step: Any = None  # the step that a search makes again

    def recover(self, sign: Sign) -> None:
        """Puts the model back and applies a remedy.

        A `RecoveryError` says that none is left, where training is not stopped quietly.
        """
        start, training = time.perf_counter(), self._training
        held = training.failing_batches()
        state = self._state()
        self._restore(state)
        found = self._search(held, state)
        bundle = self._write_bundle(found, state, sign)
        verdict = self._verdict(found, state)
        cause, layer = _cause_of(verdict), getattr(verdict, "layer", None)
        remedy, detail = "stop", ""
        if len(self.done) < self._max_recoveries:
            for each in _remedies.in_order(cause, allowed=self._remedies):
                applied, state = self._apply(each, state, verdict)
                if applied is not None:
                    remedy, detail = each, applied
                    break
        training.went_back(state)
        recovery = Recovery(
            len(self.done) + 1,
            training.epoch,
            training.step,
            sign.text,
            cause,
            None if layer is None else str(layer),
            remedy,
            detail,
            int(state.counters["step"]),
            time.perf_counter() - start,
            bundle,
        )
        with open(self._directory / "recoveries.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(recovery.to_dict(), allow_nan=False) + "\n")
        self.done.append(recovery)
        if remedy == "stop":
            self._stop(recovery, verdict)
            return
        logging.warning("%s", recovery.line())
        if remedy == _remedies.FLOAT32:
            self._write_plan(recovery)

    def _state(self) -> State:
        """Returns the state to go back to: the good one, or the one before it.

        One that was gone back to again and again, with no later one that was good,
        may have been on its way to the failure.
        """
        training, state = self._training, self._training.good
        step = state.counters["step"]
        if self._restores.get(step, 0) >= _MAX_RESTORES and training.older is not None:
            state, training.older = training.older, None
            step = state.counters["step"]
        self._restores[step] = self._restores.get(step, 0) + 1
        return state

    def _restore(self, state: State) -> None:
        training = self._training
        try:
            put(self._model, state, metrics=training.holds_metrics(state))
        except ValueError as error:
            raise RecoveryError(
                "Training failed before there was a snapshot of all its variables; "
                "expected one good step first, since the model makes some of them in "
                "it. Build the model and its optimizers before `fit`.",
                self.done,
            ) from error
        held = training.rate_factor / state.counters["rate_factor"]
        if held != 1:
            _remedies.multiply_rates(
                self._model, held=held, factor=training.rate_factor
            )

    def _search(self, held: Sequence[Kept], state: State) -> _Found:
        """Trains on batches again, the oldest first, and returns the first that fails.

        A failure shows late where its first number is hidden, as by a ReLU that makes 0
        of NaN: the batch at hand by then is innocent. Where no step fails again, it is
        the first one with NaN or inf in it, or else the last. The model, which has the
        state from which they were trained, is left in another one.
        """
        model, ignored = self._model, self._training.ignored
        pairs = [(each, whole(parts_of(model, each.data))) for each in held]
        with replaced(model, steps_per_execution=1):
            if self._step is None:
                self._step = around_training.on_batch(model)
            for number, (each, batch) in enumerate(pairs):
                before = take(model) if number else state
                try:
                    logs = failures.plain(self._step(batch))
                    sign = (
                        failures.of_logs(logs, ignored=ignored)
                        or failures.of_weights(model)
                        or failures.of_scale(model)
                    )
                except Exception as error:
                    sign = failures.of_error(error)
                    if sign is None:
                        break  # it fails otherwise here: nothing can be said
                if sign is not None:
                    return _Found(before, each, batch, sign)
        bad = [pair for pair in pairs if _holds_nonfinite(pair[1])]
        kept, batch = [*bad, *pairs[-1:], (None, None)][0]
        return _Found(state, kept, batch)

    def _go_to(self, found: _Found, state: State) -> None:
        """Gives the model the state right ahead of the step that fails."""
        self._restore(state)
        if found.before is not state:
            put(self._model, found.before, metrics=False)

    def _write_bundle(self, found: _Found, state: State, sign: Sign) -> str:
        """Writes what failed, with the state ahead of it; "" where that cannot be."""
        if found.kept is None:
            return ""
        model, sign = self._model, found.sign or sign
        self._go_to(found, state)
        notes = []
        if found.sign is None:
            notes.append(
                "No step since the last good state failed when it was made again: this "
                "is the likeliest one, and what broke it is not in model or batch."
            )
        if len(parts_of(model, found.kept.data)) > 1:
            notes.append("It was found on one device, with the batch of all replicas.")
        record = bundles.Bundle(
            cause=sign.kind,
            message=f"{sign.text}.",
            epoch=self._training.epoch,
            step=found.kept.number + 1,
            model_class=f"{type(model).__module__}.{type(model).__qualname__}",
            policy=assignment(model).policy,
            versions=installed_versions(),
            notes=tuple(notes),
        )
        parts = (found.before, found.batch, model.save)
        try:
            return os.fspath(bundles.write(self._directory, record, *parts))
        except Exception as error:  # recovery must go on without it
            self._warn("No bundle of the failure could be written", error)
            return ""

    def _verdict(self, found: _Found, state: State) -> Any:
        """Asks the triage about the failing batch, on the weights from before.

        First on the good ones; where these make nothing fail, on those that the steps
        since then led to.
        """
        self._restore(state)
        verdict = self._asked(found.batch)
        is_open = verdict is not None and _cause_of(verdict) in ("", "none")
        if is_open and found.before is not state:
            self._go_to(found, state)
            verdict = self._asked(found.batch) or verdict
        self._restore(state)
        return verdict

    def _asked(self, batch: Any) -> Any:
        """Returns what the triage says, None where it fails, or there is no batch."""
        judge = self._triage
        if judge is None:
            if batch is None:
                return None
            # Loaded when something has failed.
            from tfamp.numerics.triage import triage

            judge = triage
        try:
            return judge(self._model, batch)
        except Exception as error:  # recovery must go on without it
            self._warn("The triage failed, so a batch is dropped", error)
            return None

    def _apply(
        self, remedy: str, state: State, verdict: Any
    ) -> tuple[str | None, State]:
        """Applies a remedy; returns its numbers, None where it changes nothing."""
        training, model = self._training, self._model
        if remedy == _remedies.DROP:
            return "", state
        if remedy == _remedies.RATE:
            # By what the triage found to help, by the setting without.
            factor = getattr(verdict, "rate_factor", None) or self._factor
            text, needs_trace = _remedies.multiply_rates(
                model, held=factor, factor=training.rate_factor * factor
            )
            training.rate_factor *= factor if text else 1.0
            if needs_trace:
                self._trace_anew()
            return text or None, state
        if remedy == _remedies.SCALE:
            state, text = _remedies.with_other_scale(model, state, verdict)
            if text:
                self._restore(state)
            return text or None, state
        named = getattr(verdict, "layers", ()) or (getattr(verdict, "layer", None),)
        layers = ((path, _remedies.find_layer(model, path)) for path in named)
        changed = [
            repr(path)
            for path, layer in layers
            if layer is not None and _remedies.keep_float32(model, layer)
        ]
        if changed:
            self._trace_anew()
        return ", ".join(changed) or None, state

    def _trace_anew(self) -> None:
        self._training.trace_anew()
        self._step = None

    def _write_plan(self, recovery: Recovery) -> None:
        """Writes what the model computes in now, for the next run."""
        evidence = {"recovery": recovery.to_dict(), "versions": installed_versions()}
        try:
            plan = PrecisionPlan.from_model(self._model, evidence=evidence)
            plan.to_json(self._directory / "plan.json")
        except (OSError, ValueError) as error:  # training goes on without the file
            self._warn("No plan could be written", error)

    def _warn(self, what: str, error: Exception) -> None:
        why = f"{type(error).__name__}: {checks.first_line(error)}"
        logging.warning("%s, in %r (%s).", what, str(self._directory), why)

    def _stop(self, last: Recovery, verdict: Any) -> None:
        why = "no remedy is left for it"
        if last.number > self._max_recoveries:
            why = f"`max_recoveries` {self._max_recoveries} are used up"
        look = f"{last.bundle!r}" if last.bundle else "batch"
        advice = str(getattr(verdict, "remedy", "") or "").rstrip(".") or (
            f"Look at the failing step with `tfamp.triage(model, {look})`, lower the "
            "learning rate, or clean the data"
        )
        names = ("epoch", "step", "sign", "cause", "layer", "remedy", "back to step")
        rows = [
            (
                *(str(each.epoch + 1), str(each.step), each.sign, each.cause or "-"),
                *(each.layer or "-", f"{each.remedy} {each.detail}".rstrip()),
                str(each.restored_step),
            )
            for each in self.done
        ]
        table = console.table(dict.fromkeys(names, console.FOLD), rows, box=None)
        text = (
            f"Training was stopped at epoch {last.epoch + 1}, step {last.step}: "
            f"{last.sign}, and {why}; expected a remedy to help. The model is as it "
            f"was at step {last.restored_step}, its last good snapshot. {advice}. "
            f"{checks.see('triage#recovery')}\n{console.text_of(table)}"
        )
        if not self._stops_quietly:
            raise RecoveryError(text, self.done)
        logging.error("%s", text)
        self._model.stop_training = True


def _cause_of(verdict: Any) -> str:
    return str(getattr(verdict, "cause", "") or "")


def _holds_nonfinite(batch: Any) -> bool:
    return any(
        not np.all(np.isfinite(np.asarray(leaf)))
        for leaf in tf.nest.flatten(batch, expand_composites=True)
        if tf.is_tensor(leaf) and leaf.dtype.is_floating
    )
