"""Races: functions, or steps under policies, in turns until the fastest is known.

Machines drift: clocks rise and fall, neighbours come and go. So each round runs every
function for a moment, in a new order, and what counts are the logarithms of the ratios
within a round. A function that is shown slower than the fastest drops out.
"""

import contextlib
import dataclasses
import functools
import math
import random
import statistics
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
from tfamp.trials.statistics import student_quantile
from tfamp.tuning.measurement import with_xla

# Of a shorter turn the clock and the wait for the device would be a part; in longer
# ones fewer rounds see each burst of what else the machine does.
TURN_SECONDS = 0.02
_MAX_STEPS_A_TURN = 200
# Functions within this part of the fastest one are as good as it.
INDIFFERENCE = 0.03
# Rounds after which the intervals are looked at.
_LOOKS = (4, 6, 9, 13, 19, 28, 40, 60, 90)
# Chance that anything is shown to be faster than the first which is not, over all looks
# and all functions. Intervals of a few trimmed rounds err somewhat more often than they
# say: in simulation it comes to at most 2 %.
_ERROR_RATE = 0.01
# Of an interval that is only looked at once.
_INTERVAL_RATE = 0.05
# At a look, of dropping what is as fast as the best: it costs no more than that.
_DROP_RATE = 0.01
# Of the rounds, at each end, whose ratios are left out of a mean: bursts of other work
# fall on one function and not on the next.
_TRIMMED = 0.2


@dataclasses.dataclass
class Racer:
    """A function in a race."""

    name: str  # what it is called
    # Runs a number of steps, waits for the device, returns their seconds.
    run: Callable[[int], float]
    step_seconds: float  # what a step took so far, the last estimate
    # The logarithm of the seconds of a step by round.
    logs: dict[int, float] = dataclasses.field(default_factory=dict)

    def take_turn(self, number: int) -> int:
        """Runs one turn and notes it; returns its steps."""
        wanted = math.ceil(TURN_SECONDS / max(self.step_seconds, 1e-6))
        steps = min(max(wanted, 1), _MAX_STEPS_A_TURN)
        self.step_seconds = max(self.run(steps) / steps, 1e-9)
        self.logs[number] = math.log(self.step_seconds)
        return steps


class Outcome(NamedTuple):
    """How a race ended."""

    num_rounds: int
    num_steps: int  # of all functions
    is_clear: bool  # whether the order was clear; else the budget was spent


def race(
    racers: Sequence[Racer],
    *,
    goes_on: Callable[[int], bool],
    seed: int = 0,
) -> Outcome:
    """Runs functions in turns until the fastest is known; `logs` has what they did.

    The first one is what the others are compared with: it stays until one of them is
    shown faster than it. `goes_on` takes the steps so far, and states whether the
    budget has room for more; `seed` is of the order in the rounds.
    """
    order, active = random.Random(seed), list(racers)
    rounds, steps, is_clear = 0, 0, False
    while len(active) > 1 and goes_on(steps) and rounds < _LOOKS[-1]:
        for racer in order.sample(active, len(active)):
            steps += racer.take_turn(rounds)
        rounds += 1
        if rounds in _LOOKS:
            look = _LOOKS.index(rounds)
            rate = rate_of_a_look(len(racers))
            active = _still_in(active, racers[0], rate)
            is_clear = _is_clear(active, rate) and (look > 0 or len(active) == 1)
            if is_clear:
                break
    return Outcome(rounds, steps, is_clear or len(active) == 1)


def rate_of_a_look(num_racers: int) -> float:
    """Returns the chance of an error on one function that one look may have.

    The best of several looks faster than it is, the more so the more often one looks.
    """
    return _ERROR_RATE / len(_LOOKS) / max(num_racers - 1, 1)


def fastest(racers: Sequence[Racer]) -> Racer:
    """Returns the one with the lowest median over the rounds of all still in it."""
    last = max(max(racer.logs) for racer in racers)
    present = [racer for racer in racers if last in racer.logs]
    shared = set.intersection(*(set(racer.logs) for racer in present))
    return min(present, key=lambda r: statistics.median(r.logs[n] for n in shared))


def log_ratio(
    slower: Racer, faster: Racer, rate: float = _INTERVAL_RATE
) -> tuple[float, float, float]:
    """Returns the trimmed mean of the log ratio of two racers' times, and its ends.

    It is over the rounds that both ran, without ends where these are fewer than two;
    `rate` is the chance that the true value lies below the interval, and above it.

    Source: Tukey & McLaughlin, "Less Vulnerable Confidence and Significance Procedures
        for Location Based on a Single Sample", Sankhya 25 (1963).
    """
    both = slower.logs.keys() & faster.logs.keys()
    values = sorted(slower.logs[n] - faster.logs[n] for n in both)
    if not values:
        return math.nan, -math.inf, math.inf
    cut = int(_TRIMMED * len(values))
    middle = values[cut : len(values) - cut]
    mean = statistics.fmean(middle)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    winsorized = [middle[0]] * cut + middle + [middle[-1]] * cut
    half = student_quantile(rate, len(middle) - 1) * statistics.stdev(winsorized)
    half /= (1 - 2 * cut / len(values)) * math.sqrt(len(values))
    return mean, mean - half, mean + half


def _still_in(active: list[Racer], reference: Racer, rate: float) -> list[Racer]:
    best = fastest(active)
    is_faster = best is not reference and log_ratio(reference, best, rate)[1] > 0

    def stays(racer: Racer) -> bool:
        if racer is best or (racer is reference and not is_faster):
            return True
        return log_ratio(racer, best, _DROP_RATE)[1] <= 0

    return [racer for racer in active if stays(racer)]


def _is_clear(active: Sequence[Racer], rate: float) -> bool:
    """States whether all that are left are as good as the fastest."""
    best = fastest(active)
    limit = math.log1p(INDIFFERENCE)
    return all(r is best or log_ratio(r, best, rate)[2] < limit for r in active)


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
