"""Compiles by XLA what each replica computes, and reduces and applies outside of it.

TensorFlow cannot compile a step in which replicas talk to each other (keras#21366). So
a replica's forward and backward pass is a compiled function of its own: it gives its
gradients, and the new values of the variables that it would assign. Reduction, the
judgement of the loss scale and the update follow in the graph around it.

Relies on: a `StatelessScope` keeping what is assigned to variables of Keras, and giving
it where they are read; a `tf.function` being traced anew for each replica's device.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from absl import logging
from keras.src.backend.common.stateless_scope import StatelessScope

from tfamp.keras_hooks.patches import replaced

Step = Callable[[Any], Any]


def parts_compiled(model: keras.Model) -> bool:
    """Returns whether a model's training step is compiled a replica at a time."""
    strategy = model.distribute_strategy
    if not model.jit_compile or strategy.num_replicas_in_sync == 1:
        return False
    with strategy.scope():  # on some devices replicas may talk inside
        return not tf.__internal__.distribute.strategy_supports_no_merge_call()


def compiled(model: keras.Model, train_step: Step, optimizers: list[Any]) -> Step:
    """Returns a training step of one replica whose computation XLA compiles.

    Updates come last: a `train_step` that goes on to use the weights of its update, as
    those of many GANs, is left to TensorFlow, and so said.
    """
    is_parted = True

    def step(data: Any) -> Any:
        nonlocal is_parted
        if not is_parted:
            return train_step(data)
        traced = _Traced(model, train_step, optimizers)
        logs, gradients, values = traced.function(data)
        if len(traced.calls) > 1:
            is_parted = False
            logging.warning(
                "tfamp: `train_step` of %r updates weights %d times, and may use what "
                "the first made; it is not compiled by XLA on several replicas.",
                model.name,
                len(traced.calls),
            )
            return train_step(data)
        for variable, value in zip(traced.assigned, values, strict=True):
            variable.assign(value)
        for call, given in zip(traced.calls, gradients, strict=True):
            call(given)
        return logs

    return step


class _Traced:
    """The compiled part of one replica's step, and what it found while traced."""

    def __init__(
        self, model: keras.Model, train_step: Step, optimizers: list[Any]
    ) -> None:
        self._model, self._train_step = model, train_step
        self._optimizers = optimizers
        self.calls: list[Callable[[Any], Any]] = []
        self.assigned: list[Any] = []
        self.function = tf.function(self._run, jit_compile=True, autograph=False)

    def _run(self, data: Any) -> Any:
        given: list[Any] = []
        with contextlib.ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.enter_context(self._noted(optimizer, given))
            scope = stack.enter_context(StatelessScope())
            logs = self._train_step(data)
        known = {id(v): v for v in self._variables()}
        values = {key: scope.get_current_value(v) for key, v in known.items()}
        self.assigned = [known[key] for key, x in values.items() if x is not None]
        return logs, given, [x for x in values.values() if x is not None]

    def _variables(self) -> list[Any]:
        of_metrics = [v for metric in self._model.metrics for v in metric.variables]
        of_optimizers = [v for each in self._optimizers for v in each.variables]
        return [*self._model.variables, *of_metrics, *of_optimizers]

    @contextlib.contextmanager
    def _noted(self, optimizer: Any, given: list[Any]) -> Iterator[None]:
        """Keeps the gradients that an optimizer is to apply."""

        def apply_gradients(pairs: Any, **options: Any) -> None:
            gradients, variables = zip(*pairs, strict=True)
            given.append(list(gradients))
            self.calls.append(
                lambda found: optimizer.apply_gradients(
                    zip(found, variables, strict=True), **options
                )
            )

        def apply(gradients: Any, trainable_variables: Any = None) -> None:
            given.append(list(gradients))
            self.calls.append(lambda found: optimizer.apply(found, trainable_variables))

        with replaced(optimizer, apply_gradients=apply_gradients, apply=apply):
            yield
