"""`LossScaleOptimizer`: Keras's class of that name, exact on every replica."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import optimizers as hooks
from tfamp.keras_hooks.backend import HALF
from tfamp.keras_hooks.patches import PatchSet, replaced
from tfamp.keras_hooks.variables import READ_HOOKS
from tfamp.keras_hooks.workers import WORKER_HOOKS
from tfamp.loss_scale import saved_state, step, stops
from tfamp.loss_scale.arguments import (
    adopted_accumulation,
    check_inner,
    check_inner_settings,
    check_settings,
    chosen_steps,
    variables_for,
)
from tfamp.loss_scale.attributes import (
    INNER,
    SHARED,
    only_eager,
    refused,
    reported,
    shared,
)
from tfamp.loss_scale.candidates import know
from tfamp.loss_scale.counters import FROZEN, ScaleVariables
from tfamp.loss_scale.fit_hooks import FIT_HOOKS
from tfamp.loss_scale.gradients import check_reduce_dtype, multiplied
from tfamp.loss_scale.replicas import on_all_replicas
from tfamp.loss_scale.rule import ScaleState
from tfamp.loss_scale.scales import HERE, note_unscaled, own, scaled_by_hand
from tfamp.loss_scale.tape import TAPE_HOOKS
from tfamp.records import checks


class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scales the loss, and applies only steps whose gradients are finite.

    float16 gradients below 6e-8 are 0. Multiplying the loss by a scale lifts all of
    them; it is divided out again. Gradients that a `tf.GradientTape` computes for the
    optimizer's variables are scaled there and come out true; code that calls
    `scale_loss` gets them scaled, and the optimizer divides. A step whose gradients are
    not finite on every replica and after the reduction changes no bit of any weight or
    slot; where the scale was the cause, it is lowered. Under `tfamp.enable`, every
    optimizer of a model is wrapped wherever a layer computes in float16.

    Args:
        inner_optimizer: The optimizer to wrap, or its name. Its clipping acts on the
            reduced, unscaled gradients; its iterations, learning-rate schedule, weight
            decay and averages advance once an update.
        initial_scale: The scale to begin with, any positive number.
        dynamic_growth_steps: Finite steps in a row after which the scale grows.
        name: Name of the optimizer.
        dynamic: Whether the scale moves. A static one skips non-finite steps too;
            `initial_scale=1, dynamic=False` guards bfloat16 and float32 training.
        growth_factor: What the scale is multiplied by when it grows, above 1.
        backoff_factor: What it is multiplied by when it backs off, in (0, 1).
        hysteresis: Overflows that make it back off.
        min_scale: Floor of a dynamic scale. Some models need a scale below 1.
        max_scale: Ceiling of a dynamic scale.
        gradient_accumulation_steps: Microbatches that make one update. Their mean is
            applied, added up in float32; non-finite ones do not count.
        accumulation_steps: The same, under a shorter name.
        max_consecutive_skips: Skipped steps in a row after which training stops with
            an error, or None for never.
        reduce_dtype: What replicas send float32 gradients in to add them up: None for
            float32, "float16", "bfloat16", or "auto" for what the layer of each weight
            computed in, which loses nothing but in the sum. float16 is sent at the
            loss scale, and a sum that overflows is a skipped step.
        **kwargs: What Keras's class accepts in old saved files.

    Raises:
        ValueError: An argument is out of range, or the inner optimizer scales the
            loss or accumulates by itself.
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
        if isinstance(inner_optimizer, str):
            inner_optimizer = keras.optimizers.get(inner_optimizer)
        check_inner(inner_optimizer)
        check_reduce_dtype(reduce_dtype)
        accumulation_steps = chosen_steps(
            gradient_accumulation_steps, accumulation_steps
        )
        rule, start = check_settings(
            initial_scale,
            dynamic_growth_steps,
            dynamic=dynamic,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
            max_consecutive_skips=max_consecutive_skips,
        )
        factor = getattr(inner_optimizer, "loss_scale_factor", None)
        if name is not None:
            kwargs["name"] = name
        super().__init__(inner_optimizer, start, dynamic_growth_steps, **kwargs)
        if factor is not None:
            logging.warning(
                "`loss_scale_factor=%r` of the wrapped optimizer is taken off: the "
                "wrapper scales the loss. Pass it `initial_scale=%r, dynamic=False` "
                "for that static scale.",
                factor,
                factor,
            )
        self.initial_scale = initial_scale
        self.rule = rule
        self.dynamic = bool(dynamic)
        self.accumulation_steps = accumulation_steps
        self.max_consecutive_skips = max_consecutive_skips
        self.reduce_dtype = reduce_dtype
        self.leaves_stop_to_caller = False
        self.has_gradient: Any = None
        self.has_scaled_loss = False  # `scale_loss` was called, ever
        self.was_unscaled = False  # what the next `apply` gets, by hand
        self.accumulators: list[Any] = []
        self.num_stops_seen = 0
        self._entry = "apply"  # as in `HERE`
        self.scale_variables = ScaleVariables(
            self.add_variable, start, is_static=not self.dynamic
        )
        self.step_counter = self.scale_variables.step_counter
        self.dynamic_scale = self.scale_variables.dynamic_scale
        self.saved_beside = saved_state.SavedState(self)
        self._is_made = True  # what only the inner one has is set there from here on
        self._come_into_use()

    def _come_into_use(self) -> None:
        """Has tapes, `fit` and the layers that it may ask know of this optimizer."""
        self.accumulation_steps = adopted_accumulation(
            self.inner_optimizer, self.accumulation_steps
        )
        if self.reduce_dtype == "auto":
            READ_HOOKS.install()
        for held in (FIT_HOOKS, TAPE_HOOKS, WORKER_HOOKS, CONFIG_HOOKS):
            held.install()
        know(self)

    built: bool
    # What the inner optimizer has to do without, as the wrapper does it.
    refused_settings: tuple[str, ...] = (
        "loss_scale_factor",
        "gradient_accumulation_steps",
    )
    loss_scale_factor = refused(
        "loss_scale_factor",
        "Pass `initial_scale` and `dynamic=False` to the constructor, or call "
        "`freeze(value)`.",
    )
    gradient_accumulation_steps = refused(
        "gradient_accumulation_steps", "Pass it to the constructor."
    )
    scale = reported("scale", "The present loss scale.")
    applied_steps = reported("applied", "Updates that were applied.")
    skipped_steps = reported(
        "skipped", "Steps, or microbatches, that were skipped for non-finite gradients."
    )
    judged_steps = reported(
        "judged", "Steps, or microbatches, applied, added up or skipped."
    )
    consecutive_skips = reported(
        "streak", "Steps skipped in a row up to now, 0 after a finite one."
    )
    num_stops = reported(
        "num_stops", "How often training was stopped for too many skips in a row."
    )
    gradient_norm = reported(
        "norm",
        """Norm of the last step's unscaled gradients, before any clipping.

        Under accumulation that of the last update, or of the last microbatch since.
        """,
    )
    _frozen = reported("is_frozen", "Above 0 where the scale is static now.")

    @property
    def last_step_skipped(self) -> Any:
        """Whether the last step was skipped."""
        return self.consecutive_skips > 0

    @property
    def is_frozen(self) -> Any:
        """Whether the scale is static now."""
        return self._frozen > 0

    @property
    def nonfinite_variables(self) -> tuple[str, ...]:
        """Paths of the variables whose gradients the last skipped step failed on."""
        only_eager("nonfinite_variables")
        return tuple(self.scale_variables.blamed(1))

    @property
    def nonfinite_counts(self) -> dict[str, int]:
        """For each variable that had any, its number of non-finite gradients."""
        only_eager("nonfinite_counts")
        return self.scale_variables.blamed(0)

    def history(self) -> dict[str, np.ndarray]:
        """Returns the last 1024 steps, oldest first; reads from the device.

        Returns:
            Arrays of shape (steps,): "step", counted from 1; "scale", the loss scale
            it was computed with; "gradient_norm", unscaled; "skipped".

        Example:
            >>> import keras, tfamp
            >>> optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(), 8.0)
            >>> optimizer.apply([tf.constant([8.0])], [keras.Variable([1.0])])
            >>> {k: v.tolist() for k, v in optimizer.history().items()}
            {'step': [1], 'scale': [8.0], 'gradient_norm': [1.0], 'skipped': [False]}
        """
        only_eager("history")
        return self.scale_variables.history()

    def freeze(self, value: float | None = None) -> None:
        """Makes the scale static from here on, in functions traced before as well.

        Args:
            value: The scale to keep, or None for the present one.

        Raises:
            ValueError: `value` is not a positive finite number.
        """
        if value is not None:
            value = checks.positive("value", value)
        self._set(is_frozen=FROZEN, scale=value)

    def unfreeze(self) -> None:
        """Makes the scale dynamic from here on."""
        self._set(is_frozen=0)

    def _set(self, *, scale: float | None = None, **flags: int) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError(
                "The loss scale is frozen or released inside a `tf.function`; expected "
                "eager code, between steps. Call it from a callback or the loop."
            )
        now = self.scale_variables.numbers()
        scale = now.scale if scale is None else scale
        self.put(now._replace(scale=scale, good_steps=0, **flags))

    def raise_if_due(self) -> None:
        """Raises `LossScaleError` where the last step completed a streak."""
        limit = self.max_consecutive_skips
        if limit is not None and self.scale_variables.numbers().streak >= limit:
            raise stops.error_of(self)

    def scale_loss(self, loss: Any) -> Any:
        """Returns `loss` times the loss scale; a half-precision loss as float32.

        Args:
            loss: A number or tensor of any shape.
        """
        loss = tf.convert_to_tensor(loss)
        if loss.dtype in HALF:
            loss = tf.cast(loss, tf.float32)
        scale = tf.convert_to_tensor(self.dynamic_scale.value)
        self.has_scaled_loss = True
        if not loss.dtype.is_floating:
            return loss * tf.cast(scale, loss.dtype)
        return scaled_by_hand(loss, scale, is_ours=True)

    def get_scaled_loss(self, loss: Any) -> Any:
        """As `scale_loss`; takes a callable too and returns one, as legacy Keras."""
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Returns gradients of a scaled loss divided by the scale.

        The next `apply` or `apply_gradients` takes what came through here as it is, as
        legacy Keras did.

        Args:
            grads: Tensors, `tf.IndexedSlices` or None.
        """
        self.was_unscaled = True
        note_unscaled()
        factor = 1 / tf.convert_to_tensor(self.dynamic_scale.value)
        return [None if g is None else multiplied(g, factor) for g in grads]

    def minimize(
        self, loss: Any, var_list: Any, tape: tf.GradientTape | None = None
    ) -> Any:
        """Computes the gradients of a loss and applies them, as legacy Keras.

        `loss` is a callable, or a tensor computed under `tape`; `var_list` may be a
        callable too. Returns what the inner optimizer's `minimize` does, or
        `iterations` where it has none.
        """
        if tape is None and not callable(loss):
            raise ValueError(
                f"`loss` is {loss!r} and `tape` is None; expected a callable or the "
                "tape that recorded the loss. Pass `tape=tape`."
            )
        own = getattr(self.inner_optimizer, "minimize", None)  # of a subclass
        if own is not None:
            return own(loss, var_list) if tape is None else own(loss, var_list, tape)
        with tape if tape is not None else tf.GradientTape() as tape:
            scaled = self.scale_loss(loss() if callable(loss) else loss)
        variables = list(var_list() if callable(var_list) else var_list)
        raw = [v.value if isinstance(v, keras.Variable) else v for v in variables]
        gradients = tape.gradient(scaled, raw)
        return self.apply_gradients(zip(gradients, variables, strict=True))

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
            self.accumulators = [self._accumulator_for(v) for v in variables]
            self.has_gradient = self.add_variable(
                (len(variables),), "zeros", "bool", name="trained"
            )
        self._trainable_variables = variables
        self.built = True
        # In eager code each replica runs up to where all meet; all have to scale alike.
        has_others = tf.distribute.get_strategy().num_replicas_in_sync > 1
        in_replica = not tf.distribute.in_cross_replica_context()
        if not (has_others and in_replica and tf.executing_eagerly()):
            own(self, variables)
        self.saved_beside.assign_loaded()

    def _accumulator_for(self, variable: Any) -> Any:
        dtype = "float64" if variable.dtype == "float64" else "float32"
        place = getattr(variable, "value", variable)
        with self._distribution_strategy.extended.colocate_vars_with(place):
            return self.add_variable(variable.shape, dtype=dtype, name="accumulator")

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None
    ) -> None:
        """Makes an update of the gradients, if they are finite everywhere.

        What a `tf.GradientTape` gave since the last update counts as unscaled, unless
        the loss went through `scale_loss`; gradients of any other origin are divided
        by the scale.

        Args:
            grads: For each variable a tensor, `tf.IndexedSlices` or None. On several
                replicas each passes its own; their sum is applied.
            trainable_variables: The variables; left out where `build` was called.

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
        self._entry = HERE.entry
        if tf.distribute.in_cross_replica_context():
            raise ValueError(
                "apply() must be called in a replica context. Call it inside the "
                "function that `strategy.run` runs."
            )
        with tf.name_scope(self.name):
            variables = variables_for(self, gradients, trainable_variables)
            check_inner_settings(self)
            step.take(self, gradients, variables)
            own(self, variables)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """As `apply`, on pairs of gradient and variable; returns `iterations`."""
        gradients, variables = zip(*grads_and_vars, strict=True)
        with replaced(HERE, entry="pairs"):
            self.apply(gradients, variables)
        return self.iterations

    def update_inner(self, gradients: list[Any], variables: Sequence[Any]) -> None:
        """Has the inner optimizer apply gradients that are reduced and unscaled.

        By the method that was called here: a subclass may have one of its own.
        """
        inner = self.inner_optimizer
        with replaced(HERE, is_updating=True, entry="apply"):
            if self._entry == "inner":  # a method of a subclass has come here
                keras.optimizers.Optimizer.apply(inner, gradients, variables)
            elif self._entry == "pairs":
                inner.apply_gradients(zip(gradients, variables, strict=True))
            else:
                inner.apply(gradients, variables)

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
        if len(hooks.leaves(inner)) > 1 or adds_up:
            return None
        return inner.global_clipnorm or None

    def accumulator(self, variable: Any) -> Any:
        """Returns the variable in which the gradients of another are added up."""
        return self.accumulators[self.position_of(variable)]

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
        step.on_window(step.flush, self)

    def discard(self) -> None:
        """Forgets the microbatches in a window that is not full."""
        step.on_window(step.discard, self)

    def put(self, values: ScaleState) -> None:
        """Stores plain numbers on every replica."""
        with on_all_replicas(self):
            self.scale_variables.write(values)

    @property
    def own_variables(self) -> list[Any]:
        """Keras's own variables, then tfamp's."""
        return list(self._variables)

    @property
    def variables(self) -> list[Any]:
        """Keras's own variables, the inner optimizer's, then tfamp's."""
        return [
            *saved_state.stock_variables(self),
            *self.own_variables[saved_state.NUM_STOCK :],
        ]

    def get_config(self) -> dict[str, Any]:
        """Returns Keras's four keys, and what differs from the defaults.

        So stock Keras loads what it can honour, and refuses the rest by name.
        """
        return saved_state.config_of(self)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Creates the optimizer from its configuration, or from stock Keras's."""
        return cls(**saved_state.arguments_in(config, custom_objects))

    def save_own_variables(self, store: Any) -> None:
        """Puts Keras's own variables and the inner optimizer's into `store`."""
        for position, variable in enumerate(saved_state.stock_variables(self)):
            store[str(position)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Takes the variables of a file; slots that are not built yet follow later.

        The file may be tfamp's, stock Keras's or that of the bare inner optimizer.
        """
        self.saved_beside.load_stock(store)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets all variables, in the order of `variables`.

        Raises:
            ValueError: The optimizer is not built, or the arrays do not fit.
        """
        saved_state.set_weights(self, weights)

    def __getattr__(self, name: str) -> Any:
        """Reads a public attribute that only the inner optimizer has."""
        inner = vars(self).get(INNER)
        if inner is None or name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets on the inner optimizer what only that one has, as its momentum."""
        own, inner = vars(self), vars(self).get(INNER)
        is_inner_only = (
            own.get("_is_made", False)
            and not name.startswith("_")
            and name not in own
            and not hasattr(type(self), name)
            and hasattr(inner, name)
        )
        if is_inner_only:
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def exclude_from_weight_decay(
        self, var_list: Any = None, var_names: Any = None
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay.

        Args:
            var_list: Variables to exclude.
            var_names: Patterns searched for in variables' names.

        Raises:
            ValueError: The inner optimizer is built already, and has traced its
                update with what was set before.
        """
        if self.inner_optimizer.built:
            raise ValueError(
                "`exclude_from_weight_decay` came after the optimizer was built; "
                "expected it before the first step. Call it on a new optimizer."
            )
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)


for _name in SHARED:
    setattr(LossScaleOptimizer, _name, shared(_name))


hooks.save_under_stock_name(LossScaleOptimizer, keras.optimizers.LossScaleOptimizer)
# So that Keras's own `load_model` and `optimizers.get` give what was saved.
CONFIG_HOOKS = PatchSet(
    [hooks.from_config_patch(saved_state.wrote, LossScaleOptimizer)]
)
