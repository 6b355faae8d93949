"""Replays the failing step of a bundle: rebuilds the model, puts the state, runs it."""

import contextlib
import importlib
import itertools
import math
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfamp
from tfamp import policy
from tfamp.dtypes.in_force import stock_policy
from tfamp.keras_hooks import trainer
from tfamp.machine import devices
from tfamp.models import assignment, load_model
from tfamp.numerics.triage.replays import inquire
from tfamp.records import versions
from tfamp.stepping import bundle_records as records
from tfamp.stepping import bundles, snapshots
from tfamp.stepping.bundle_records import Bundle, Call, Replayed, ReplayedStep
from tfamp.stepping.bundles import Contents, iterator_of, part_of
from tfamp.stepping.snapshots import tally_of
from tfamp.stepping.unchanged import put_random
from tfamp.trials import parcel


def prepare_devices(record: Bundle) -> None:
    """Gives TensorFlow the logical devices and threads that the bundle names.

    A ValueError where they are not here, or TensorFlow has begun without them.
    """
    around = record.surroundings
    if "MultiWorker" in around.strategy or "ParameterServer" in around.strategy:
        raise ValueError(
            f"The bundle was written under a {around.strategy}; expected one machine. "
            "Steps of several workers cannot be replayed by one."
        )
    numbers = [int(n.split(":")[1]) for n in around.replicas if n.startswith("CPU:")]
    # Refused where TensorFlow has begun; what counts is what is there afterwards.
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(around.threads[0])
        tf.config.threading.set_inter_op_parallelism_threads(around.threads[1])
    with contextlib.suppress(RuntimeError):
        if max(numbers, default=0) > 0:
            tf.config.set_logical_device_configuration(
                tf.config.list_physical_devices("CPU")[0],
                [tf.config.LogicalDeviceConfiguration()] * (max(numbers) + 1),
            )
    names = {d.name.split("/device:")[-1] for d in tf.config.list_logical_devices()}
    if missing := tuple(name for name in around.replicas if name not in names):
        raise ValueError(
            f"The bundle needs the devices {around.replicas!r}, of which {missing!r} "
            "are missing here. Replay it in a fresh process, on a machine like its own."
        )


def rebuilt(
    path: str | os.PathLike[str], contents: Contents, *, build: str | None = None
) -> keras.Model:
    """Returns the model of a bundle, with the state from before the failure.

    A ValueError where it cannot be rebuilt, or is another model. `build` is as for
    `replay`.
    """
    record = contents.record
    around = record.surroundings
    with (
        tf.distribute.MirroredStrategy(list(around.replicas)).scope()
        if around.replicas
        else contextlib.nullcontext()
    ):
        if build is None:
            model = _loaded(Path(path) / bundles.MODEL, record)
        else:
            model = _built(build, record)
        model.run_eagerly, model.jit_compile = around.run_eagerly, around.jit_compile
        model.steps_per_execution = around.steps_per_execution
        # Metrics have no variables before the first step.
        with contextlib.suppress(Exception):
            trainer.build_from(model, part_of(contents, record.calls[0].first))
        begin(model, contents)
    return model


def begin(model: keras.Model, contents: Contents) -> None:
    """Gives a model and all random generators the state from before the failure."""
    snapshots.put(model, contents.state)
    put_random(contents.random)


def _loaded(path: Path, record: Bundle) -> keras.Model:
    how = "Pass `--build=module:function`, which returns the compiled model."
    if not record.has_model:
        raise ValueError(
            f"The bundle holds no model {record.model_class}, since "
            f"{record.needs_build}; expected a function that builds it. {how}"
        )
    classes: dict[str, Any] = {}  # Keras itself imports no module of a user's
    for name, place in record.classes.items():
        module, _, attribute = place.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            found = operator.attrgetter(attribute)(importlib.import_module(module))
            classes[name] = found
    try:
        return load_model(path, custom_objects=classes)
    except Exception as error:  # whatever a class's constructor raises
        why = record.needs_build or f"{type(error).__name__}: {error}"
        raise ValueError(
            f"Cannot rebuild the model {record.model_class} from its file, since "
            f"{why}; expected a function that builds it. {how}"
        ) from error


def _built(target: str, record: Bundle) -> keras.Model:
    function: Callable[..., Any] = parcel.load(target)
    around = record.surroundings
    put_in_force = policy.scope if around.is_managed else stock_policy
    with put_in_force(around.policy):
        built = parcel.call(function, seed=0, epochs=1)
    model: keras.Model = parcel.parts(built, of=repr(target), compiled=True)[0]
    return model


