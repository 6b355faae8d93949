"""Rebuilds the model of a bundle, on devices like its own, in its state."""

import contextlib
import importlib
import operator
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfamp import policy
from tfamp.keras_hooks.training import fit_frames
from tfamp.models import load_model
from tfamp.stepping import snapshots
from tfamp.stepping.bundles import files
from tfamp.stepping.bundles.batches import part_of
from tfamp.stepping.bundles.files import Contents
from tfamp.stepping.bundles.random_states import put_random
from tfamp.stepping.bundles.record import Bundle
from tfamp.trials import targets


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
    target = build or (record.build if record.needs_build else None)
    with _scope_of(record):
        if target is None:
            model = _loaded(Path(path) / files.MODEL, record)
        else:
            model = _built(target, record)
        around = record.surroundings
        model.run_eagerly, model.jit_compile = around.run_eagerly, around.jit_compile
        model.steps_per_execution = around.steps_per_execution
        # Metrics have no variables before the first step.
        with contextlib.suppress(Exception):
            fit_frames.build_from(model, part_of(contents, record.calls[0].first))
        begin(model, contents)
    return model


def begin(model: keras.Model, contents: Contents) -> None:
    """Gives a model and all random generators the state from before the failure."""
    snapshots.put(model, contents.state)
    put_random(contents.random)


@contextlib.contextmanager
def _scope_of(record: Bundle) -> Iterator[None]:
    around = record.surroundings
    if not around.replicas:
        yield
        return
    with tf.distribute.MirroredStrategy(list(around.replicas)).scope():
        yield


def _loaded(path: Path, record: Bundle) -> keras.Model:
    how = (
        "Pass `--build module:function`, which returns the compiled model, or "
        "`build=` to the recorder."
    )
    if not record.has_model:
        raise ValueError(
            f"The bundle holds no model {record.model_class}, since "
            f"{record.needs_build}; expected a function that builds it. {how}"
        )
    try:
        return load_model(path, custom_objects=_classes_of(record))
    except Exception as error:  # whatever a class's constructor raises
        why = record.needs_build or f"{type(error).__name__}: {error}"
        raise ValueError(
            f"Cannot rebuild the model {record.model_class} from its file, since "
            f"{why}; expected a function that builds it. {how}"
        ) from error


def _classes_of(record: Bundle) -> dict[str, Any]:
    """Imports what the model is made of; Keras itself imports no module of a user's."""
    found = {}
    for name, place in record.classes.items():
        module, _, path = place.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            found[name] = operator.attrgetter(path)(importlib.import_module(module))
    return found


def _built(target: str, record: Bundle) -> keras.Model:
    function: Callable[..., Any] = targets.load(target)
    around = record.surroundings
    before = keras.config.dtype_policy()
    try:
        with contextlib.ExitStack() as stack:
            if around.is_managed:
                stack.enter_context(policy.scope(around.policy))
            else:
                keras.config.set_dtype_policy(around.policy)
            built = targets.call(function, seed=0, epochs=1)
    finally:
        keras.config.set_dtype_policy(before)
    model = built[0] if isinstance(built, tuple) else built
    if not isinstance(model, keras.Model) or not model.compiled:
        raise ValueError(
            f"{target!r} returned {built!r}; expected a compiled Keras model, alone or "
            "first in a tuple. Compile it as it was trained."
        )
    return model
