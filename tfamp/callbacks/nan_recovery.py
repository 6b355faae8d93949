"""`NanRecovery`: goes back to the last good state after a failure."""

import collections
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tfamp.callbacks import _failures
from tfamp.callbacks import _fit_callback as base
from tfamp.callbacks._failures import Sign
from tfamp.callbacks._fit_callback import FitCallback, Logs
from tfamp.keras_hooks import around_training, trainer
from tfamp.keras_hooks.patches import replaced
from tfamp.models import assignment
from tfamp.numerics.triage import triage
from tfamp.records import checks
from tfamp.records.record import Record
from tfamp.records.versions import installed_versions
from tfamp.stepping import snapshot_files, snapshots
from tfamp.stepping.snapshots import State

# The part of the time that snapshots may take.
_SHARE = 0.005
# Above this multiple of what the loss was, it is running away; what it was follows it
# so fast at each snapshot; losses below this part of the first one are as good as it.
_RUNAWAY, _FOLLOWS, _FLOOR = 10.0, 1.01, 1e-3
# What may be held of batches since the last good state, in number and size.
_MAX_KEPT, _MAX_BYTES = 1000, 2**28


@dataclasses.dataclass(frozen=True)
class Recovery(Record):
    """One failure: its sign, what the triage found, and what was done about it."""

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
        layer = f", layer {self.layer!r}" if self.layer else ""
        cause = f" (cause: {self.cause}{layer})" if self.cause else ""
        done = f"{self.remedy} {self.detail}".rstrip()
        more = f" `tfamp.triage(model, {self.bundle!r})` says more."
        return (
            f"Recovery {self.number} at epoch {self.epoch + 1}, step {self.step}: "
            f"{self.sign}{cause}. Back to step {self.restored_step}; remedy: {done}."
        ) + more * bool(self.bundle)


class RecoveryError(ArithmeticError):
    """Training was stopped, in its last good state; `recoveries` is what was tried."""

    def __init__(self, message: str, recoveries: Sequence[Recovery] = ()) -> None:
        super().__init__(message)
        self.recoveries = tuple(recoveries)


class _Found(NamedTuple):
    """The step that a failure is traced to, and the state right ahead of it."""

    before: State
    number: int = 0
    batch: Any = None
    sign: Sign | None = None  # how it showed again; None where no step failed again


