"""The variables of a loss-scale optimizer, and how files hold them.

A file has what Keras's class has, in a layout that stock Keras reads, and tfamp's own
variables beside it.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import optimizers as hooks
from tfamp.loss_scale.rule import EMPTY_WINDOW, STATIC, ScaleRule, ScaleState
from tfamp.records import checks

# iteration, learning_rate, step_counter and dynamic_scale of Keras's class.
NUM_STOCK = 4
# The whole numbers and the real ones of a `ScaleState`, in the order of files.
_WHOLE, _REAL = slice(2, 11), slice(11, None)
COUNTERS, LEVELS = ScaleState._fields[_WHOLE], ScaleState._fields[_REAL]


class ScaleVariables:
    """A `ScaleState` in as few variables as can be, and the blame for a skip.

    Each variable costs a step a read and a write, whatever its size. `add_variable` is
    the optimizer's; the first two variables are those of Keras's class.
    """

    def __init__(self, add_variable: Callable[..., Any], rule: ScaleRule) -> None:
        start = float(rule.initial_scale)
        first = ScaleState(start, is_frozen=0 if rule.dynamic else STATIC)

        def add(name: str, dtype: str, value: Any, shape: tuple[int, ...] = ()) -> Any:
            start = keras.initializers.Constant(value)
            return add_variable(shape, initializer=start, dtype=dtype, name=name)

        self.step_counter = add("step_counter", "int", 0)
        self.dynamic_scale = add("dynamic_scale", "float32", start)
        self.counters = add("counters", "int64", first[_WHOLE], (len(COUNTERS),))
        self.levels = add("levels", "float32", first[_REAL], (len(LEVELS),))
        self.blame: Any = None  # 1 for each variable with a part in the last skip
        self._paths: list[str] = []
        self.followers: list[Any] = []  # scales that move with this one

    def build(self, variables: Sequence[Any], add_variable: Callable[..., Any]) -> None:
        """Makes what names the variables to blame."""
        self._paths = [getattr(v, "path", v.name) for v in variables]
        self.blame = add_variable((len(variables),), dtype="int64", name="blame")

    def read(self) -> ScaleState:
        """Returns the present values as scalar tensors."""
        return ScaleState(
            tf.convert_to_tensor(self.dynamic_scale.value),
            tf.cast(self.step_counter.value, tf.int64),
            *tf.unstack(tf.convert_to_tensor(self.counters.value)),
            *tf.unstack(tf.convert_to_tensor(self.levels.value)),
        )

    def write(self, state: ScaleState) -> None:
        """Stores numbers, or what a step has made of those that were read."""
        for scale in (self.dynamic_scale, *self.followers):
            scale.assign(state.scale)
        self.step_counter.assign(state.good_steps)
        self.counters.assign(tf.stack([tf.cast(x, tf.int64) for x in state[_WHOLE]]))
        self.levels.assign(tf.stack([tf.cast(x, tf.float32) for x in state[_REAL]]))

    def numbers(self) -> ScaleState:
        """Returns the present values as plain numbers; reads from the device."""
        # Not `np.asarray`, which fails on a distributed scalar inside a scope.
        return ScaleState(
            float(self.dynamic_scale.numpy()),
            int(self.step_counter.numpy()),
            *self.counters.numpy().tolist(),
            *self.levels.numpy().tolist(),
        )

    def note(self, positions: Sequence[int], squares: tf.Tensor) -> None:
        """Blames the variables at `positions` whose sum of squares is not finite."""
        if positions:
            flags = tf.cast(~tf.math.is_finite(squares), tf.int64)
            indices = [[position] for position in positions]
            self.blame.assign(tf.scatter_nd(indices, flags, [len(self._paths)]))

    def blamed(self) -> tuple[str, ...]:
        """Returns the paths of the variables to blame for the last skipped step."""
        flags = () if self.blame is None else np.asarray(self.blame.value)
        return tuple(p for p, flag in zip(self._paths, flags, strict=False) if flag)


class SavedState(hooks.SavedBeside):
    """tfamp's own variables, saved beside those of Keras's class.

    It holds what was loaded for variables that are not built yet.
    """

    def __init__(self, optimizer: Any) -> None:
        # No attribute of its own, which Keras would take for a part to save.
        self._owner = lambda: optimizer
        self.name = "loss_scale_state"
        self._before: ScaleState | None = None  # ahead of loading
        self._stock: list[np.ndarray] = []
        self._beside: dict[str, Any] = {}

    def _named(self) -> dict[str, Any]:
        """Returns tfamp's own variables by the name they are saved under."""
        optimizer = self._owner()
        stored = optimizer.scale_variables
        named = {"counters": stored.counters, "levels": stored.levels}
        if optimizer.built:
            named["blame"] = stored.blame
        for position, total in enumerate(optimizer.accumulators):
            named[f"accumulator_{position}"] = total
            named["has_gradient"] = optimizer.has_gradient
        return named

    def save_own_variables(self, store: Any) -> None:
        """Puts tfamp's own variables into `store`, by name."""
        for name, variable in self._named().items():
            store[name] = variable.numpy()

    def load_stock(self, store: Any) -> None:
        """Takes the variables that Keras's class has, ahead of the others."""
        optimizer = self._owner()
        self._stock = [np.asarray(store[str(i)]) for i in range(len(store.keys()))]
        self._before = now = optimizer.scale_variables.numbers()
        if [v.shape for v in self._stock[2:4]] == [(), ()]:
            good_steps, scale = self._stock[2:4]
            scale = scale if optimizer.dynamic else now.scale
            optimizer.put(now._replace(scale=scale, good_steps=good_steps))
        # The inner optimizer's variables come once more.
        inner = optimizer.inner_optimizer
        for each in (inner, *hooks.leaves(inner)):
            vars(each)["load_own_variables"] = functools.partial(_pass_over, each)
        if inner.built:
            self.assign_loaded()

    def load_own_variables(self, store: Any) -> None:
        """Takes tfamp's own variables of a file, after Keras's own were taken.

        A static scale of a constructor goes to no dynamic one, nor the other way round.
        """
        optimizer, before = self._owner(), self._before
        values = {name: store[name][()] for name in store.keys()}
        counters, levels = values.pop("counters", ()), values.pop("levels", ())
        if before and (len(counters), len(levels)) == (len(COUNTERS), len(LEVELS)):
            now = optimizer.scale_variables.numbers()
            found = ScaleState(*now[:2], *counters.tolist(), *levels.tolist())
            if STATIC in (before.is_frozen, found.is_frozen):
                kept = ["scale", "is_frozen"]
                if before.is_frozen != found.is_frozen:  # they count another's steps
                    kept += ["good_steps", "streak", "overflows"]
                found = found._replace(**{k: getattr(before, k) for k in kept})
            if not (optimizer.accumulates and "accumulator_0" in values):
                found = found._replace(**EMPTY_WINDOW)
            optimizer.put(found)
        self._beside = values
        self._assign_beside()

    def assign_loaded(self) -> None:
        """Gives the variables that exist now what was loaded for them."""
        optimizer, values, self._stock = self._owner(), self._stock, []
        targets = optimizer.stock_variables
        with tf.init_scope():  # once, not in every call of a step that is traced now
            self._assign_beside()
            if [tuple(v.shape) for v in targets] == [value.shape for value in values]:
                # The scale and its counter did not have to wait.
                for part in (slice(0, 2), slice(NUM_STOCK, None)):
                    optimizer.assign_all(targets[part], values[part])
            elif len(values) > NUM_STOCK + 2:
                warnings.warn(
                    f"The file's optimizer has {len(values)} variables that do not fit "
                    f"the {len(targets)} of {optimizer.name!r}, so its slots begin "
                    "anew. Compile with the optimizer that was saved. "
                    f"{checks.see('failures/loaded-optimizer')}",
                    UserWarning,
                    stacklevel=4,
                )

    def _assign_beside(self) -> None:
        for name, variable in self._named().items():
            value = self._beside.pop(name, None)
            if value is not None and value.shape == tuple(variable.shape):
                self._owner().assign_all([variable], [value])


def _pass_over(optimizer: Any, store: Any) -> None:
    """Stands in once for `load_own_variables`, where the wrapper has taken it all."""
    vars(optimizer).pop("load_own_variables", None)
