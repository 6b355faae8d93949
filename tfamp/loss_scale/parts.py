"""What a `LossScaleOptimizer` passes on to the one inside, and its replicas do as one.

The parts of the optimizer are classes over Keras's own, a file each; attributes are
those that its constructor sets.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import optimizers, replicas
from tfamp.loss_scale import step
from tfamp.loss_scale.fit_hooks import microbatch_weight
from tfamp.loss_scale.replicas import first_of, where_replicas_are_one
from tfamp.loss_scale.rule import ScaleState
from tfamp.loss_scale.scales import take_notes, verdict_on
from tfamp.records import checks

_INNER = "inner_optimizer"
# Attributes that every Keras optimizer has, the wrapper too, and that only mean
# something on the one inside.
_SHARED = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
)


def _shared(name: str) -> property:
    def get(self: Any) -> Any:
        inner = vars(self).get(_INNER)
        return None if inner is None else getattr(inner, name)

    def put(self: Any, value: Any) -> None:
        inner = vars(self).get(_INNER)
        if inner is not None:  # Keras sets its defaults before there is one
            setattr(inner, name, value)

    return property(get, put, doc=f"`{name}` of the inner optimizer.")


def _refused(name: str, instead: str) -> property:
    def put(self: Any, value: Any) -> None:
        if value is not None and _INNER in vars(self):
            raise ValueError(
                f"`{name}` is {value!r}, but a LossScaleOptimizer has none of its own; "
                f"expected None. {instead}"
            )

    return property(lambda self: None, put, doc=f"None: {instead}")


# Gradients may have been scaled by hand, as in a test of an optimizer; a loop that
# goes on like this has forgotten it.
_EAGER_STEPS = 10
_applies: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def warn_of_unscaled_loss(optimizer: Any) -> None:
    """Warns once where gradients of unknown origin are taken for scaled ones."""
    has_no_scale = not optimizer.dynamic and optimizer.initial_scale == 1
    if optimizer.has_scaled_loss or has_no_scale:
        return
    count = _applies.get(optimizer, 0) + 1
    _applies[optimizer] = count
    is_sure = not tf.executing_eagerly() or count == _EAGER_STEPS
    if count > _EAGER_STEPS or not is_sure:
        return
    _applies[optimizer] = _EAGER_STEPS
    warnings.warn(
        f"Optimizer {optimizer.name!r} divides gradients by its loss scale, but they "
        "come from no `tf.GradientTape`, and no loss was multiplied by it: updates are "
        "too small by that factor. Compute them by a tape, or put `loss = "
        "optimizer.scale_loss(loss)` before they are computed. "
        f"{checks.see('failures/tiny-updates')}",
        UserWarning,
        stacklevel=checks.level_of_user(),
    )


class Delegating(keras.optimizers.LossScaleOptimizer):
    """Passes on to `inner_optimizer` what the wrapper does not have itself."""

    loss_scale_factor = _refused(
        "loss_scale_factor",
        "Pass `initial_scale` and `dynamic=False` to the constructor, or call "
        "`freeze(value)`.",
    )
    gradient_accumulation_steps = _refused(
        "gradient_accumulation_steps",
        "Pass it to the constructor.",
    )

    def __getattr__(self, name: str) -> Any:
        """Reads a public attribute that only the inner optimizer has."""
        inner = vars(self).get(_INNER)
        if inner is None or name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets on the inner optimizer what only that one has, as its momentum."""
        own, inner = vars(self), vars(self).get(_INNER)
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

    def finalize_variable_values(self, var_list: Any) -> None:
        """Ends training in the inner optimizer: with EMA, takes the averages over."""
        self.inner_optimizer.finalize_variable_values(var_list)


for _name in _SHARED:
    setattr(Delegating, _name, _shared(_name))


