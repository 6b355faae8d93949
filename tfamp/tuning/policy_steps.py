"""Traces a model's training step under several policies, and puts the model back."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.dtypes import model_dtypes, resolution
from tfamp.dtypes.settings import make_settings
from tfamp.keras_hooks import around_training, structure, trainer
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.models import put_under
from tfamp.records.checks import first_line
from tfamp.stepping.snapshots import optimizers_of
from tfamp.tuning.measurement import with_xla
from tfamp.tuning.races import Racer

# A dynamic loss scale comes down by a factor of 2 a step: a step that is skipped is no
# step to time.
_MAX_FIRST_STEPS = 20
_MIN_FIRST_STEPS = 2
# A policy that takes so many times float32's time on a few examples is not tried on
# whole batches, which might take minutes.
HOPELESS = 3.0


# Trains on one batch and returns the logs.
Step = Callable[[], Any]


class Candidate(NamedTuple):
    """A policy to be timed, with XLA or without."""

    policy: str
    jit_compile: bool

    @property
    def name(self) -> str:
        """Policy and XLA in words."""
        return with_xla(self.policy, self.jit_compile)


class Prepared(NamedTuple):
    """What came of a candidate."""

    candidate: Candidate  # the candidate
    racer: Racer | None  # its step, ready to be timed; None where it cannot run
    seconds: float  # what tracing and the first steps took
    note: str  # why it cannot run, "" where it does


class PolicySteps:
    """The training steps of one model, built with its optimizers, on some batches."""

    def __init__(self, model: keras.Model, batches: Sequence[Any]) -> None:
        self._model, self._batches = model, list(batches)
        self._settings = resolution.settings_of(model)

    def prepare(self, candidate: Candidate) -> Prepared:
        """Traces the step under a policy and runs it until it is warm."""
        began = time.perf_counter()
        try:
            steps, optimizer = self._traced(candidate, self._batches)
            seconds = self._warm(steps, optimizer)
        except (tf.errors.OpError, TypeError, ValueError, NotImplementedError) as error:
            note = f"cannot run: {first_line(error)}"
            return Prepared(candidate, None, time.perf_counter() - began, note)
        racer = Racer(candidate.name, self._runner(steps, optimizer), seconds)
        return Prepared(candidate, racer, time.perf_counter() - began, "")

    def probe(self, candidate: Candidate, num_examples: int) -> float:
        """Returns the seconds of a step on a few examples, the second one."""
        few = tf.nest.map_structure(
            lambda x: None if x is None else x[:num_examples], self._batches[0]
        )
        (step,), _ = self._traced(candidate, [few])
        for _ in range(2):
            began = time.perf_counter()
            _wait(step())
            seconds = time.perf_counter() - began
        return seconds

    def _traced(
        self, candidate: Candidate, batches: Sequence[Any]
    ) -> tuple[list[Step], Any]:
        """Returns the step on each batch, and the optimizer that it takes.

        They are called as traces: TensorFlow counts the traces of a function by its
        code, which for all policies is Keras's, and would warn of so many.
        """
        settings, policy = self._settings, candidate.policy
        under = make_settings(policy) if settings is None else settings.under(policy)
        put_under(self._model, under)
        trainer.set_jit_compile(self._model, candidate.jit_compile)
        step, optimizer = around_training.on_batch(self._model), self._model.optimizer
        if self._model.run_eagerly:
            return [functools.partial(step, batch) for batch in batches], optimizer
        whole, traces = tf.function(step, autograph=False), {}
        steps: list[Step] = []
        for batch in batches:
            specs = tf.nest.map_structure(_spec, batch)
            shapes = tuple(tf.nest.flatten(specs))
            if shapes not in traces:
                traces[shapes] = whole.get_concrete_function(specs)
            steps.append(functools.partial(traces[shapes], batch))
        return steps, optimizer

    def _warm(self, steps: Sequence[Step], optimizer: Any) -> float:
        for number in range(_MAX_FIRST_STEPS):
            began = time.perf_counter()
            _wait(steps[number % len(steps)]())
            seconds = time.perf_counter() - began
            skipped = isinstance(optimizer, LossScaleOptimizer) and bool(
                optimizer.last_step_skipped
            )
            if number + 1 >= _MIN_FIRST_STEPS and not skipped:
                return seconds
        raise ValueError(
            f"its gradients were not finite in {_MAX_FIRST_STEPS} steps in a row; "
            "`tfamp.tune` finds the layers that float32 is needed in"
        )

    def _runner(self, steps: Sequence[Step], optimizer: Any) -> Callable[[int], float]:
        def run(num_steps: int) -> float:
            # What stands around the training function asks the model for it.
            self._model.optimizer = optimizer
            began = time.perf_counter()
            for number in range(num_steps):
                logs = steps[number % len(steps)]()
            _wait(logs)
            return time.perf_counter() - began

        return run


def _spec(x: Any) -> Any:
    return None if x is None else tf.type_spec_from_value(x)


def _wait(logs: Any) -> None:
    """Reads what a step gave, which waits for the device."""
    for leaf in tf.nest.flatten(logs)[:1]:
        np.asarray(leaf)


@contextlib.contextmanager
def put_back(model: keras.Model) -> Iterator[None]:
    """Gives a compiled model the dtypes, optimizers and XLA it had, also after errors.

    Its variables are the affair of `unchanged`.
    """
    known = {id(each) for each in optimizers_of(model)}
    optimizers = {name: o for name, o in vars(model).items() if id(o) in known}
    optimizer, jit_compile = model.optimizer, model.jit_compile
    try:
        with model_dtypes.restored(model):
            yield
    finally:
        for _, layer, _ in structure.walk(model):
            trainer.drop_traced_functions(layer)
        for name, each in optimizers.items():
            setattr(model, name, each)
        if optimizer is not None:
            trainer.replace_optimizer(model, optimizer)
        trainer.set_jit_compile(model, jit_compile)
