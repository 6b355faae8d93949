"""Replays the failing step of a bundle: rebuilds the model, puts the state, runs it."""

import itertools
import math
import os
from collections.abc import Mapping
from typing import Any

import keras

import tfamp
from tfamp.machine import devices
from tfamp.models import assignment
from tfamp.numerics.triage.bundle_model import begin, prepare_devices, rebuilt
from tfamp.numerics.triage.replays import inquire
from tfamp.records import versions
from tfamp.stepping import snapshots
from tfamp.stepping.bundles import files
from tfamp.stepping.bundles.batches import iterator_of, part_of
from tfamp.stepping.bundles.digests import digest
from tfamp.stepping.bundles.files import Contents
from tfamp.stepping.bundles.record import Bundle, Call, error_name, hexed, same_bits
from tfamp.stepping.bundles.replay_record import Replayed, ReplayedStep
from tfamp.stepping.snapshots.names import tally_of


def replay(
    path: str | os.PathLike[str], *, build: str | None = None, explain: bool = True
) -> Replayed:
    """Replays the failing step of a bundle and compares every bit.

    The model is rebuilt, gets the state from before the failure, and trains on the
    kept batches as `fit` did. Run it in a fresh process; `tfamp replay` does.

    Args:
        path: The bundle.
        build: "module:function" that returns the compiled model, alone or first in a
            tuple; None takes the model of the bundle, or the function named there.
        explain: Whether to ask `tfamp.triage` about the failing step.

    Returns:
        The `Replayed`: `.is_reproduced`, `.verdict`, `.steps`, `.differences`,
        `.triage`, `.table()`.

    Raises:
        FileNotFoundError: There is no bundle.
        ImportError: There is no such module as `build` names.
        ValueError: The bundle is damaged, or the model cannot be rebuilt, or needs
            devices that are not here.
    """
    contents = files.read(path)
    record = contents.record
    if not record.calls:
        raise ValueError(
            f"The bundle {os.fspath(path)!r} holds no batch of the failing step, which "
            "failed before it drew one; expected at least one. Look at its message: "
            f"{record.message}"
        )
    prepare_devices(record)
    model = rebuilt(path, contents, build=build)
    steps, error = _run(model, contents)
    differences, is_exact = _compared(model, record, steps)
    failed_again = _failed_again(model, record, steps, error)
    if record.error is not None:
        found = None if error is None else error_name(error)
        if found != record.error:
            differences.append(f"It ended in {record.error} then, in {found} now.")
    unlike = _unlike_surroundings(model, record)
    return Replayed(
        path=os.fspath(path),
        cause=record.cause,
        message=record.message,
        failed_again=failed_again,
        is_exact=is_exact,
        is_same_device=not unlike,
        steps=tuple(steps),
        differences=(*differences, *unlike),
        notes=record.notes,
        triage=_explained(model, contents) if explain else "",
    )


def failing_step(model: keras.Model, contents: Contents) -> Any:
    """Takes a model to the step that first went wrong, and returns its batch.

    The model, which has one replica, has the state in which it was trained on; the
    batch is as `train_step` gets it.
    """
    record = contents.record
    begin(model, contents)
    steps_before = model.steps_per_execution
    model.steps_per_execution = 1
    model.make_train_function(force=True)
    number = record.calls[-1].first
    try:
        for call in record.calls:
            for number in range(call.first, call.first + call.num_batches):
                before = snapshots.take(model)
                single = [Call(call.epoch, number, number, 1, {})]
                logs, error = _run_calls(model, contents, single)
                if error is not None or _went_wrong(model, logs[0], before):
                    snapshots.put(model, before)
                    return part_of(contents, number)
        snapshots.put(model, before)
        return part_of(contents, number)
    finally:
        model.steps_per_execution = steps_before
        model.train_function = None


def _run(
    model: keras.Model, contents: Contents
) -> tuple[list[ReplayedStep], Exception | None]:
    """Replays all calls; returns what each came to, and what the last one raised."""
    record = contents.record
    model.make_train_function(force=True)
    found: list[ReplayedStep] = []
    error = None
    groups = itertools.groupby(record.calls, key=lambda call: call.epoch)
    for _, group in groups:
        calls = list(group)
        if calls[0].index == 0:
            if found and tally_of(model.optimizer) is not None:
                model.optimizer.flush()
            model.reset_metrics()
        all_logs, error = _run_calls(model, contents, calls)
        missing = len(calls) - len(all_logs)  # of the call that raised
        for call, logs in zip(calls, [*all_logs, *[{}] * missing], strict=True):
            found.append(_step_of(call, logs))
        if error is not None:
            break
    return found, error