class NanRecovery(FitCallback):
    """Goes back to the last good state when training fails, and applies a remedy.

    A failure is a loss, metric, weight or moving statistic that is not finite, steps
    that are skipped without end under a loss scale, or the `tfamp.LossScaleError` that
    follows. No other callback sees it. The model goes back to its last good snapshot,
    bit by bit, the batches since are trained again until one fails, and by its triage
    follows "drop batch", "cut learning rate", "move loss scale", "keep in float32" (the
    layers that it named), or "stop", where the model is to blame or no remedy is left.

    The failing step is kept as a folder for `tfamp.triage(model, folder)`. `recoveries`
    in the logs is their number; `recoveries.jsonl` in the folder and
    `model.history.recoveries` have each as a `Recovery`. Cost: three copies of its
    state in the host's memory, the last 256 MiB of batches, half a percent of the time.

    Args:
        directory: Folder for bundles and the journal, made if need be.
        every_seconds: Between snapshots; None waits 200 times as long as one took.
        max_recoveries: Recoveries in one `fit` after which the next failure stops it.
        on_exhausted: "raise" a `RecoveryError`, or "stop" training and log the report.

    Raises:
        ValueError: A value is out of range; or, when training begins, the folder cannot
            be written, weights are not finite, or workers are several.
        RecoveryError: No recovery was left that might help.

    Example:
        >>> import keras, numpy as np, tempfile
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> data = np.ones((8, 1), np.float32)
        >>> data[5] = np.nan
        >>> recovery = NanRecovery(tempfile.mkdtemp())
        >>> how = {"batch_size": 2, "verbose": 0, "shuffle": False}
        >>> run = model.fit(data, data, callbacks=[recovery], **how)
        >>> run.history["recoveries"], recovery.recoveries[0].remedy
        ([1], 'drop batch')
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_seconds: float | None = None,
        max_recoveries: int = 3,
        on_exhausted: str = "raise",
    ) -> None:
        super().__init__()
        self.directory = snapshot_files.folder_path(directory)
        self.every_seconds = every_seconds
        if every_seconds:
            checks.positive("every_seconds", every_seconds)
        self.max_recoveries = max_recoveries
        checks.positive_int("max_recoveries", max_recoveries, minimum=0)
        checks.choice("on_exhausted", on_exhausted, ("raise", "stop"))
        self.on_exhausted = on_exhausted
        self.recoveries: tuple[Recovery, ...] = ()
        self._is_watching = False
        # Batches that are held, each with how many were drawn before it.
        self._kept: collections.deque[tuple[int, Any]] = collections.deque()

    @property
    def bundles(self) -> tuple[str, ...]:
        """Folders of the failing steps of the last `fit`."""
        return tuple(each.bundle for each in self.recoveries if each.bundle)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Opens the folder and takes its place around the training function."""
        if base.has_workers(self.model):
            raise ValueError(
                "NanRecovery was given a model on several workers, which nothing makes "
                "go back together; expected one process. Train with `Resume` and "
                "`tfamp.LossScaleOptimizer(optimizer)`, which skips a bad step on all."
            )
        snapshot_files.make_folder(self.directory)
        snapshot_files.remove_leftovers(Path(self.directory))
        place = around_training.Place.NAN_RECOVERY
        self._is_watching = self._join(place=place, call=self._call)
        if not self._is_watching:
            return
        self._step = self._epoch = 0
        self._steps = int(self.model.steps_per_execution or 1)
        self._draws = base.can_draw(self.model)
        # Calls of this epoch: made, expected (-1 for unknown), and in the metrics.
        self._calls, self._num_calls, self._num_kept = 0, -1, 0
        # The state to go back to, and the one after it, not yet known to be good.
        self._good: State | None = None
        self._fresh: State | None = None
        self._good_mark = self._fresh_mark = self._num_drawn = 0
        self._has_begun, self._last_logs = False, dict[str, Any]()
        self._next, self._reference, self._floor = 0.0, math.nan, math.nan
        self._kept.clear()
        self._list(())

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begins to count an epoch's batches."""
        if self._is_watching:
            num_batches = (self.params or {}).get("steps")
            self._epoch, self._calls, self._num_kept = epoch, 0, 0
            self._num_calls = -(-num_batches // self._steps) if num_batches else -1

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Puts the number of recoveries into the logs."""
        if not self._is_watching or logs is None:
            return
        if not self._num_kept:
            # Metrics of no step at all read 0, which is too good to be true.
            unknown = dict.fromkeys(self.model.get_metrics_result(), math.nan)
            known = {**unknown, **self._last_logs}
            logs.update({name: known[name] for name in known if name in logs})
        logs["recoveries"] = len(self.recoveries)

    def _close(self, error: BaseException | None) -> None:
        self._is_watching, self._good, self._fresh = False, None, None
        self._kept.clear()

    def _list(self, recoveries: tuple[Recovery, ...]) -> None:
        self.recoveries = recoveries
        if (history := getattr(self.model, "history", None)) is not None:
            history.recoveries = recoveries

    def _call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Stands for the training function: one call of it, judged."""
        if not self._has_begun:
            self._has_begun = True
            spec = getattr(iterator, "element_spec", None)
            is_whole, state = snapshots.built_from(self.model, spec), self._snapshot({})
            if bad := list(snapshots.nonfinite(state)):
                raise ValueError(
                    f"Training begins with {sum(count for _, count in bad)} numbers "
                    f"that are not finite, the first in {bad[0][0]!r}; expected finite "
                    "weights and optimizer values. Load a good checkpoint."
                )
            if is_whole:  # else the first step makes more variables
                self._good = state
                self._wait(0.0)
        source = iterator
        try:
            if self._draws:
                source = base.Draws(lambda: self._hold(next(iterator)), iterator)
            logs = _failures.plain(function(source))
            sign = _failures.of_logs(logs)
        except (StopIteration, tf.errors.OutOfRangeError):
            # Judged before anything is done with the weights at the epoch's end.
            if self._calls and (sign := _failures.of_weights(self.model)) is not None:
                self._recover(sign)
            raise
        except Exception as error:
            logs, sign = {}, _failures.of_error(error)
            if sign is None:
                raise
        self._calls += 1
        self._step += self._steps
        known = logs if isinstance(logs, dict) else {}
        sign = sign or self._look(known)
        if sign is not None:
            self._recover(sign)
            return self._last_logs
        self._num_kept += 1
        self._last_logs = known
        return logs

    def _hold(self, data: Any) -> Any:
        """Holds a batch on its way, without a copy; the newest at least stays."""
        leaves = tf.nest.flatten(data, expand_composites=True)
        size = 4 * sum(x.shape.num_elements() or 0 for x in leaves if tf.is_tensor(x))
        self._kept.append((self._num_drawn, data))
        self._num_drawn += 1
        while len(self._kept) > 1 and (
            self._kept[0][0] < self._good_mark
            or len(self._kept) > min(_MAX_KEPT, _MAX_BYTES // max(1, size))
        ):
            self._kept.popleft()
        return data

    def _look(self, logs: dict[str, Any]) -> Sign | None:
        """Looks at more than the logs where it is due, and keeps snapshots."""
        loss: Any = logs.get("loss")
        loss = abs(loss) if isinstance(loss, float) else math.nan
        if math.isnan(self._reference):
            self._reference, self._floor = loss, _FLOOR * loss
        start, model = time.perf_counter(), self.model
        is_due = start >= self._next
        sign = _failures.of_scale(model) if is_due else None
        if sign is None and self._calls == self._num_calls:
            sign = _failures.of_weights(model)
        # After a step that was skipped the next one may be better.
        if sign is not None or not is_due or snapshots.was_skipped(model):
            return sign
        state = self._snapshot(logs)
        for path, _ in snapshots.nonfinite(state):
            return Sign("weights", f"{path} holds values that are not finite")
        if self._good is None or not loss > _RUNAWAY * self._reference:
            if self._fresh is not None:
                self._good, self._good_mark = self._fresh, self._fresh_mark
            self._fresh, self._fresh_mark = state, self._num_drawn
        # What the loss was follows it slowly, so that one which stays high is taken
        # for the new state of things in the end.
        self._reference = max(min(loss, self._reference * _FOLLOWS), self._floor)
        self._wait(time.perf_counter() - start)
        return None

    def _wait(self, seconds: float) -> None:
        """Sets the time of the next snapshot, where this one has cost so much."""
        pause = seconds / _SHARE if self.every_seconds is None else self.every_seconds
        self._next = time.perf_counter() + pause

    def _snapshot(self, logs: dict[str, Any]) -> State:
        is_last = self._calls == self._num_calls
        return snapshots.take(self.model).with_counters(
            step=self._step,
            epoch=self._epoch + is_last,
            calls=0 if is_last else self._calls,
            logs={k: v for k, v in logs.items() if isinstance(v, float)},
        )

    def _recover(self, sign: Sign) -> None:
        """Puts the model back and applies a remedy, or raises a `RecoveryError`."""
        start, state = time.perf_counter(), self._good
        if state is None:
            state, self._good_mark = self._fresh, self._fresh_mark
        if state is None:
            raise RecoveryError(
                f"Training failed ({sign.text}) before a snapshot had all variables; "
                "expected a good step first. Build model and optimizers before `fit`.",
                self.recoveries,
            )
        found = self._search(state)
        bundle = self._write_bundle(found, found.sign or sign)
        verdict = self._verdict(found, state)
        self._restore(state)
        cause = "" if verdict is None else verdict.cause
        remedy, detail = "stop", ""
        if len(self.recoveries) < self.max_recoveries:
            for each in _failures.REMEDIES.get(cause, (_failures.DROP,)):
                detail = self._apply(each, verdict)
                if detail or each == _failures.DROP:
                    remedy = each
                    # What the remedy changed comes back with it.
                    now = snapshots.take(self.model)
                    state = now.with_counters(**state.counters)
                    break
        self._good, self._fresh, self._good_mark = state, None, self._num_drawn
        self._num_kept = state.counters["calls"] * self._is_of_this_epoch(state)
        self._last_logs = {**self._last_logs, **state.counters["logs"]}
        self._kept.clear()
        self._wait(0.0)
        recovery = Recovery(
            *(len(self.recoveries) + 1, self._epoch, self._step, sign.text, cause),
            layer=None if verdict is None else verdict.layer,
            remedy=remedy,
            detail=detail,
            restored_step=state.counters["step"],
            seconds=time.perf_counter() - start,
            bundle=bundle,
        )
        journal = Path(self.directory, "recoveries.jsonl")
        with open(journal, "a", encoding="utf-8") as file:
            file.write(json.dumps(recovery.to_dict(), allow_nan=False) + "\n")
        self._list((*self.recoveries, recovery))
        if remedy == "stop":
            self._stop(recovery, verdict)
        else:
            logging.warning("%s", recovery.line())

    def _is_of_this_epoch(self, state: State) -> bool:
        return bool(state.counters["epoch"] == self._epoch and state.counters["calls"])

    def _restore(self, state: State) -> None:
        is_of_this = self._is_of_this_epoch(state)
        snapshots.put(self.model, state, metrics=is_of_this)

    def _search(self, state: State) -> _Found:
        """Trains on batches again, the oldest first, and returns the first that fails.

        Else it is the first with NaN or inf in it, or the last.
        """
        model, tried = self.model, list[_Found]()
        self._restore(state)
        with replaced(model, steps_per_execution=1):
            step = around_training.on_batch(model)
            for number, data in [x for x in self._kept if x[0] >= self._good_mark]:
                before = self._snapshot({}) if tried else state
                batch = _as_one(model, data)
                tried.append(_Found(state, number, batch))
                try:
                    logs = _failures.plain(step(batch))
                    sign = _failures.of_logs(logs) or _failures.of_weights(model)
                    sign = sign or _failures.of_scale(model)
                except Exception as error:
                    sign = _failures.of_error(error)
                    if sign is None:
                        break  # it fails otherwise here: nothing can be said
                if sign is not None:
                    return _Found(before, number, batch, sign)
        for found in tried:
            leaves = tf.nest.flatten(found.batch, expand_composites=True)
            if not all(_failures.is_finite(leaf) for leaf in leaves):
                return found
        return tried[-1] if tried else _Found(state)

    def _write_bundle(self, found: _Found, sign: Sign) -> str:
        """Writes what failed, with the state ahead of it; "" where that cannot be."""
        if found.batch is None:
            return ""
        self._restore(found.before)
        kind = type(self.model)
        note = "No step since the last good state failed again; this is the likeliest."
        record = snapshot_files.Bundle(
            *(sign.kind, f"{sign.text}.", self._epoch, found.number + 1),
            model_class=f"{kind.__module__}.{kind.__qualname__}",
            policy=assignment(self.model).policy,
            versions=installed_versions(),
            notes=() if found.sign else (note,),
        )
        parts = (found.before, found.batch, self.model.save)
        try:
            folder = Path(self.directory)
            return os.fspath(snapshot_files.write_bundle(folder, record, *parts))
        except Exception as error:  # recovery must go on without it
            self._warn("No bundle of the failure could be written", error)
            return ""

    def _verdict(self, found: _Found, state: State) -> Any:
        """Asks the triage on the good weights, then on those that steps led to."""
        verdict = None
        for before in {id(x): x for x in (state, found.before)}.values():
            if found.batch is None or (verdict and verdict.cause != "none"):
                break
            self._restore(before)
            try:
                verdict = triage(self.model, found.batch)
            except Exception as error:  # recovery must go on without it
                self._warn("The triage failed, so a batch is dropped", error)
        return verdict

    def _apply(self, remedy: str, verdict: Any) -> str:
        """Applies a remedy; returns its numbers, "" where nothing is changed."""
        model, text, needs_trace = self.model, "", False
        if remedy == _failures.RATE:
            factor = verdict.rate_factor or 0.5
            text, needs_trace = _failures.multiply_rates(model, factor)
        elif remedy == _failures.SCALE:
            text = _failures.move_scale(model, verdict)
        elif remedy == _failures.FLOAT32:
            text = _failures.keep_in_float32(model, verdict)
            needs_trace = bool(text)
        if needs_trace:
            trainer.drop_traced_functions(model)
            model.make_train_function(force=True)
        return text

    def _warn(self, what: str, error: Exception) -> None:
        why = checks.kind_and_line(error)
        logging.warning("%s, in %r (%s).", what, self.directory, why)

    def _stop(self, last: Recovery, verdict: Any) -> None:
        why = "no remedy is left for it"
        if last.number > self.max_recoveries:
            why = f"`max_recoveries` {self.max_recoveries} are used up"
        advice = "" if verdict is None else verdict.remedy.rstrip(".")
        advice = advice or "Lower the learning rate, or clean the data"
        tried = "\n".join(each.line() for each in self.recoveries)
        text = (
            f"Training was stopped at epoch {last.epoch + 1}, step {last.step}: "
            f"{last.sign}, and {why}; expected a remedy to help. The model is as it "
            f"was at step {last.restored_step}, its last good snapshot. {advice}. "
            f"{checks.see('triage#recovery')}\n{tried}"
        )
        if self.on_exhausted == "raise":
            raise RecoveryError(text, self.recoveries)
        logging.error("%s", text)
        self.model.stop_training = True


def _as_one(model: keras.Model, data: Any) -> Any:
    """Returns a batch of all replicas as one, as `train_step` gets it."""

    def joined(leaf: Any) -> Any:
        parts = model.distribute_strategy.experimental_local_results(leaf)
        if isinstance(parts[0], tf.experimental.Optional):
            return None  # Keras turns empty optionals to None
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

    return tf.nest.map_structure(joined, data)
