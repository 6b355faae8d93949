"""`LossScaleOptimizer`: Keras's class of that name, exact on every replica."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import optimizers as hooks
from tfamp.keras_hooks.backend import HALF
from tfamp.keras_hooks.patches import PatchSet, replaced
from tfamp.keras_hooks.workers import WORKER_HOOKS
from tfamp.loss_scale import step, stops, tape
from tfamp.loss_scale.fit_hooks import FIT_HOOKS
from tfamp.loss_scale.gradients import multiplied
from tfamp.loss_scale.rule import FROZEN, ScaleRule, ScaleState, chosen_steps
from tfamp.loss_scale.state import NUM_STOCK, SavedState, ScaleVariables
from tfamp.records import checks

_MARK = "tfamp"  # in configurations
# What every Keras optimizer has, and what acts in the inner one.
_SHARED = (
    *("weight_decay", "clipnorm", "clipvalue", "global_clipnorm"),
    *("use_ema", "ema_momentum", "ema_overwrite_frequency"),
)


def _reported(field: str, doc: str, *, is_flag: bool = False) -> property:
    """Returns a getter of a `ScaleState`: a number, or a scalar tensor in a graph."""

    def get(self: Any) -> Any:
        stored = self.scale_variables
        now = stored.numbers() if tf.executing_eagerly() else stored.read()
        return getattr(now, field) > 0 if is_flag else getattr(now, field)

    return property(get, doc=doc)


class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scales the loss, and applies only steps whose gradients are finite.

    float16 gradients below 6e-8 are 0. Multiplying the loss by a scale lifts all of
    them; it is divided out again. Gradients that a `tf.GradientTape` computes for the
    optimizer's variables are scaled there and come out true; code that calls
    `scale_loss` gets them scaled, and the optimizer divides. A step whose gradients are
    not finite on every replica and after the reduction changes no bit of any weight or
    slot; where the scale was the cause, it is lowered.

    Args:
        inner_optimizer: The optimizer to wrap, or its name. It clips the reduced,
            unscaled gradients, and counts updates.
        initial_scale: The scale to begin with, any positive number.
        dynamic_growth_steps: Finite steps in a row after which the scale grows.
        name: Name of the optimizer.
        dynamic: Whether the scale moves. A static one skips non-finite steps too;
            `initial_scale=1, dynamic=False` guards bfloat16 and float32 training.
        growth_factor: What the scale is multiplied by when it grows, above 1.
        backoff_factor: What it is multiplied by when it backs off, in (0, 1).
        hysteresis: Overflows that make it back off, counted anew when it changes.
        min_scale: Floor of a dynamic scale. Some models need a scale below 1.
        max_scale: Ceiling of a dynamic scale.
        gradient_accumulation_steps: Microbatches that make one update: the float32 mean
            of the finite ones is applied.
        accumulation_steps: The same, under a shorter name.
        max_consecutive_skips: Skipped steps in a row after which training stops with
            an error, or None for never.
        reduce_dtype: What replicas send float32 gradients in: None for float32,
            "float16", at the loss scale, or "bfloat16".
        **kwargs: What Keras's class accepts in old saved files.

    Raises:
        ValueError: An argument is out of range, or the inner optimizer scales the loss.
        TypeError: An argument has the wrong type.
        LossScaleError: In `fit` and eager loops, too many steps in a row were
            skipped. Inside a `tf.function` of your own TensorFlow raises
            `tf.errors.InvalidArgumentError` with the same text.

    Example:
        >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
        >>> weight = keras.Variable(1.0)
        >>> with tf.GradientTape() as tape:
        ...     loss = optimizer.scale_loss(weight * weight)
        >>> optimizer.apply(tape.gradient(loss, [weight.value]), [weight])
        >>> float(weight), optimizer.applied_steps, optimizer.gradient_norm
        (-1.0, 1, 2.0)
        >>> optimizer.apply([tf.constant(float("inf"))], [weight])
        >>> float(weight), optimizer.skipped_steps, optimizer.scale
        (-1.0, 1, 4.0)

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.2.
    """

    built: bool
    dynamic: bool
    accumulation_steps: int
    max_consecutive_skips: int | None
    scale = _reported("scale", "The present loss scale.")
    applied_steps = _reported("applied", "Updates that were applied.")
    skipped_steps = _reported("skipped", "Steps, or microbatches, that were skipped.")
    consecutive_skips = _reported("streak", "Steps skipped in a row up to now.")
    num_stops = _reported("num_stops", "How often too many skips stopped training.")
    gradient_norm = _reported(
        "norm", "Norm of the last step's unscaled gradients, before any clipping."
    )
    last_step_skipped = _reported(
        "streak", "Whether the last step was skipped.", is_flag=True
    )
    is_frozen = _reported("is_frozen", "Whether the scale is static now.", is_flag=True)
    # What cannot be set on the optimizer inside, since it is done here.
    done_here: tuple[str, ...] = ("loss_scale_factor", "gradient_accumulation_steps")

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
        *,
        dynamic: bool = True,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        hysteresis: int = 1,
        min_scale: float = 2.0**-14,
        max_scale: float = 2.0**24,
        gradient_accumulation_steps: int | None = None,
        accumulation_steps: int = 1,
        max_consecutive_skips: int | None = 64,
        reduce_dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        inner = inner_optimizer
        if isinstance(inner, str):
            inner = keras.optimizers.get(inner)
        _check_inner(inner)
        steps = [gradient_accumulation_steps, accumulation_steps]
        if "gradient_accumulation_steps" in self.done_here:
            steps.append(inner.gradient_accumulation_steps)
        rule = ScaleRule(
            *(initial_scale, dynamic_growth_steps, bool(dynamic), growth_factor),
            *(backoff_factor, hysteresis, min_scale, max_scale),
            *(chosen_steps(*steps), max_consecutive_skips, reduce_dtype),
        )
        if inner.loss_scale_factor is not None:
            logging.warning(
                "`loss_scale_factor=%r` of the wrapped optimizer is taken off: the "
                "wrapper scales the loss. Pass it `initial_scale` and `dynamic=False`.",
                inner.loss_scale_factor,
            )
        named = {} if name is None else {"name": name}
        super().__init__(inner, initial_scale, dynamic_growth_steps, **named, **kwargs)
        for shared in _SHARED:
            delattr(self, shared)  # `__getattr__` asks the inner optimizer
        self.rule = rule
        for field in dataclasses.fields(rule):
            setattr(self, field.name, getattr(rule, field.name))
        self.leaves_stop_to_caller = False
        self.has_gradient: Any = None
        self.accumulators: list[Any] = []
        self.has_scaled_loss = False  # `scale_loss` was called, ever
        self.was_unscaled = False  # what the next `apply` gets, by hand
        self.num_unexplained = 0  # steps of gradients whose origin nobody knows
        self.num_stops_seen = 0
        self.scale_variables = ScaleVariables(self.add_variable, rule)
        self.step_counter = self.scale_variables.step_counter
        self.dynamic_scale = self.scale_variables.dynamic_scale
        self.saved_beside = SavedState(self)
        self._is_made = True  # what only the inner one has is set there from here on
        self._come_into_use()

    def _come_into_use(self) -> None:
        """Has tapes and `fit` know of this optimizer."""
        inner = self.inner_optimizer
        if inner.gradient_accumulation_steps is not None:
            if inner.built:
                hooks.count_updates(inner)
            inner.gradient_accumulation_steps = None
        for leaf in hooks.leaves(inner):
            tape.set_judge(leaf, None)
        for held in (FIT_HOOKS, tape.TAPE_HOOKS, WORKER_HOOKS, CONFIG_HOOKS):
            held.install()
        tape.know(self)

    @property
    def nonfinite_variables(self) -> tuple[str, ...]:
        """Paths of the variables whose gradients the last skipped step failed on."""
        return self.scale_variables.blamed()

    def freeze(self, value: float | None = None) -> None:
        """Makes the scale static from here on, in functions traced before as well.

        `value` is the scale to keep, a positive finite number; None the present one.
        """
        now = self.scale_variables.numbers()
        scale = now.scale if value is None else checks.positive("value", value)
        self.put(now._replace(scale=scale, good_steps=0, is_frozen=FROZEN))

    def unfreeze(self) -> None:
        """Makes the scale dynamic from here on."""
        now = self.scale_variables.numbers()
        self.put(now._replace(good_steps=0, is_frozen=0))

    def put(self, values: ScaleState) -> None:
        """Stores plain numbers on every replica."""
        with hooks.scope_of(hooks.strategy_of(self)):
            self.scale_variables.write(values)

    def raise_if_due(self) -> None:
        """Raises `LossScaleError` where the last step completed a streak."""
        limit = self.max_consecutive_skips
        if limit is not None and self.scale_variables.numbers().streak >= limit:
            raise stops.error_of(self)

    def scale_loss(self, loss: Any) -> Any:
        """Returns `loss` times the loss scale; a half-precision loss as float32."""
        loss = tf.convert_to_tensor(loss)
        if loss.dtype in HALF:
            loss = tf.cast(loss, tf.float32)
        scale = tf.convert_to_tensor(self.dynamic_scale.value)
        self.has_scaled_loss = True
        if not loss.dtype.is_floating:
            return loss * tf.cast(scale, loss.dtype)
        return tape.scaled_by_hand(loss, scale, is_ours=True)

    def get_scaled_loss(self, loss: Any) -> Any:
        """As `scale_loss`; takes a callable too and returns one, as legacy Keras."""
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Returns gradients of a scaled loss divided by the scale.

        The next `apply` or `apply_gradients` takes them as they are, as legacy Keras.
        """
        self.was_unscaled = True
        factor = 1 / tf.convert_to_tensor(self.dynamic_scale.value)
        return [None if g is None else multiplied(g, factor) for g in grads]

    def build(self, var_list: Sequence[Any]) -> None:
        """Creates the slots of the inner optimizer and the accumulators."""
        if self.built:
            return
        variables = list(var_list)
        if self.inner_optimizer.built:
            variables = hooks.trained_by(self.inner_optimizer) or variables
        else:
            self.inner_optimizer.build(variables)
        for position, variable in enumerate(variables):
            self._trainable_variables_indices[self._var_key(variable)] = position
        self.scale_variables.build(variables, self.add_variable)
        if self.accumulates:
            extended, totals = self._distribution_strategy.extended, []
            for each in variables:
                dtype = "float64" if each.dtype == "float64" else "float32"
                with extended.colocate_vars_with(getattr(each, "value", each)):
                    total = self.add_variable(
                        each.shape, dtype=dtype, name="accumulator"
                    )
                totals.append(total)
            self.accumulators = totals
            shape = (len(variables),)
            self.has_gradient = self.add_variable(shape, "zeros", "bool", name="given")
        # Not by an attribute, which Keras would take for variables of its own.
        object.__setattr__(self, "_trainable_variables", variables)
        self.built = True
        self._own(variables)
        self.saved_beside.assign_loaded()

    def _own(self, variables: Sequence[Any]) -> None:
        """Has tapes take this scale for variables, and what others read follow it."""
        for each in tape.own(self, variables):
            self.scale_variables.followers.append(each.dynamic_scale)

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None
    ) -> None:
        """Makes an update of the gradients, if they are finite everywhere.

        What a `tf.GradientTape` gave since the last update counts as unscaled, unless
        the loss went through `scale_loss`; gradients of any other origin are divided
        by the scale. On several replicas each passes its own; their sum is applied.

        Raises:
            ValueError: Called outside a replica, with no gradients at all or with
                variables that are not the optimizer's own.
            LossScaleError: Too many updates in a row were skipped, in eager code.
        """
        kept = (type(None), tf.IndexedSlices)
        gradients = [
            g if isinstance(g, kept) else tf.convert_to_tensor(g) for g in grads
        ]
        if not gradients:
            return
        if trainable_variables is None and not self.built:
            raise ValueError(
                "`trainable_variables` is None and the optimizer is not built; "
                "expected variables. Pass them, or call `build(variables)` first."
            )
        variables = list(trainable_variables or hooks.trained_by(self))
        if len(variables) != len(gradients):
            raise ValueError(
                f"`grads` has {len(gradients)} entries for {len(variables)} variables; "
                "expected one for each. Pass None where a variable has no gradient."
            )
        if all(gradient is None for gradient in gradients):
            raise ValueError("No gradients provided for any variable.")
        with tf.name_scope(self.name):
            self.build(variables)
            hooks.check_known(self, variables)
            self._check_use()
            self._own(variables)
            update = tape.HERE.update or self.inner_optimizer.apply
            step.take(self, gradients, variables, update)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """As `apply`, on pairs of gradient and variable; returns `iterations`."""
        gradients, variables = zip(*grads_and_vars, strict=True)

        def update(gradients: Any, variables: Any) -> None:  # it may be overridden
            pairs = zip(gradients, variables, strict=True)
            self.inner_optimizer.apply_gradients(pairs)

        with replaced(tape.HERE, update=update):
            self.apply(gradients, variables)
        return self.iterations

    def _check_use(self) -> None:
        """Raises where a setting or a place would spoil the update."""
        for name in self.done_here:
            for each in (self, self.inner_optimizer):
                if (value := getattr(each, name, None)) is not None:
                    raise ValueError(
                        f"`{name}` of {each.name!r} is {value!r}; expected None, since "
                        "the wrapper does it. Pass it to the constructor of a "
                        "LossScaleOptimizer, a static scale as `initial_scale` with "
                        "`dynamic=False`."
                    )
        if tf.distribute.in_cross_replica_context():
            raise ValueError(
                "apply() must be called in a replica context. Call it inside the "
                "function that `strategy.run` runs."
            )
        strategy, ours = tf.distribute.get_strategy(), hooks.strategy_of(self)
        if strategy.num_replicas_in_sync > 1 and ours is not strategy:
            raise ValueError(
                f"The optimizer was made outside the {type(strategy).__name__} that "
                "trains with it; its counters would differ between replicas. Make and "
                "compile it inside `with strategy.scope():`."
            )

    # What a step asks of it.
    @property
    def accumulates(self) -> bool:
        """Whether an update takes more than one microbatch."""
        return self.accumulation_steps > 1

    @property
    def shared_clip(self) -> float | None:
        """The inner optimizer's `global_clipnorm`, which needs the norm at hand."""
        inner = self.inner_optimizer
        # Each of several optimizers clips its own part, and a sum who adds it up.
        adds_up = inner.gradient_accumulation_steps is not None
        is_alone = len(hooks.leaves(inner)) == 1 and not adds_up
        return (inner.global_clipnorm or None) if is_alone else None

    def position_of(self, variable: Any) -> int:
        """Returns the place of a variable, whichever replica it comes from."""
        return int(self._get_variable_index(variable))

    def is_overwritten(self, variable: Any) -> bool:
        """Returns whether a variable takes its gradient as its value, unscaled."""
        return bool(self._overwrite_variable_with_gradient(variable))

    def flush(self) -> None:
        """Applies the mean of the microbatches in a window that is not full.

        `fit` does it at the end of each epoch; in a loop of your own call it at the
        end, or before the weights are evaluated. Does nothing where there are none.
        """
        step.on_window(self, applies=True)

    @property
    def own_variables(self) -> list[Any]:
        """Keras's own variables, then tfamp's."""
        return list(self._variables)

    @property
    def stock_variables(self) -> list[Any]:
        """What Keras's class has: its own variables and the inner optimizer's."""
        return [*self._variables[:NUM_STOCK], *self.inner_optimizer.variables]

    @property
    def variables(self) -> list[Any]:
        """Those of Keras's class, then tfamp's."""
        return [*self.stock_variables, *self._variables[NUM_STOCK:]]

    def get_config(self) -> dict[str, Any]:
        """Returns Keras's four keys, and what differs from the defaults.

        So stock Keras loads what it can honor, and refuses the rest by name.
        """
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        config = {
            "name": self.name,
            "inner_optimizer": {**inner, _MARK: True},
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }
        for field in dataclasses.fields(ScaleRule):
            value = getattr(self, field.name)
            if value != field.default:
                config[field.name] = value
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Creates the optimizer from its configuration, or from stock Keras's."""
        inner = {k: v for k, v in config["inner_optimizer"].items() if k != _MARK}
        made = keras.saving.deserialize_keras_object(inner, custom_objects)
        return cls(**{**config, "inner_optimizer": made})

    def save_own_variables(self, store: Any) -> None:
        """Puts Keras's own variables and the inner optimizer's into `store`."""
        for position, variable in enumerate(self.stock_variables):
            store[str(position)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Takes the variables of a file; slots that are not built yet follow later."""
        self.saved_beside.load_stock(store)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets all variables, in the order of `variables`, or those of Keras's class.

        Raises ValueError where it is not built, or the arrays do not fit.
        """
        targets = self.stock_variables
        if len(weights) != len(targets):
            targets = self.variables
        if not self.built or len(weights) != len(targets):
            raise ValueError(
                f"`weights` has {len(weights)} arrays for {len(targets)} variables; "
                "expected one for each of a built optimizer. Call `build(variables)` "
                "first, and pass the arrays in the order of `variables`."
            )
        self.assign_all(targets, weights)

    def assign_all(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Assigns values on every replica."""
        with hooks.scope_of(hooks.strategy_of(self)):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Excludes variables from the inner optimizer's weight decay."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Reads a public attribute that acts in the inner optimizer."""
        inner = vars(self).get("inner_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets on the inner optimizer what only that one has, as its momentum."""
        own = vars(self)
        is_ours = name.startswith("_") or name in own or hasattr(type(self), name)
        inner = own.get("inner_optimizer") if own.get("_is_made") else None
        if inner is not None and not is_ours and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)


def _check_inner(inner: Any) -> None:
    """Raises where `inner` cannot be wrapped."""
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            f"`inner_optimizer` is {inner!r}, of type {type(inner).__name__}; expected "
            "a Keras optimizer. Pass `keras.optimizers.Adam()`, or its name."
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"`inner_optimizer` is {inner!r}, which scales the loss already; expected "
            "a plain optimizer. Pass its `inner_optimizer`."
        )


# So that Keras's own `load_model` and `optimizers.get` give what was saved.
CONFIG_HOOKS = PatchSet([hooks.config_patch(LossScaleOptimizer, _MARK)])
