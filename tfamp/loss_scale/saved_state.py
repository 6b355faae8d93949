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
from tfamp.loss_scale.rule import EMPTY_WINDOW, ScaleState
from tfamp.records import checks

_MARK = "tfamp"
# iteration, learning_rate, step_counter and dynamic_scale of Keras's class.
_NUM_STOCK = 4
# Where nothing was built: of a plain optimizer, of Keras's wrapper alone, of both.
_NUMS_UNBUILT = (2, _NUM_STOCK, _NUM_STOCK + 2)
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


class Saving(keras.optimizers.LossScaleOptimizer):
    """Configuration and variables of a `LossScaleOptimizer`."""

    _loaded: list[np.ndarray] | None
    _states_at_load: Any

    @property
    def variables(self) -> list[Any]:
        """Keras's own variables, the inner optimizer's, then tfamp's."""
        own = self._variables
        inner = self.inner_optimizer.variables
        return [*own[:_NUM_STOCK], *inner, *own[_NUM_STOCK:]]

    def get_config(self) -> dict[str, Any]:
        """Returns Keras's four keys, and what differs from the defaults.

        So stock Keras loads what it can honour, and refuses the rest by name.
        """
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        config = {
            "name": self.name,
            "inner_optimizer": {**inner, _MARK: True},
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }
        rule = vars(self.rule)
        present = {k: rule[k] if k in rule else getattr(self, k) for k in _DEFAULTS}
        changed = {k: v for k, v in present.items() if v != _DEFAULTS.get(k)}
        return {**config, **changed}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Creates the optimizer from its configuration, or from stock Keras's."""
        settings = dict(config)
        inner = {k: v for k, v in settings.pop("inner_optimizer").items() if k != _MARK}
        optimizer = keras.saving.deserialize_keras_object(inner, custom_objects)
        return cls(optimizer, **settings)

    @staticmethod
    def wrote(config: dict[str, Any]) -> bool:
        """Returns whether a configuration is one of tfamp's."""
        inner = config.get("inner_optimizer")
        return isinstance(inner, dict) and _MARK in inner

    def save_own_variables(self, store: Any) -> None:
        """Puts Keras's own variables and the inner optimizer's into `store`."""
        for position, variable in enumerate(self._stock_variables()):
            store[str(position)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Takes the variables of a file; slots that are not built yet follow later.

        The file may be tfamp's, stock Keras's or that of the bare inner optimizer.
        """
        values = [np.asarray(store[str(i)]) for i in range(len(store.keys()))]
        if _is_wrapped(values):
            own = self.scale_variables.numbers()
            # Of stock Keras, which has no counters; its scale is a dynamic one.
            found = own._replace(scale=float(values[3]), good_steps=int(values[2]))
            self._states_at_load = own, found
            if self.dynamic:
                self._put(found)
        self._loaded = values
        # The inner optimizer's variables come once more; where nothing wrapped it when
        # it was saved, they do not.
        for each in (self.inner_optimizer, *hooks.leaves(self.inner_optimizer)):
            vars(each)["load_own_variables"] = functools.partial(_pass_over, each)
        if self.inner_optimizer.built:
            self._settle_loaded()

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets all variables, in the order of `variables`.

        Raises:
            ValueError: The optimizer is not built, or the arrays do not fit.
        """
        if not self.built:
            raise ValueError(
                "`set_weights` came before the optimizer was built; expected "
                "variables. Call `optimizer.build(trainable_variables)` first."
            )
        targets = self.variables
        if len(weights) == len(self._stock_variables()):
            targets = self._stock_variables()
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
        with self._on_all_replicas():
            for variable, weight in zip(targets, weights, strict=True):
                variable.assign(weight)

    def _stock_variables(self) -> list[Any]:
        return [*self._variables[:_NUM_STOCK], *self.inner_optimizer.variables]

    def _beside(self) -> dict[str, Any]:
        """Returns tfamp's own variables by the name they are saved under."""
        stored = self.scale_variables
        named = {
            "counters": stored.counters,
            "levels": stored.levels,
            "recent": stored.recent,
        }
        if self.nonfinite is not None:
            named["blame"] = self.nonfinite.counts
        for position, total in enumerate(self._accumulators):
            named[f"accumulator_{position}"] = total
        if self.has_gradient is not None:
            named["has_gradient"] = self.has_gradient
        return named

    def _take_beside(self, values: dict[str, Any]) -> None:
        """Takes tfamp's own variables of a file, after Keras's own were taken."""
        states, self._states_at_load = self._states_at_load, None
        counters, levels = values.pop("counters", None), values.pop("levels", None)
        self._loaded_beside = values
        fits = (
            states is not None
            and np.shape(counters) == (len(COUNTERS),)
            and np.shape(levels) == (len(LEVELS),)
        )
        if fits:
            own, stock = states
            numbers = [*np.asarray(counters).tolist(), *np.asarray(levels).tolist()]
            found = ScaleState(stock.scale, stock.good_steps, *numbers)
            if not (self.accumulates and "accumulator_0" in values):
                found = found._replace(**EMPTY_WINDOW)
            self._put(_after_loading(own, found))
        self._settle_beside()

    def _settle_beside(self) -> None:
        for name, variable in self._beside().items():
            value = self._loaded_beside.pop(name, None)
            if value is not None and tuple(value.shape) == tuple(variable.shape):
                with self._on_all_replicas():
                    variable.assign(value)

    def _settle_loaded(self) -> None:
        """Gives the variables that exist now what was loaded for them."""
        values, self._loaded = self._loaded, None
        with tf.init_scope():  # once, not in every call of a step that is traced now
            if self._loaded_beside:
                self._settle_beside()
            if values:
                self._settle_stock(values)

    def _settle_stock(self, values: list[np.ndarray]) -> None:
        inner = self.inner_optimizer.variables
        targets = self._stock_variables() if _is_wrapped(values) else inner
        shapes = [tuple(v.shape) for v in targets]
        if shapes != [value.shape for value in values]:
            if len(values) not in _NUMS_UNBUILT:
                warnings.warn(
                    f"The file's optimizer has {len(values)} variables that do not fit "
                    f"the {len(targets)} of {self.name!r}, so its slots begin anew. "
                    "Compile with the optimizer that was saved. "
                    f"{checks.see('failures/loaded-optimizer')}",
                    UserWarning,
                    stacklevel=4,
                )
            return
        scale = (self.step_counter, self.dynamic_scale)  # these did not have to wait
        with self._on_all_replicas():
            for variable, value in zip(targets, values, strict=True):
                if not any(variable is each for each in scale):
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
    if len(values) < _NUM_STOCK + 1:
        return False
    counter, scale = values[2], values[3]
    return counter.shape == () and counter.dtype.kind in "iu" and scale.shape == ()