def adopted_accumulation(inner: Any, steps: int) -> int:
    """Takes `gradient_accumulation_steps` over from an inner optimizer.

    Returns the microbatches of an update; a ValueError says that both are to
    accumulate.
    """
    found = getattr(inner, "gradient_accumulation_steps", None)
    if found is None:
        return steps
    if steps != 1:
        raise ValueError(
            f"`accumulation_steps` is {steps!r} and the inner optimizer has "
            f"`gradient_accumulation_steps={found!r}`; expected one of them. Leave out "
            "the inner optimizer's."
        )
    if inner.built:
        # Keras counted microbatches; here an update counts.
        counter = optimizers.call_counter(inner)
        counter.assign(counter // found)
    inner.gradient_accumulation_steps = None
    logging.info(
        "`gradient_accumulation_steps=%r` of the wrapped optimizer becomes "
        "`gradient_accumulation_steps=%r` of the LossScaleOptimizer, which counts "
        "only finite microbatches.",
        found,
        found,
    )
    return int(found)


class OnReplicas(keras.optimizers.LossScaleOptimizer):
    """Steps and windows of all replicas together."""

    was_unscaled: bool
    refused_settings: tuple[str, ...] = (
        "loss_scale_factor",
        "gradient_accumulation_steps",
    )

    @property
    def reduce_dtype(self) -> str | None:
        """What replicas send float32 gradients in; None for float32."""
        return self.reduction.dtype

    def flush(self) -> None:
        """Applies the mean of the microbatches in a window that is not full.

        `fit` does it at the end of each epoch; in a loop of your own call it at the
        end, or before the weights are evaluated. Does nothing where there are none.
        """
        self._on_window(step.flush)

    def discard(self) -> None:
        """Forgets the microbatches in a window that is not full."""
        self._on_window(step.discard)

    def _check_setting(self) -> None:
        """Raises where a setting that was changed since would spoil the update."""
        inner = self.inner_optimizer
        for name in self.refused_settings:
            value = getattr(inner, name, None)
            if value is not None:
                raise ValueError(
                    f"`{name}` of the wrapped optimizer is {value!r}; expected None, "
                    "since the wrapper does it. Set it to None."
                )
        strategy = tf.distribute.get_strategy()
        if strategy.num_replicas_in_sync > 1 and self._distribution_strategy is not (
            strategy
        ):
            raise ValueError(
                f"The optimizer was made outside the {type(strategy).__name__} that "
                "trains with it; its counters would differ between replicas. Make and "
                "compile it inside `with strategy.scope():`."
            )

    def _take_step(self, gradients: list[Any], variables: list[Any]) -> None:
        """Reduces the gradients and takes the step where all replicas are one."""
        notes = take_notes(variables)
        come_scaled = not self.was_unscaled and all(n.is_by_hand for n in notes)
        if not notes and come_scaled:
            warn_of_unscaled_loss(self)
        self.was_unscaled = False
        verdict = verdict_on(notes, gradients)
        if replicas.is_empty() is not None:
            gradients = replicas.of_examples(gradients)
            if verdict is not None:
                verdict = verdict | replicas.is_empty()
        num_spoilt = (
            tf.constant(0.0) if verdict is None else tf.cast(~verdict, "float32")
        )
        context = tf.distribute.get_replica_context()
        weight = microbatch_weight()
        self.reduction.say_unused(context.num_replicas_in_sync)
        if context.num_replicas_in_sync > 1:
            numbers = [tf.convert_to_tensor(weight), num_spoilt]
            scale = None if come_scaled else self.scale_variables.read().scale
            gradients, (weight, num_spoilt) = self.reduction.sums(
                context,
                gradients,
                [None if self.is_overwritten(v) else v for v in variables],
                numbers,
                scale=scale,
            )

        def merged(strategy: Any, gradients: Any, weight: Any, num_spoilt: Any) -> None:
            step.take_step(
                strategy,
                self,
                gradients,
                variables,
                come_scaled=come_scaled,
                weight=first_of(strategy, weight),
                was_finite=None
                if verdict is None
                else tf.equal(first_of(strategy, num_spoilt), 0.0),
            )

        can_merge = not tf.__internal__.distribute.strategy_supports_no_merge_call()
        if can_merge and context.num_replicas_in_sync > 1 and optimizers.in_xla():
            raise RuntimeError(
                f"`jit_compile=True` under {type(context.strategy).__name__}: "
                "TensorFlow cannot compile a step of several replicas by XLA on these "
                "devices (keras#21366). Pass `jit_compile=False`."
            )
        where_replicas_are_one(merged, gradients, weight, num_spoilt)

    @tf.autograph.experimental.do_not_convert
    def _on_window(self, take: Callable[..., None]) -> None:
        if not (self.built and self.accumulates):
            return
        strategy = tf.distribute.get_strategy()
        if tf.distribute.in_cross_replica_context():
            take(strategy, self)
        elif strategy.num_replicas_in_sync > 1 or not self._has_replicas:
            where_replicas_are_one(take, self)
        else:
            with self._distribution_strategy.scope():
                self._traced(take)()

    def _traced(self, take: Callable[..., None]) -> Callable[[], None]:
        """Returns `take` as a graph: on several replicas eager code is slow."""
        own: Any = vars(self)  # as an attribute Keras would track it
        functions = own.setdefault("_window_functions", {})
        if take not in functions:
            functions[take] = tf.function(
                lambda: take(self._distribution_strategy, self), autograph=False
            )
        return functions[take]

    def _put(self, values: ScaleState) -> None:
        """Stores plain numbers on every replica."""
        with self._on_all_replicas():
            self.scale_variables.write(values)

    @property
    def _has_replicas(self) -> bool:
        return bool(self._distribution_strategy.num_replicas_in_sync > 1)

    @contextlib.contextmanager
    def _on_all_replicas(self) -> Iterator[None]:
        """Makes what is assigned in the block arrive on every replica."""
        if self._has_replicas and not tf.distribute.in_cross_replica_context():
            with self._distribution_strategy.scope():
                yield
        else:
            yield