def _run_calls(
    model: keras.Model, contents: Contents, calls: list[Call]
) -> tuple[list[dict[str, str]], Exception | None]:
    iterator = iterator_of(contents, calls, model.distribute_strategy)
    found: list[dict[str, str]] = []
    for _ in calls:
        try:
            found.append(hexed(model.train_function(iterator)))
        except Exception as error:  # whatever the step raised then, too
            return found, error
    optimizer = model.optimizer
    # Under XLA the step cannot raise it, and `fit` looks now and then only.
    if tally_of(optimizer) is not None and model.jit_compile:
        if optimizer.was_stopped():
            return found, optimizer.late_stop_error()
    return found, None


def _step_of(call: Call, logs: dict[str, str]) -> ReplayedStep:
    common = [name for name in call.logs if name in logs]
    replayed = logs.get("loss")
    return ReplayedStep(
        epoch=call.epoch,
        step=call.first + call.num_batches,
        recorded_loss=call.value("loss"),
        replayed_loss=None if replayed is None else float.fromhex(replayed),
        differing=tuple(n for n in common if not same_bits(call.logs[n], logs[n])),
    )


def _compared(
    model: keras.Model, record: Bundle, steps: list[ReplayedStep]
) -> tuple[list[str], bool | None]:
    """Returns what differs, and whether every bit is the same."""
    if not record.leads:
        return [], None
    differences = [
        f"Step {step.step} logged another {' and '.join(step.differing)}."
        for step in steps
        if step.differing
    ]
    if record.digest is not None and digest(snapshots.take(model)) != record.digest:
        differences.append("Some variables differ from those after the failing step.")
    return differences, not differences


def _failed_again(
    model: keras.Model,
    record: Bundle,
    steps: list[ReplayedStep],
    error: Exception | None,
) -> bool:
    if record.cause == "error":
        return error is not None and error_name(error) == record.error
    if record.cause == "weights":
        return snapshots.num_nonfinite(snapshots.take(model)) > 0
    if record.cause == "skip":
        return int(model.optimizer.consecutive_skips) > 0
    loss = steps[-1].replayed_loss
    return loss is not None and not math.isfinite(loss)


def _went_wrong(
    model: keras.Model, logs: dict[str, str], before: snapshots.State
) -> bool:
    """Returns whether a step made something non-finite, or was skipped."""
    loss = logs.get("loss")
    if loss is not None and not math.isfinite(float.fromhex(loss)):
        return True
    after = snapshots.take(model)
    if after.counters.get("skipped_steps", 0) > before.counters.get("skipped_steps", 0):
        return True
    return snapshots.num_nonfinite(after) > 0


def _explained(model: keras.Model, contents: Contents) -> str:
    """Returns what triage says, in lines."""
    if len(contents.record.surroundings.replicas) > 1:
        return "Triage is left out: the step ran on several replicas."
    try:
        return inquire(model, failing_step(model, contents)).table()
    except Exception as error:  # the replay itself is told in any case
        return f"Triage failed: {type(error).__name__}: {error}"


def _unlike_surroundings(model: keras.Model, record: Bundle) -> list[str]:
    """Returns what is otherwise than where the bundle was written."""
    around = record.surroundings
    now = {**versions.installed_versions(), "tfamp": tfamp.__version__}
    lines = [
        f"{name} was {version} then, is {now.get(name)} now."
        for name, version in around.versions.items()
        if now.get(name) != version
    ]
    if around.devices != devices.devices():
        names = tuple(device.name for device in around.devices)
        lines.append(f"The devices were {names!r} then, and are others now.")
    then = [_dtypes_of(row) for row in around.assignment["layers"]]
    layers = assignment(model)
    # By position: another process gives other names to what has none.
    for row, before in itertools.zip_longest(layers, then):
        if row is None or _dtypes_of(row.to_dict()) != before:
            where = "the model" if row is None else repr(row.path)
            lines.append(f"Dtypes are others than then, first in {where}.")
            break
    return lines


def _dtypes_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns class and dtypes of a layer of an `Assignment`."""
    return row["class_name"], row["compute_dtype"], row["variable_dtype"]
