"""What the update of a step does to the weights and the loss of a model."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.patches import replaced
from tfamp.numerics.triage.first_nonfinite import Examined, examine
from tfamp.numerics.triage.suspicions import (
    Suspicion,
    bad_weights,
    large_weights,
)
from tfamp.stepping.layer_calls import in_float32
from tfamp.stepping.unchanged import unchanged

# A loss that one update makes so many times as large has left where it was, if it is
# beyond that of the other examples' targets, too: near 0 any number is many times it.
_JUMP = 100.0
_SMALL = 1e-3
# A large weight that an update makes so many times as large runs away.
_GREW = 10.0
# What a learning rate that is too high is multiplied by, until the loss falls.
_RATE_FACTORS = tuple(10.0**-n for n in range(1, 9))


class Softer(NamedTuple):
    """A learning rate that does no harm.

    A factor on the present one, and the loss after an update.
    """

    factor: float
    loss: float


class Update:
    """The update of the one optimizer that a model is compiled with.

    It is by the gradients of each trained variable at the learning rate of the step.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: Any,
        gradients: list[tf.Tensor],
        rate: float,
        optimizer: Any,
    ) -> None:
        self.rate = rate
        self._model, self._batch, self._gradients = model, batch, gradients
        self._optimizer = optimizer

    @classmethod
    def of(
        cls,
        model: keras.Model,
        batch: Any,
        exact: Examined,
        rate: float | None,
        *,
        is_fresh: bool = False,
    ) -> "Update | None":
        """Returns the update of a float32 step, None where it has others or none.

        It `is_fresh` where the optimizer is to begin anew, without its slots.
        """
        trained = list(model.trainable_variables)
        found = {id(v): g for v, g in exact.step.gradients if g is not None}
        if rate is None or not {id(v) for v in trained} >= set(found):
            return None
        gradients = [found.get(id(v), tf.zeros_like(v.value)) for v in trained]
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        if is_fresh:
            try:
                with model.distribute_strategy.scope():
                    inner = type(inner).from_config(inner.get_config())
                    inner.build(trained)
            except Exception:  # of an optimizer of the user's own
                return None
        return cls(model, batch, gradients, rate, inner)

    def bad_weight(self) -> Suspicion | None:
        """Returns the first weight that the update makes inf or NaN."""
        with self._applied():
            found = next(bad_weights(self._model), None)
        if found is None:
            return None
        return found._replace(
            sentence="Loss and gradients are finite, and the update makes weights that "
            f"are not: {found.sentence.replace(' already', '')}"
        )

    def bad_constraint(self) -> Suspicion | None:
        """Returns the first weight that a constraint makes inf or NaN, none otherwise.

        Then the update itself leaves all of them finite.
        """
        trained = self._model.trainable_variables
        held = [(v, v.constraint) for v in trained if v.constraint is not None]
        try:
            for variable, _ in held:
                variable.constraint = None
            if not held or self.bad_weight() is not None:
                return None
        finally:
            for variable, constraint in held:
                variable.constraint = constraint
        with self._applied():
            for path, layer, _ in structure.walk(self._model):
                for weight in structure.own_weights(layer):
                    if weight.constraint is None:
                        continue
                    if not np.isfinite(np.asarray(weight.value, np.float32)).all():
                        kind = type(weight.constraint).__name__
                        return Suspicion(
                            path,
                            f"The constraint {kind} of the weight {weight.path!r} "
                            "makes numbers that are inf or NaN of what the update "
                            "leaves, which is finite.",
                        )
        return None

    def loss_after(self, rate_factor: float = 1.0) -> float | None:
        """Returns the loss of the batch after the update, None where it has none."""
        with self._applied(rate_factor), in_float32(self._model):
            after = examine(self._model, self._batch, loss_scale=1.0).step.loss
        return None if after is None else float(after)

    def is_jump(self, before: float, after: float) -> bool:
        """States whether an update has taken the loss far from where it was."""
        if self._is_runaway(before, after):
            return True
        if after <= before + _JUMP * max(abs(before), _SMALL):
            return False
        x, y, weight = keras.utils.unpack_x_y_sample_weight(self._batch)
        if y is None:
            return True
        others = tf.nest.map_structure(lambda part: tf.roll(part, 1, axis=0), y)
        batch = keras.utils.pack_x_y_sample_weight(x, others, weight)
        with unchanged(self._model), in_float32(self._model):
            guess = examine(self._model, batch, loss_scale=1.0).step.loss
        return guess is None or not after <= float(guess)

    def overshoots(self, before: float, after: float) -> bool:
        """States whether the loss rises where it falls at a lower learning rate.

        A weaker sign than a jump: for where another one speaks against the rate.
        """
        rise = after - before
        return not rise <= max(abs(before), _SMALL) and self.softer(before) is not None

    def softer(self, before: float) -> Softer | None:
        """Returns a tenth of the largest learning rate that does not raise the loss.

        At the largest one training only just goes well: a range test, too, takes a rate
        an order below the one from which the loss rises.
        """
        for edge, factor in itertools.pairwise(_RATE_FACTORS):
            at_edge = self.loss_after(edge)
            if at_edge is None or not at_edge <= before:
                continue
            if not self._is_runaway(before, at_edge, edge):
                after = self.loss_after(factor)
                return None if after is None else Softer(factor, after)
        return None

    def _is_runaway(
        self, before: float, after: float, rate_factor: float = 1.0
    ) -> bool:
        """States whether an update has thrown a loss down that has no lowest value.

        A healthy update may lower such a loss by any factor, so what it does to the
        weights decides: those that were large ahead of it say nothing.
        """
        if after == -math.inf:
            return True
        if not before - after > _JUMP * max(abs(before), _SMALL):
            return False
        gains = {id(each.weight): each.gain for each in large_weights(self._model)}
        with self._applied(rate_factor):
            return any(
                each.gain > _GREW * gains.get(id(each.weight), 0.0)
                for each in large_weights(self._model)
            )

    @contextlib.contextmanager
    def _applied(self, rate_factor: float = 1.0) -> Iterator[None]:
        optimizer = self._optimizer
        with (
            unchanged(self._model),
            replaced(optimizer, _learning_rate=self.rate * rate_factor),
            _slots_kept(optimizer),
        ):
            optimizer.apply(self._gradients, list(self._model.trainable_variables))
            yield


@contextlib.contextmanager
def _slots_kept(optimizer: Any) -> Iterator[None]:
    """Puts an optimizer's variables back, of one that no model holds too."""
    held = [(each, np.asarray(each.value).copy()) for each in optimizer.variables]
    try:
        yield
    finally:
        for variable, values in held:
            variable.assign(values)
