"""Puts a model back after a failure, and applies what may keep it from the next."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
from absl import logging

from tfamp.callbacks.nan_recovery import bundle as _bundle
from tfamp.callbacks.nan_recovery import remedies as _remedies
from tfamp.callbacks.nan_recovery.failures import Sign
from tfamp.callbacks.nan_recovery.search import Found, Search
from tfamp.callbacks.nan_recovery.training import WatchedTraining
from tfamp.plan import PrecisionPlan
from tfamp.records import checks
from tfamp.records.record import Record
from tfamp.records.versions import installed_versions
from tfamp.stepping.snapshots import State, put

JOURNAL = "recoveries.jsonl"
PLAN = "plan.json"
_COLUMNS = ("epoch", "step", "sign", "cause", "layer", "remedy", "back to step")


@dataclasses.dataclass(frozen=True)
class Recovery(Record):
    """One failure and what was done about it.

    Attributes:
        number: Counted from 1 in each `fit`.
        epoch: As `fit` counts them, from 0.
        step: Batches that were trained before, in this `fit` and those it resumed.
        sign: How the failure showed, such as "loss is nan".
        cause: What the triage named, or "" without one.
        layer: The layer it named, or None.
        remedy: What was done, such as "drop batch" or "stop".
        detail: The numbers of the remedy, such as "0.1 -> 0.05".
        restored_step: Step of the snapshot that the model was put back to.
        seconds: What it took.
        bundle: Folder with the failing step, for `tfamp.triage`; "" where there is
            none.
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
        detail = f" {self.detail}" if self.detail else ""
        return (
            f"Recovery {self.number} at epoch {self.epoch + 1}, step {self.step}: "
            f"{self.sign}{because}. Back to step {self.restored_step}; remedy: "
            f"{self.remedy}{detail}."
        ) + (f" `tfamp replay {self.bundle}` shows the step." if self.bundle else "")


