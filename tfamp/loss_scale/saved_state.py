"""State of a loss-scale optimizer in files, in a layout that stock Keras reads."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import optimizers as hooks
from tfamp.loss_scale.counters import COUNTERS, LEVELS, STATIC
from tfamp.loss_scale.replicas import on_all_replicas
from tfamp.loss_scale.rule import EMPTY_WINDOW, ScaleState
from tfamp.records import checks

_MARK = "tfamp"
# iteration, learning_rate, step_counter and dynamic_scale of Keras's class.
NUM_STOCK = 4
# Where nothing was built: of a plain optimizer, of Keras's wrapper alone, of both.
_NUMS_UNBUILT = (2, NUM_STOCK, NUM_STOCK + 2)
# Those of the constructor; what equals them stays out of a configuration.
_DEFAULTS: dict[str, Any] = {
    "dynamic": True,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "hysteresis": 1,
    "min_scale": 2.0**-14,
    "max_scale": 2.0**24,
    "accumulation_steps": 1,
    "max_consecutive_skips": 64,
    "reduce_dtype": None,
}


def config_of(optimizer: Any) -> dict[str, Any]:
    """Returns the configuration of a `LossScaleOptimizer`."""
    inner = keras.saving.serialize_keras_object(optimizer.inner_optimizer)
    rule = vars(optimizer.rule)
    present = {k: rule[k] if k in rule else getattr(optimizer, k) for k in _DEFAULTS}
    return {
        "name": optimizer.name,
        "inner_optimizer": {**inner, _MARK: True},
        "initial_scale": optimizer.initial_scale,
        "dynamic_growth_steps": optimizer.dynamic_growth_steps,
        **{k: v for k, v in present.items() if v != _DEFAULTS[k]},
    }


def arguments_in(config: dict[str, Any], custom_objects: Any) -> dict[str, Any]:
    """Returns the arguments of the constructor that a configuration has."""
    inner = {k: v for k, v in config["inner_optimizer"].items() if k != _MARK}
    made = keras.saving.deserialize_keras_object(inner, custom_objects)
    return {**config, "inner_optimizer": made}


def wrote(config: dict[str, Any]) -> bool:
    """Returns whether a configuration is one of tfamp's."""
    inner = config.get("inner_optimizer")
    return isinstance(inner, dict) and _MARK in inner


def stock_variables(optimizer: Any) -> list[Any]:
    """Returns what Keras's class has: its own variables and the inner optimizer's."""
    own = optimizer.own_variables[:NUM_STOCK]
    return [*own, *optimizer.inner_optimizer.variables]


def set_weights(optimizer: Any, weights: Sequence[Any]) -> None:
    """Sets all variables of an optimizer, or those that Keras's class has."""
    if not optimizer.built:
        raise ValueError(
            "`set_weights` came before the optimizer was built; expected "
            "variables. Call `optimizer.build(trainable_variables)` first."
        )
    targets = stock_variables(optimizer)
    if len(weights) != len(targets):
        targets = optimizer.variables
    if len(weights) != len(targets):
        raise ValueError(
            f"`weights` has {len(weights)} arrays for {len(targets)} variables; "
            "expected one for each. Pass `[v.numpy() for v in "
            "optimizer.variables]` of an optimizer made alike."
        )
    for variable, weight in zip(targets, weights, strict=True):
        if tuple(variable.shape) != tuple(np.shape(weight)):
            raise ValueError(
                f"`weights` has an array of shape {tuple(np.shape(weight))} for "
                f"variable {variable.path!r}; expected {tuple(variable.shape)}. "
                "Pass the arrays in the order of `optimizer.variables`."
            )
    _assign(optimizer, targets, weights)


