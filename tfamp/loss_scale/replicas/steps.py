"""How a loss-scale optimizer comes from each replica to where all are one."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks import optimizers as hooks
from tfamp.keras_hooks import replicas
from tfamp.loss_scale import step
from tfamp.loss_scale.branches import first_of, where_replicas_are_one
from tfamp.loss_scale.counters import Snapshot
from tfamp.loss_scale.fit_hooks import microbatch_weight
from tfamp.loss_scale.parts import Parts
from tfamp.loss_scale.step import take_step
from tfamp.loss_scale.tape import scalings
from tfamp.loss_scale.tape.gradients import ids_of
from tfamp.loss_scale.tape.scalings import SCALINGS


class OnReplicas(Parts):
    """Steps and windows of all replicas together."""

    refused_settings: tuple[str, ...] = (
        "loss_scale_factor",
        "gradient_accumulation_steps",
    )

    @property
    def reduce_dtype(self) -> str | None:
        """What replicas send float32 gradients in; None for float32."""
        return self.reduction.dtype

    @property
    def bytes_per_pack(self) -> int:
        """The size of the packs that gradients are sent in; 0 for one pack."""
        return self.reduction.bytes_per_pack

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
        scaling = SCALINGS.take(self, ids_of(self))
        if scaling is None:
            scalings.warn_of_unscaled_loss(self)
        else:
            self.has_scaled_loss = True
        come_scaled = scaling is None or scaling.is_scaled
        verdict = None if scaling is None else scaling.verdict_on(gradients)
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
            take_step(
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
        if can_merge and context.num_replicas_in_sync > 1 and hooks.in_xla():
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
        functions = vars(self).setdefault("_window_functions", {})
        if take not in functions:
            functions[take] = tf.function(
                lambda: take(self._distribution_strategy, self), autograph=False
            )
        return functions[take]

    def _put(self, values: Snapshot) -> None:
        """Stores plain numbers on every replica."""
        with self._on_all_replicas():
            self.scale_variables.put(values)

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
