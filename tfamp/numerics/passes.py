"""The tapped pass that all views read: float32 steps, with every layer's calls kept."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.records import checks
from tfamp.records.units import join_words
from tfamp.stepping.arguments import build, check_model, dataset_of, first_batch
from tfamp.stepping.eager_step import (
    Call,
    Observer,
    Site,
    Step,
    floats,
    run_step,
    tapped,
)
from tfamp.stepping.layer_calls import (
    Recorded,
    Recorder,
    in_float32,
    state_of,
    units,
    watched_sites,
)
from tfamp.stepping.unchanged import same_draws, unchanged

_MAX_NAMED = 4


class Ran(NamedTuple):
    """A train step without its update, and what the model gave in it, in float32."""

    step: Step
    outputs: list[np.ndarray]


class Recording(NamedTuple):
    """A float32 step: the state ahead of it, and the calls of the model's units."""

    batch: Any
    state: tuple[tuple[Any, np.ndarray], ...]
    ran: Ran
    calls: list[Recorded]


class _Outputs(Observer):
    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []

    def on_outputs(self, call: Call, outputs: Any) -> None:
        self.kept += [np.asarray(tf.cast(x, tf.float32)) for x in floats(outputs)]


def check_is_model(model: Any) -> None:
    """Raises unless `model` is a Keras model, compiled or not."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` is {model!r}, of type {type(model).__name__}; expected a "
            "`keras.Model`. Pass the model itself, not a function that builds it."
        )


def build_by_call(model: keras.Model, x: Any) -> None:
    """Builds a model as `fit` does; what fails is told by who calls it next."""
    if not model.built:
        with contextlib.suppress(Exception), model.distribute_strategy.scope():
            model(x, training=False)


def run(model: keras.Model, batch: Any, *, loss_scale: float = 1.0) -> Ran:
    """Runs a train step eagerly as the model computes now; nothing is updated."""
    outputs = _Outputs()
    with tapped(model, outputs, only=lambda site: site.layer is model):
        step = run_step(model, batch, loss_scale=loss_scale)
    return Ran(step, outputs.kept)


def record(model: keras.Model, chosen: Sequence[Site], batch: Any) -> Recording:
    """Runs a step inside `exactly`, and keeps the calls of the chosen sites."""
    state, recorder = state_of(model), Recorder()
    watched = watched_sites(model, chosen)
    wanted = {id(site.layer) for site in chosen}
    with tapped(model, recorder, only=lambda site: id(site.layer) in watched):
        ran = run(model, batch)
    calls = [each for each in recorder.calls if id(each.site.layer) in wanted]
    return Recording(batch, state, ran, calls)


@contextlib.contextmanager
def exactly(model: keras.Model) -> Iterator[list[Site]]:
    """Has a model compute in float32 without rules; yields what computes in it.

    Afterwards variables, seeds and dtypes are what they were.
    """
    with in_float32(model), unchanged(model), same_draws():
        yield units(model)


def batches_of(
    model: keras.Model, data: Any, num_batches: int, batch_size: int
) -> list[Any]:
    """Returns the first batches for a compiled model, which is built with them.

    Raises:
        TypeError: `model` is not a compiled Keras model, or `data` not what fit takes.
        ValueError: The data are empty or single examples.
    """
    checks.positive_int("num_batches", num_batches)
    check_model(model)
    dataset = dataset_of(data, batch_size)
    build(model, first_batch(dataset))
    return list(dataset.take(num_batches))


def name_layers(paths: Sequence[str]) -> str:
    """Returns the first of some paths in words, and how many more there are.

    Example:
        >>> name_layers(["a", "b", "c", "d", "e", ""])
        "'a', 'b', 'c', 'd' and 2 more"
    """
    words = [repr(path) if path else "no layer" for path in paths[:_MAX_NAMED]]
    if len(paths) > _MAX_NAMED:
        words.append(f"{len(paths) - _MAX_NAMED} more")
    return join_words(words)
