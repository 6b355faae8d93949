"""Keeps measurements of policies in files, for the next run of the same program."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from absl import logging

import tfamp
from tfamp.keras_hooks import structure, trainer
from tfamp.machine import devices
from tfamp.records.versions import installed_versions
from tfamp.tuning.measurement import Measurement

# The folder; unset, that of the user's caches.
VARIABLE = "TFAMP_CACHE"
MAX_FILES = 200


def folder() -> Path:
    """Returns the folder of the files, which need not be there."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given) / "measurements"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "tfamp" / "measurements"


def evidence_for(model: keras.Model, batch: Any) -> dict[str, Any]:
    """Returns what a measurement holds for: devices, versions, model, shapes.

    Args:
        model: A built, compiled model.
        batch: One batch as `fit` passes it.
    """
    shapes = [
        f"{leaf.dtype.name}{list(leaf.shape)}"
        for leaf in tf.nest.flatten(batch)
        if leaf is not None
    ]
    return {
        "devices": [device.name for device in devices.devices()],
        "versions": {**installed_versions(), "tfamp": tfamp.__version__},
        "threads": [
            tf.config.threading.get_intra_op_parallelism_threads(),
            os.cpu_count(),
        ],
        "model": model_digest(model),
        "batch": shapes,
    }


def model_digest(model: keras.Model) -> str:
    """Returns a digest of layers, shapes of weights, and what `compile` was given.

    Names that Keras numbers by itself do not count, dtypes neither: a measurement tries
    several.
    """
    lines = []
    for _, layer, parent in structure.walk(model):
        shapes = [tuple(weight.shape) for weight in structure.own_weights(layer)]
        config = _plain_config(layer)
        lines.append(f"{type(layer).__name__} {parent is None} {shapes} {config}")
    lines += [type(o).__name__ for o in structure.operations_of(model)]
    for name, value in sorted(trainer.compile_arguments(model).items()):
        if name not in ("jit_compile", "auto_scale_loss"):
            lines.append(f"{name} {_class_of(value)}")
    lines.append(type(model).train_step.__qualname__)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def read(evidence: Mapping[str, Any]) -> Measurement | None:
    """Returns the measurement that was made under the same circumstances, if any."""
    path = folder() / f"{_key(evidence)}.json"
    try:
        found = Measurement.from_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, OSError) as error:
        logging.warning(
            "The measurement in %s cannot be read (%s); it is made anew.", path, error
        )
        return None
    if found.evidence != json.loads(json.dumps(evidence)):
        return None
    return dataclasses.replace(found, from_cache=True)


def write(measurement: Measurement) -> None:
    """Keeps a measurement; where no file can be written, that is said."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        measurement.to_json(folder() / f"{_key(measurement.evidence)}.json")
        _drop_oldest()
    except OSError as error:
        logging.warning(
            "The measurement could not be kept in %s (%s): the next run measures "
            "again. Set %s to a folder that can be written.",
            folder(),
            error,
            VARIABLE,
        )


def all_kept() -> Iterator[Measurement]:
    """Yields the measurements that are kept, newest first, without damaged files."""
    return (found for _, found in all_files())


def all_files() -> Iterator[tuple[Path, Measurement]]:
    """Yields the files with what they hold, likewise."""
    for path in _files():
        try:
            yield path, Measurement.from_json(path)
        except (ValueError, TypeError, OSError):
            continue


def _files() -> list[Path]:
    found = []
    for path in folder().glob("*.json"):
        try:
            found.append((path.stat().st_mtime, path))
        except OSError:
            continue  # another process has dropped it
    return [path for _, path in sorted(found, reverse=True)]


def _drop_oldest() -> None:
    for path in _files()[MAX_FILES:]:
        path.unlink(missing_ok=True)


def _key(evidence: Mapping[str, Any]) -> str:
    text = json.dumps(evidence, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain_config(layer: keras.layers.Layer) -> str:
    """Returns a layer's own settings that a step depends on, as text."""
    try:
        config = layer.get_config()
    except Exception:  # a user's own class may lack it
        return ""
    left_out = ("name", "dtype", "trainable", "layers", "build_config")
    plain = {
        name: value
        for name, value in config.items()
        if name not in left_out and isinstance(value, bool | int | float | str | list)
    }
    return re.sub(r"_\d+\b", "", json.dumps(plain, sort_keys=True, default=repr))


def _class_of(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("class_name", sorted(map(str, value))))
    return value if isinstance(value, str) else type(value).__name__
