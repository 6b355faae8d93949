"""What a step may have written when it fails, and how that is undone.

Moving statistics, seeds and metrics are written all through a step; weights and slots
at its end, once all gradients are there (`only_after_gradients`). So the former are
held before each step, which takes no copy of what is not written. Of the latter only a
first step's are copied, to the host's memory.
"""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from tfamp.stepping.snapshots import (
    METRICS,
    WEIGHTS,
    Named,
    State,
    named_variables,
    put,
    take,
)


class StateBefore:
    """The state of a model before a step.

    `begun` is set to 1 on a replica when its optimizer begins to write.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        strategy = model.distribute_strategy
        with strategy.scope():
            self.begun = tf.Variable(
                0.0,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
        self._names: frozenset[int] = frozenset()
        self._owners: list[int] = []
        self._parts: list[Any] = []
        self._read: Any = None
        self._values: list[Any] = []
        self._copy: State | None = None

    def hold(self, *, is_first: bool) -> None:
        """Notes the state before a step, a first one's with weights and slots."""
        if self._read is None or is_first:
            self._prepare(self._variables())
        self._values = self._read()
        self._copy = take(self._model) if is_first else None

    def let_go(self) -> None:
        """Lets the state go, after a step that was done."""
        if self._copy is not None:
            self._read = None  # a first step makes variables
        self._values, self._copy = [], None

    def restore(self) -> bool:
        """Puts the model back, as often as need be until `let_go`.

        It returns False where that cannot be done: weights may be those of half an
        update.
        """
        is_copied = False
        if self._copy is not None:
            # Else the step has made variables.
            with contextlib.suppress(ValueError):
                put(self._model, self._copy)
                is_copied = True
        if not is_copied:
            is_new = any(
                id(each.variable) not in self._names
                for each in self._variables()
                if each.name.startswith(f"{WEIGHTS}/")
            )
            if is_new or self.has_begun():
                return False
            for part, value in zip(self._parts, self._values, strict=True):
                part.assign(value)
        # Those that the failing step was the first to use.
        for metric in self._model.metrics:
            if any(id(variable) not in self._names for variable in metric.variables):
                metric.reset_state()
        for mark in self._marks():
            mark.assign(0.0)
        return True

    def restore_statistics(self) -> None:
        """Puts moving statistics back, after an update that was not made.

        Metrics and seeds stay, as they do in a whole step that is skipped.
        """
        statistics = {id(v) for v in self._model.non_trainable_weights}
        for owner, part, value in zip(
            self._owners, self._parts, self._values, strict=True
        ):
            if owner in statistics:
                part.assign(value)

    def has_begun(self) -> bool:
        """Returns whether the optimizer had begun to write.

        It waits for the gradients of all replicas, so it has only where all had.
        """
        return all(float(mark) > 0 for mark in self._marks())

    def _marks(self) -> Any:
        """Returns `begun` of each replica."""
        return self._model.distribute_strategy.experimental_local_results(self.begun)

    def _variables(self) -> list[Named]:
        return [
            each
            for each in named_variables(self._model)
            if each.name.startswith(f"{METRICS}/")
            or (each.name.startswith(f"{WEIGHTS}/") and not each.is_shared)
        ]

    def _prepare(self, variables: list[Named]) -> None:
        strategy = self._model.distribute_strategy
        self._names = frozenset(id(each.variable) for each in variables)
        pairs = [
            (id(each.variable), part)
            for each in variables
            for part in strategy.experimental_local_results(each.variable.value)
        ]
        self._owners = [owner for owner, _ in pairs]
        self._parts = [part for _, part in pairs]
        marks = self._marks()

        def read() -> list[tf.Tensor]:
            for mark in marks:
                mark.assign(tf.zeros([]))
            return [part.read_value() for part in self._parts]

        # One call for all: each by itself takes as long as the function does.
        self._read = tf.function(read, autograph=False)