def table(recoveries: Sequence[Recovery]) -> str:
    """Returns what was tried, a line each, in columns.

    Example:
        >>> print(table([Recovery(1, 0, 7, "loss is nan", remedy="drop batch")]))
        epoch  step  sign         cause  layer  remedy      back to step
        1      7     loss is nan  -      -      drop batch  0
    """
    rows = [_COLUMNS]
    for each in recoveries:
        remedy = f"{each.remedy} {each.detail}".rstrip()
        facts = (each.sign, each.cause or "-", each.layer or "-", remedy)
        numbers = (str(each.epoch + 1), str(each.step))
        rows.append((*numbers, *facts, str(each.restored_step)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def append(recovery: Recovery, directory: Path) -> None:
    """Adds a line of JSON to the folder's journal."""
    with open(directory / JOURNAL, "a", encoding="utf-8") as file:
        file.write(json.dumps(recovery.to_dict(), allow_nan=False) + "\n")


def _write_plan(model: keras.Model, recovery: Recovery, directory: Path) -> None:
    """Writes what a model computes in after a recovery, for the next run."""
    evidence = {"recovery": recovery.to_dict(), "versions": installed_versions()}
    try:
        PrecisionPlan.from_model(model, evidence=evidence).to_json(directory / PLAN)
    except (OSError, ValueError) as error:  # training goes on without the file
        logging.warning("No plan could be written to %s: %s", directory / PLAN, error)


class RecoveryError(ArithmeticError):
    """Training was stopped, for no recovery was left that might help.

    The model holds the weights and optimizer state of its last good snapshot.

    Attributes:
        recoveries: What was tried.
    """

    def __init__(self, message: str, recoveries: Sequence[Recovery] = ()) -> None:
        super().__init__(message)
        self.recoveries = tuple(recoveries)


def _cause_of(verdict: Any) -> str:
    return str(getattr(verdict, "cause", "") or "")


# A snapshot that did not help so often is passed over for an older one.
_MAX_RESTORES = 2


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
        triage: Callable[[Any, Any], Any] | None,
        remedies: tuple[str, ...],
        max_recoveries: int,
        factor: float,
        stops_quietly: bool,
        clock: Callable[[], float],
    ) -> None:
        self.done: list[Recovery] = []
        self._model, self._training = model, training
        self._search = Search(model, ignored=training.ignored)
        self._triage, self._remedies = triage, remedies
        self._max_recoveries, self._factor = max_recoveries, factor
        self._stops_quietly, self._clock = stops_quietly, clock
        self._restores: dict[int, int] = {}

    def recover(self, sign: Sign) -> None:
        """Puts the model back and applies a remedy.

        A `RecoveryError` says that none is left, where training is not stopped quietly.
        """
        start = self._clock()
        training, memory = self._training, self._training.memory
        training.forget()
        state = self._state()
        self._restore(state)
        found = self._search.failing(training.batches.kept())
        bundle = self._write_bundle(found, state, sign)
        verdict = self._verdict(found, state)
        cause = _cause_of(verdict)
        layer = getattr(verdict, "layer", None)
        wanted = _remedies.in_order(cause, allowed=self._remedies)
        remedy, detail = "stop", ""
        if len(self.done) < self._max_recoveries:
            for each in wanted:
                applied = self._apply(each, state, verdict)
                if applied is not None:
                    remedy, detail = each, applied
                    break
        memory.begin(memory.good)
        training.went_back(memory.good)
        recovery = Recovery(
            number=len(self.done) + 1,
            epoch=training.epoch,
            step=training.step,
            sign=sign.text,
            cause=cause,
            layer=None if layer is None else str(layer),
            remedy=remedy,
            detail=detail,
            restored_step=int(state.counters["step"]),
            seconds=self._clock() - start,
            bundle=bundle,
        )
        append(recovery, training.slots.directory)
        if remedy == "stop":
            self._stop(recovery, verdict)
            return
        self.done.append(recovery)
        logging.warning("%s", recovery.line())
        if remedy == _remedies.FLOAT32:
            _write_plan(self._model, recovery, training.slots.directory)

    def resume(self, state: State) -> None:
        """Begins with a state from disk, and with what was changed until then."""
        training, counters = self._training, state.counters
        needs_trace = bool(self._kept(counters.get("kept_float32", [])))
        put(self._model, state, metrics=False)
        training.step = int(counters["step"])
        training.run = str(counters["run"])
        training.rate_factor = float(counters["rate_factor"])
        training.kept_layers = tuple(counters.get("kept_float32", []))
        if training.rate_factor != 1:
            _, has_schedule = _remedies.multiply_rates(
                self._model, held=1.0, factor=training.rate_factor
            )
            needs_trace = needs_trace or has_schedule
        if needs_trace:
            self._trace_anew()
        logging.info("Resumed from the good snapshot of step %d.", training.step)

    def _state(self) -> State:
        """Returns the state to go back to: the good one, or one before it.

        One that was gone back to again and again, with no later one that was good,
        may have been on its way to the failure.
        """
        memory = self._training.memory
        state, run = memory.good, self._training.run
        step = int(state.counters["step"])
        if self._restores.get(step, 0) >= _MAX_RESTORES:
            self._training.writer.finish()
            older = self._training.slots.load(
                lambda c: c.get("run") == run and c["step"] < step
            )
            if older is not None:
                memory.good = state = older
                step = int(state.counters["step"])
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
        factor = training.rate_factor
        held = factor / state.counters["rate_factor"]
        if held != 1:
            _remedies.multiply_rates(self._model, held=held, factor=factor)

    def _write_bundle(self, found: Found, state: State, sign: Sign) -> str:
        """Writes what failed, with the state ahead of it; "" where that cannot be."""
        if found.kept is None:
            return ""
        before = state
        if found.before is None:
            self._restore(state)
        else:
            before = found.before
            put(self._model, before)
        training, folder = self._training, self._training.slots.directory
        try:
            return _bundle.write(
                self._model,
                folder,
                found,
                state=before,
                sign=sign,
                epoch=training.epoch,
            )
        except Exception as error:  # recovery must go on without it
            logging.warning(
                "No bundle of the failure could be written to %r (%s: %s).",
                str(folder),
                type(error).__name__,
                checks.first_line(error),
            )
            return ""

    def _verdict(self, found: Found, state: State) -> Any:
        """Asks the triage about the failing batch, on the weights from before.

        First on the good ones; where these make nothing fail, on those that the steps
        since then led to.
        """
        judge = self._triage
        self._restore(state)
        if judge is None and found.batch is None:
            return None
        if judge is None:
            # Loaded when something has failed.
            from tfamp.numerics.triage import triage

            judge = triage
        verdict = self._asked(judge, found.batch)
        is_open = verdict is not None and _cause_of(verdict) in ("", "none")
        if is_open and found.before is not None:
            put(self._model, found.before, metrics=False)
            verdict = self._asked(judge, found.batch) or verdict
        self._restore(state)
        return verdict

    def _asked(self, judge: Callable[[Any, Any], Any], batch: Any) -> Any:
        """Returns what the triage says, None where it fails."""
        try:
            return judge(self._model, batch)
        except Exception as error:  # recovery must go on without it
            logging.warning(
                "The triage failed (%s: %s), so a batch is dropped.",
                type(error).__name__,
                str(error).split("\n")[0],
            )
            return None

    def _apply(self, remedy: str, state: State, verdict: Any) -> str | None:
        """Applies a remedy; returns its numbers, None where it changes nothing."""
        training, model = self._training, self._model
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
            if other is None:
                return None
            training.memory.good = other[0]
            self._restore(other[0])
            return other[1]
        if remedy == _remedies.FLOAT32:
            return self._keep(verdict)
        return ""

    def _keep(self, verdict: Any) -> str | None:
        """Keeps the layers in float32 that a verdict is about."""
        training = self._training
        paths = getattr(verdict, "layers", ()) or (getattr(verdict, "layer", None),)
        changed = self._kept(paths)
        if not changed:
            return None
        training.kept_layers = (*training.kept_layers, *changed)
        self._trace_anew()
        return ", ".join(map(repr, changed))

    def _kept(self, paths: Sequence[Any]) -> list[str]:
        """Keeps layers in float32; returns the paths of those that were not before."""
        layers = ((path, _remedies.find_layer(self._model, path)) for path in paths)
        return [
            str(path)
            for path, layer in layers
            if layer is not None and _remedies.keep_float32(self._model, layer)
        ]

    def _cut_rates(self, factor: float | None) -> str | None:
        """Cuts the rates by what the triage found to help, by the setting without."""
        training = self._training
        factor = self._factor if factor is None else factor
        text, needs_trace = _remedies.multiply_rates(
            self._model, held=factor, factor=training.rate_factor * factor
        )
        if not text:
            return None
        training.rate_factor *= factor
        if needs_trace:
            self._trace_anew()
        return text

    def _trace_anew(self) -> None:
        self._training.trace_anew()
        self._search.forget_trace()

    def _stop(self, last: Recovery, verdict: Any) -> None:
        why = "no remedy is left for it"
        if len(self.done) >= self._max_recoveries:
            why = f"`max_recoveries` {self._max_recoveries} are used up"
        advice = str(getattr(verdict, "remedy", "") or "").rstrip(".")
        look = f"`tfamp.triage(model, {last.bundle!r})`" if last.bundle else ""
        advice = advice or (
            f"Look at the failing step with {look or '`tfamp.triage(model, batch)`'}, "
            "lower the learning rate, or clean the data"
        )
        text = (
            f"Training was stopped at epoch {last.epoch + 1}, step {last.step}: "
            f"{last.sign}, and {why}; expected a remedy to help. The model is as it "
            f"was at step {last.restored_step}, its last good snapshot. {advice}. "
            f"{checks.see('triage#recovery')}\n"
            f"{table([*self.done, last])}"
        )
        self.done.append(last)
        if not self._stops_quietly:
            raise RecoveryError(text, self.done)
        logging.error("%s", text)
        self._model.stop_training = True