class SavedState(hooks.SavedBeside):
    """tfamp's own variables, saved beside those of Keras's class.

    It holds what was loaded for variables that are not built yet.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__("loss_scale_state", self._named, self._take)
        # No attribute of its own, which Keras would take for a part to save.
        self._owner = lambda: optimizer
        self._stock: list[np.ndarray] | None = None
        self._beside: dict[str, Any] = {}
        self._states: tuple[ScaleState, ScaleState] | None = None

    def _named(self) -> dict[str, Any]:
        """Returns tfamp's own variables by the name they are saved under."""
        optimizer, stored = self._owner(), self._owner().scale_variables
        named = {
            name: getattr(stored, name) for name in ("counters", "levels", "recent")
        }
        if optimizer.built:
            named["blame"] = stored.blame
            for position, total in enumerate(optimizer.accumulators):
                named[f"accumulator_{position}"] = total
        if optimizer.has_gradient is not None:
            named["has_gradient"] = optimizer.has_gradient
        return named

    def load_stock(self, store: Any) -> None:
        """Takes the variables that Keras's class has, ahead of the others."""
        optimizer = self._owner()
        values = [np.asarray(store[str(i)]) for i in range(len(store.keys()))]
        if _is_wrapped(values):
            present = optimizer.scale_variables.numbers()
            # Of stock Keras, which has no counters; its scale is a dynamic one.
            found = present._replace(scale=float(values[3]), good_steps=int(values[2]))
            self._states = present, found
            if optimizer.dynamic:
                optimizer.put(found)
        self._stock = values
        inner = optimizer.inner_optimizer
        # The inner optimizer's variables come once more; where nothing wrapped it when
        # it was saved, they do not.
        for each in (inner, *hooks.leaves(inner)):
            vars(each)["load_own_variables"] = functools.partial(_pass_over, each)
        if inner.built:
            self.assign_loaded()

    def _take(self, values: dict[str, Any]) -> None:
        """Takes tfamp's own variables of a file, after Keras's own were taken."""
        optimizer = self._owner()
        states, self._states = self._states, None
        counters, levels = values.pop("counters", None), values.pop("levels", None)
        self._beside = values
        fits = np.shape(counters) == (len(COUNTERS),) and (
            np.shape(levels) == (len(LEVELS),)
        )
        if states is not None and fits:
            present, stock = states
            numbers = [*np.asarray(counters).tolist(), *np.asarray(levels).tolist()]
            found = ScaleState(stock.scale, stock.good_steps, *numbers)
            if not (optimizer.accumulates and "accumulator_0" in values):
                found = found._replace(**EMPTY_WINDOW)
            optimizer.put(_after_loading(present, found))
        self._assign_beside()

    def assign_loaded(self) -> None:
        """Gives the variables that exist now what was loaded for them."""
        values, self._stock = self._stock, None
        with tf.init_scope():  # once, not in every call of a step that is traced now
            self._assign_beside()
            if values:
                self._assign_stock(values)

    def _assign_beside(self) -> None:
        for name, variable in self._named().items():
            value = self._beside.pop(name, None)
            if value is not None and tuple(value.shape) == tuple(variable.shape):
                _assign(self._owner(), [variable], [value])

    def _assign_stock(self, values: list[np.ndarray]) -> None:
        optimizer, targets = self._owner(), stock_variables(self._owner())
        if not _is_wrapped(values):
            targets = optimizer.inner_optimizer.variables
        if [tuple(v.shape) for v in targets] != [value.shape for value in values]:
            if len(values) not in _NUMS_UNBUILT:
                warnings.warn(
                    f"The file's optimizer has {len(values)} variables that do not fit "
                    f"the {len(targets)} of {optimizer.name!r}, so its slots begin "
                    "anew. Compile with the optimizer that was saved. "
                    f"{checks.see('failures/loaded-optimizer')}",
                    UserWarning,
                    stacklevel=4,
                )
            return
        # The scale and its counter did not have to wait.
        scale = optimizer.step_counter, optimizer.dynamic_scale
        pairs = zip(targets, values, strict=True)
        late = [(v, x) for v, x in pairs if not any(v is each for each in scale)]
        _assign(optimizer, [v for v, _ in late], [x for _, x in late])


def _assign(optimizer: Any, variables: Sequence[Any], values: Sequence[Any]) -> None:
    with on_all_replicas(optimizer):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def _after_loading(own: ScaleState, found: ScaleState) -> ScaleState:
    """Returns the state after loading one of a file that tfamp wrote.

    A scale that its constructor made static is the constructor's; counters go to any.
    """
    if own.is_frozen == STATIC == found.is_frozen:
        return found._replace(scale=own.scale)
    is_moving_into_static = own.is_frozen == STATIC and not found.is_frozen
    if found.is_frozen != STATIC and not is_moving_into_static:
        return found
    return found._replace(
        scale=own.scale,
        good_steps=own.good_steps,
        streak=0,
        overflows=0,
        is_frozen=own.is_frozen,
        scale_before=own.scale,
    )


def _pass_over(optimizer: Any, store: Any) -> None:
    """Stands in once for `load_own_variables`, where the wrapper has taken it all."""
    vars(optimizer).pop("load_own_variables", None)


def _is_wrapped(values: list[np.ndarray]) -> bool:
    """Returns whether a file's variables begin with those of a loss scale."""
    if len(values) < NUM_STOCK + 1:
        return False
    counter, scale = values[2], values[3]
    return counter.shape == () and counter.dtype.kind in "iu" and scale.shape == ()
