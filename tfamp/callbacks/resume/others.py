"""What else a training holds: other callbacks, the history, random numbers."""

import random
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfamp.keras_hooks import epochs

# Keras's callbacks that judge later epochs by earlier ones, and where they hold that.
_HELD: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: (
        *("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    ),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: (
        *("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    ),
}
# Those that hold nothing which training depends on.
_HOLD_NOTHING = (
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
    keras.callbacks.LambdaCallback,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
    keras.callbacks.TerminateOnNaN,
)
# Arrays of callbacks in a state, beside those of the model.
PREFIX = "callbacks/"


def take_callbacks(
    callbacks: Sequence[Any],
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Returns what callbacks hold: numbers in their order, and arrays by name."""
    records: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for i, each in enumerate(callbacks):
        held: dict[str, Any] = {}
        for name, value in _state_of(each).items():
            if isinstance(value, (list, tuple)):
                for k, array in enumerate(value):
                    arrays[f"{PREFIX}{i}/{name}/{k}"] = np.array(array)
                held[name] = {"arrays": len(value)}
            else:
                held[name] = _plain(value)
        records.append({"class": type(each).__name__, "state": held})
    return records, arrays


def put_callbacks(
    callbacks: Sequence[Any],
    records: Sequence[dict[str, Any]],
    arrays: dict[str, np.ndarray],
) -> None:
    """Gives callbacks what those of the same classes, in their order, held."""
    used: set[int] = set()
    for each in callbacks:
        for i, record in enumerate(records):
            if i not in used and record["class"] == type(each).__name__:
                used.add(i)
                _put_state(each, _values(i, record["state"], arrays))
                break


def without_state(callbacks: Sequence[Any]) -> list[str]:
    """Returns the names of classes whose state is not kept, as nothing tells it."""
    found = [
        type(each).__name__
        for each in callbacks
        if not isinstance(each, (*_HELD, *_HOLD_NOTHING))
        and not type(each).__module__.startswith("tfamp.")
        and not _tells(each)
    ]
    return sorted(set(found))


def take_history(model: keras.Model) -> dict[str, Any]:
    """Returns the epochs and the logs of a model's `History` so far."""
    history = getattr(model, "history", None)
    if history is None:
        return {"epoch": [], "logs": {}}
    logs = {}
    for name, values in history.history.items():
        try:
            logs[name] = [float(value) for value in values]
        except (TypeError, ValueError):
            continue
    return {"epoch": [int(epoch) for epoch in history.epoch], "logs": logs}


def put_history(model: keras.Model, held: dict[str, Any]) -> None:
    """Puts the logs of earlier epochs in front of those to come."""
    history = getattr(model, "history", None)
    if history is not None:
        history.epoch[:] = held["epoch"]
        history.history.clear()
        history.history.update({k: list(v) for k, v in held["logs"].items()})


def take_random() -> dict[str, Any]:
    """Returns the states of Python's and NumPy's generators, and of Keras's own."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = epochs.global_seed_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "keras": None if state is None else np.asarray(state).tolist(),
    }


def put_random(held: dict[str, Any]) -> None:
    """Puts back what `take_random` gave, also where JSON has made lists of it."""
    version, keys, gauss = held["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, keys, *rest = held["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    state = epochs.global_seed_state()
    if state is not None and held["keras"] is not None:
        state.assign(np.array(held["keras"], state.dtype))


def _state_of(callback: Any) -> dict[str, Any]:
    if _tells(callback):
        return dict(callback.get_state())
    for kind, names in _HELD.items():
        if isinstance(callback, kind):
            return {name: getattr(callback, name, None) for name in names}
    return {}


def _put_state(callback: Any, values: dict[str, Any]) -> None:
    if _tells(callback):
        callback.set_state(values)
        return
    for name, value in values.items():
        setattr(callback, name, value)


def _tells(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _values(
    place: int, held: dict[str, Any], arrays: dict[str, np.ndarray]
) -> dict[str, Any]:
    values = dict(held)
    for name, value in held.items():
        if isinstance(value, dict) and value.keys() == {"arrays"}:
            keys = [f"{PREFIX}{place}/{name}/{k}" for k in range(value["arrays"])]
            values[name] = [arrays[key] for key in keys]
    return values


def _plain(value: Any) -> Any:
    """Returns what JSON can hold of a number."""
    if value is None or isinstance(value, (bool, int, str, dict)):
        return value
    return float(value)
