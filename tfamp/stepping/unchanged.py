"""Puts a model back as it was after its train step ran for a measurement."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfamp.stepping.snapshots.names import optimizers_of


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Restores every variable of a built model, bit by bit, also after an error.

    Weights, moving statistics, states of seed generators, metrics, and all of every
    optimizer that the model holds; Python's and NumPy's random generators too. While
    it runs learning rates are 0 where they are variables, so that many steps on few
    batches don't take the weights to where numbers are slow or NaN. It holds a copy
    of the variables in the memory of the host.

    Not restored: what a model keeps outside of Keras variables, variables that only
    its train step makes, and the state of a dataset's own seeded shuffle, which goes
    on from where it is.

    Args:
        model: A compiled model whose weights and optimizers are built.
    """
    strategy = model.distribute_strategy
    # Each replica's own, since a sum over them cannot be shared out again exactly.
    parts = [
        part
        for variable in variables_of(model)
        for part in strategy.experimental_local_results(variable.value)
    ]
    # Copies: NumPy may look at the very memory that the step writes.
    held = [part.numpy().copy() for part in parts]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        for optimizer in optimizers_of(model):
            if isinstance(optimizer.learning_rate, keras.Variable):
                optimizer.learning_rate.assign(0.0)
        yield
    finally:
        # Metrics that were made meanwhile go to their start, others back to `held`.
        model.reset_metrics()
        for part, bits in zip(parts, held, strict=True):
            part.assign(bits)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def variables_of(model: keras.Model) -> list[Any]:
    """Returns every variable that a train step may write."""
    found = [*model.variables, *model.metrics_variables]
    for optimizer in optimizers_of(model):
        found += optimizer.variables
    return list({id(variable): variable for variable in found}.values())