def replay(
    path: str | os.PathLike[str], *, build: str | None = None, explain: bool = True
) -> Replayed:
    """Replays the failing step of a bundle and compares every bit.

    The model is rebuilt, gets the state from before the failure, and trains on the
    kept batches as `fit` did. Run it in a fresh process; `tfamp replay` does.

    Args:
        path: The bundle.
        build: "module:function" that returns the compiled model, alone or first in a
            tuple; None takes the model of the bundle.
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
    contents = bundles.read(path)
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
    differences = [
        f"Step {step.step} logged another {' and '.join(step.differing)}."
        for step in steps
        if record.leads and step.differing
    ]
    now = snapshots.digest(snapshots.take(model)) if record.leads else None
    if record.leads and record.digest not in (None, now):
        differences.append("Some variables differ from those after the failing step.")
    is_exact = not differences if record.leads else None
    found = None if error is None else records.error_name(error)
    if record.error is not None and found != record.error:
        differences.append(f"It ended in {record.error} then, in {found} now.")
    unlike = _unlike_surroundings(model, record)
    return Replayed(
        path=os.fspath(path),
        cause=record.cause,
        message=record.message,
        failed_again=_failed_again(model, record, steps, error),
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
    model.make_train_function(force=True)
    found: list[ReplayedStep] = []
    error = None
    for _, group in itertools.groupby(contents.record.calls, lambda call: call.epoch):
        calls = list(group)
        if calls[0].index == 0:
            if found and tally_of(model.optimizer) is not None:
                model.optimizer.flush()
            model.reset_metrics()
        all_logs, error = _run_calls(model, contents, calls)
        all_logs += [{}] * (len(calls) - len(all_logs))  # of the call that raised
        for call, logs in zip(calls, all_logs, strict=True):
            loss = logs.get("loss")
            step = ReplayedStep(
                epoch=call.epoch,
                step=call.first + call.num_batches,
                recorded_loss=call.value("loss"),
                replayed_loss=None if loss is None else float.fromhex(loss),
                differing=tuple(
                    name
                    for name, was in call.logs.items()
                    if name in logs and not records.same_bits(was, logs[name])
                ),
            )
            found.append(step)
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
            found.append(records.hexed(model.train_function(iterator)))
        except Exception as error:  # whatever the step raised then, too
            return found, error
    optimizer = model.optimizer
    # Under XLA the step cannot raise it, and `fit` looks now and then only.
    if tally_of(optimizer) is not None and model.jit_compile:
        if optimizer.was_stopped():
            return found, optimizer.late_stop_error()
    return found, None


def _failed_again(
    model: keras.Model,
    record: Bundle,
    steps: list[ReplayedStep],
    error: Exception | None,
) -> bool:
    if record.cause == "error":
        return error is not None and records.error_name(error) == record.error
    if record.cause == "weights":
        return snapshots.num_nonfinite(snapshots.take(model)) > 0
    if record.cause == "skip":
        return int(getattr(model.optimizer, "consecutive_skips", 0)) > 0
    loss = steps[-1].replayed_loss
    if loss is not None and not math.isfinite(loss):
        return True
    logged = [float.fromhex(each) for each in record.calls[-1].logs.values()]
    is_same = bool(logged) and not steps[-1].differing
    return is_same and not all(map(math.isfinite, logged))


def _went_wrong(
    model: keras.Model, logs: dict[str, str], before: snapshots.State
) -> bool:
    """Returns whether a step made something non-finite, or was skipped."""
    loss = logs.get("loss")
    if loss is not None and not math.isfinite(float.fromhex(loss)):
        return True
    after = snapshots.take(model)
    skipped = [state.counters.get("skipped_steps", 0) for state in (before, after)]
    return skipped[1] > skipped[0] or snapshots.num_nonfinite(after) > 0


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
    names = ("class_name", "compute_dtype", "variable_dtype")
    then = [[row[name] for name in names] for row in around.assignment["layers"]]
    # By position: another process gives other names to what has none.
    for row, before in itertools.zip_longest(assignment(model), then):
        if row is None or [getattr(row, name) for name in names] != before:
            where = "the model" if row is None else repr(row.path)
            lines.append(f"Dtypes are others than then, first in {where}.")
            break
    return lines
