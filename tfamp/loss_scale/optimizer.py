"""`LossScaleOptimizer`: Keras's class of that name, exact on every replica."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import optimizers as hooks
from tfamp.keras_hooks.patches import HeldPatches, replaced
from tfamp.keras_hooks.variables import READ_HOOKS
from tfamp.keras_hooks.workers import WORKER_HOOKS
from tfamp.loss_scale.arguments import check_settings, chosen_steps
from tfamp.loss_scale.candidates import know
from tfamp.loss_scale.counters import NonfiniteCounts, ScaleVariables
from tfamp.loss_scale.fit_hooks import FIT_HOOKS
from tfamp.loss_scale.gradients import Reduction
from tfamp.loss_scale.interface import Reporting, ScalingLosses
from tfamp.loss_scale.parts import Delegating, OnReplicas, adopted_accumulation
from tfamp.loss_scale.saved_state import Saving
from tfamp.loss_scale.scales import HERE, own
from tfamp.loss_scale.tape import TAPE_HOOKS


class LossScaleOptimizer(
    ScalingLosses,
    OnReplicas,
    Reporting,
    Saving,
    Delegating,
    keras.optimizers.LossScaleOptimizer,
):
    """Scales the loss, and applies only steps whose gradients are finite.

    float16 gradients below 6e-8 are 0. Multiplying the loss by a scale lifts all of
    them; it is divided out again. Gradients that a `tf.GradientTape` computes for the
    optimizer's variables are scaled there and come out true; code that calls
    `scale_loss` gets them scaled, and the optimizer divides. A step whose gradients are
    not finite on every replica and after the reduction changes no bit of any weight or
    slot; where the scale was the cause, it is lowered. Under `tfamp.enable`, every
    optimizer of a model is wrapped wherever a layer computes in float16.

    Args:
        inner_optimizer: The optimizer to wrap. Its clipping acts on the reduced,
            unscaled gradients; its iterations, learning-rate schedule, weight decay
            and averages advance once an update.
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
        _check_inner(inner_optimizer)
        reduction = Reduction(reduce_dtype)
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
            accumulation_steps=accumulation_steps,
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
        self.accumulation_steps = self._adopted(accumulation_steps)
        self.max_consecutive_skips = max_consecutive_skips
        self.reduction = reduction
        self.leaves_stop_to_caller = False
        self.has_gradient: Any = None
        self.has_scaled_loss = False  # `scale_loss` was called, ever
        self.was_unscaled = False  # what the next `apply` gets, by hand
        self.nonfinite: NonfiniteCounts | None = None
        self._accumulators: list[Any] = []
        self._loaded = None
        self._loaded_beside: dict[str, Any] = {}
        self._states_at_load = None
        self._num_stops_seen = 0
        self._entry = "apply"
        self._make_scalars(start)
        self.saved_beside = hooks.SavedBeside(
            "loss_scale_state", self._beside, self._take_beside
        )
        self._is_made = True  # what only the inner one has is set there from here on
        self._come_into_use()

    def _adopted(self, accumulation_steps: int) -> int:
        """Returns the microbatches in an update, taken over from the inner one."""
        return adopted_accumulation(self.inner_optimizer, accumulation_steps)

    def _come_into_use(self) -> None:
        """Has tapes, `fit` and the layers that it may ask know of this optimizer."""
        if self.reduction.dtype == "auto":
            READ_HOOKS.hold(self)
        FIT_HOOKS.hold(self)
        TAPE_HOOKS.hold(self)
        WORKER_HOOKS.hold(self)
        CONFIG_HOOKS.hold(self)
        know(self)

    built: bool

    @property
    def accumulates(self) -> bool:
        """Whether an update takes more than one microbatch."""
        return self.accumulation_steps > 1

    @property
    def shared_clip(self) -> float | None:
        """The inner optimizer's `global_clipnorm`, which needs the norm at hand."""
        if len(hooks.leaves(self.inner_optimizer)) > 1:
            return None  # each of several optimizers clips its own part
        return self.inner_optimizer.global_clipnorm or None

    @property
    def accumulated_variables(self) -> list[Any]:
        """The variables whose gradients are added up."""
        return list(self._trainable_variables)

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
        self._make_vectors(variables)
        self._trainable_variables = variables
        self.built = True
        if not self._waits_for_replicas:
            own(self, variables)
        self._settle_loaded()

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
        gradients = [
            g
            if g is None or isinstance(g, tf.IndexedSlices)
            else tf.convert_to_tensor(g)
            for g in grads
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
            variables = self._variables_of(gradients, trainable_variables)
            self._check_setting()
            self._take_step(gradients, variables)
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

    @property
    def _waits_for_replicas(self) -> bool:
        """Whether other replicas come to their gradients after this one is built.

        In eager code each runs up to where all meet; all have to scale alike.
        """
        has_others = tf.distribute.get_strategy().num_replicas_in_sync > 1
        in_replica = not tf.distribute.in_cross_replica_context()
        return has_others and in_replica and tf.executing_eagerly()

    def key_of(self, variable: Any) -> Any:
        """Returns what tells a variable apart, whichever replica it comes from."""
        return self._var_key(variable)

    def accumulator(self, variable: Any) -> Any:
        """Returns the variable in which the gradients of another are added up."""
        return self._accumulators[self._get_variable_index(variable)]

    def is_overwritten(self, variable: Any) -> bool:
        """Returns whether a variable takes its gradient as its value, unscaled."""
        return bool(self._overwrite_variable_with_gradient(variable))

    def _variables_of(self, gradients: list[Any], given: Any) -> list[Any]:
        if given is None:
            if not self.built:
                raise ValueError(
                    "`trainable_variables` is None and the optimizer is not built; "
                    "expected variables. Pass them, or call "
                    "`optimizer.build(variables)` first."
                )
            variables = list(self._trainable_variables)
        else:
            variables = list(given)
        if len(variables) != len(gradients):
            raise ValueError(
                f"`grads` has {len(gradients)} entries for {len(variables)} variables; "
                "expected one for each. Pass None where a variable has no gradient."
            )
        if all(gradient is None for gradient in gradients):
            raise ValueError("No gradients provided for any variable.")
        if not self.built:
            self.build(variables)
        self._check_variables_are_known(variables)
        return variables

    def _make_scalars(self, start: float) -> None:
        self.step_counter = self.add_variable(
            shape=(), dtype="int", initializer="zeros", name="step_counter"
        )
        self.dynamic_scale = self.add_variable(
            shape=(),
            dtype="float32",
            initializer=keras.initializers.Constant(start),
            name="dynamic_scale",
        )
        self.scale_variables = ScaleVariables(
            self.step_counter,
            self.dynamic_scale,
            self.add_variable,
            is_static=not self.dynamic,
        )

    def _make_vectors(self, variables: list[Any]) -> None:
        self.nonfinite = NonfiniteCounts(variables, self._var_key, self.add_variable)
        if not self.accumulates:
            return
        for variable in variables:
            dtype = "float64" if variable.dtype == "float64" else "float32"
            with self._distribution_strategy.extended.colocate_vars_with(
                getattr(variable, "value", variable)
            ):
                total = self.add_variable(
                    shape=variable.shape, dtype=dtype, name="accumulator"
                )
            self._accumulators.append(total)
        self.has_gradient = self.add_variable(
            shape=(len(variables),), dtype="bool", initializer="zeros", name="trained"
        )


def _check_inner(inner: Any) -> None:
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            f"`inner_optimizer` is {inner!r}, of type {type(inner).__name__}; expected "
            "a Keras optimizer. Pass `keras.optimizers.Adam()`, or `keras.optimizers."
            "get(name)`."
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"`inner_optimizer` is {inner!r}, which scales the loss already; expected "
            "a plain optimizer. Pass its `inner_optimizer`."
        )


hooks.save_under_stock_name(LossScaleOptimizer, keras.optimizers.LossScaleOptimizer)
# So that Keras's own `load_model` and `optimizers.get` give what was saved.
CONFIG_HOOKS = HeldPatches([hooks.from_config_patch(Saving.wrote, LossScaleOptimizer)])
