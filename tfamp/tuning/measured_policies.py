"""`tfamp.measure_policies`: times the user's own step under each policy.

A race: every step is traced and warm, then all take turns, in a new order each round,
so that what else the machine does falls on all alike.
"""

import contextlib
import dataclasses
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from tfamp.dtypes import resolution, rows
from tfamp.dtypes.settings import make_settings
from tfamp.keras_hooks import around_training, structure, trainer
from tfamp.keras_hooks.optimizers import optimizers_of
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.machine import cpus, devices
from tfamp.models import put_under
from tfamp.records import checks, console, units
from tfamp.records.record import Record, TableRecord
from tfamp.records.versions import installed_versions
from tfamp.stepping.arguments import build, check_model, dataset_of, first_batch
from tfamp.stepping.unchanged import seeds_put_back, unchanged
from tfamp.trials.statistics import MIN_GAIN, student_quantile
from tfamp.tuning import joined_steps

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
# Batches that are held in memory; the steps run on them in turn.
_NUM_BATCHES = 2
_ROUNDS = 24
# Of a shorter turn the clock and the wait for the device would be a part.
_TURN_SECONDS, _MAX_STEPS_A_TURN = 0.02, 200
# After a few rounds, what takes so many times as long as the fastest runs no more.
_FIRST_ROUNDS, _HOPELESS = 4, 1.5
# Chance that anything is shown to be faster than float32 which is not. Intervals of a
# few trimmed rounds err more often than they say: in simulation in at most 2 %.
_ERROR_RATE = 0.01
# Of the rounds, at each end: bursts of other work fall on one function alone.
_TRIMMED = 0.2
_NOT_POSSIBLE = (tf.errors.OpError, TypeError, ValueError, NotImplementedError)
# A dynamic loss scale comes down by a factor of 2 a step: a step that is skipped is no
# step to time.
_MAX_FIRST_STEPS = 20


@dataclasses.dataclass(frozen=True)
class PolicyTime(Record):
    """The time of a training step under one policy."""

    policy: str
    jit_compile: bool
    step_seconds: float | None = None  # the median; None where it was not timed
    # So many times as long takes float32 without XLA; the ends of a 95 % interval.
    speedup: tuple[float, float, float] | None = None
    note: str = ""  # why it was not timed

    @property
    def name(self) -> str:
        """Policy and XLA in words."""
        return f"{self.policy} with XLA" if self.jit_compile else self.policy


@dataclasses.dataclass(frozen=True)
class Measurement(TableRecord):
    """The policies that were timed on a model's own step, and the fastest."""

    model: str
    times: tuple[PolicyTime, ...]  # float32 without XLA first
    chosen: int  # which of them is best
    reason: str
    seconds: float  # what the whole measurement took
    evidence: dict[str, Any]  # devices, versions, shapes of the batch
    # Steps in a call of TensorFlow, and the seconds of a step of the best policy; empty
    # where a step is too long to gain by it.
    joined: tuple[tuple[int, float], ...] = ()

    @property
    def steps_per_execution(self) -> int:
        """The fewest steps in a call that no other number beats by 5 %."""
        limit = min((each for _, each in self.joined), default=0.0) * MIN_GAIN
        return min((n for n, each in self.joined if each <= limit), default=1)

    @property
    def best(self) -> PolicyTime:
        """The fastest candidate, or float32 where none was shown to be faster."""
        return self.times[self.chosen]

    def table(self) -> str:
        """Returns a row for each candidate and the reason for the best."""
        columns = {
            "policy": {},
            "step": console.RIGHT,
            "speed over float32": console.RIGHT,
            "note": {**console.FOLD, "ratio": 1},
        }
        rows = []
        for place, each in enumerate(self.times):
            step = ratio = "-"
            if each.step_seconds is not None:
                step = units.format_seconds(each.step_seconds)
            if each.speedup is not None:
                ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*each.speedup)
            note = "best" if place == self.chosen else each.note
            rows.append((each.name, step, ratio, note))
        told = self.reason
        if self.joined:
            by_number = [f"{n} {units.format_seconds(s)}" for n, s in self.joined]
            told += (
                f" A step by the number in a call: {', '.join(by_number)}; best "
                f"steps_per_execution={self.steps_per_execution}."
            )
        title = f"Steps of {self.model}"
        return console.text_of(console.table(columns, rows, title=title), told)


def measure_policies(
    build_model_or_model: Callable[[], keras.Model] | keras.Model,
    data: Any,
    *,
    budget_seconds: float = 20.0,
    policies: Sequence[str] | None = None,
    jit_compile: bool | None = None,
    batch_size: int = 32,
) -> Measurement:
    """Times a model's own training step under several policies, and says which is best.

    All steps are traced first and then run in turns on the same batches. Picked is what
    is shown to be faster than float32 by 5 % or more; of policies that take the same
    time another one is in at most 2 % of measurements. The model stays what it was.

    Args:
        build_model_or_model: A compiled model, or a function that returns one.
        data: As `fit` takes it; the first two batches are used.
        budget_seconds: What it may take, half of it for the turns.
        policies: What is tried beside float32. None tries what the devices here have
            units for.
        jit_compile: Whether XLA compiles the steps; None tries both ways.
        batch_size: Examples in a batch of arrays.

    Raises:
        TypeError: It is no model and returns none, or the data is nothing for `fit`.
        ValueError: A policy is unknown, the data is empty, or a step fails in float32.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> data = np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")
        >>> measure_policies(model, data, policies=["float32"]).best.policy
        'float32'
    """
    for policy in policies or ():
        checks.choice("policies", policy, POLICIES)
    budget = checks.positive("budget_seconds", budget_seconds)
    with seeds_put_back():
        model = model_of(build_model_or_model)
        dataset = dataset_of(data, batch_size, needs_targets=False)
        cpus.avoid_broken_amx()
        # As `train_step` gets them: inputs without targets stand alone.
        batches = [
            keras.utils.pack_x_y_sample_weight(
                *keras.utils.unpack_x_y_sample_weight(batch)
            )
            for batch in dataset.take(_NUM_BATCHES)
        ] or [first_batch(dataset)]
        build(model, batches[0])
        trainer.build_metrics(model, batches[0])
        leaves = [leaf for leaf in tf.nest.flatten(batches[0]) if leaf is not None]
        evidence = {
            **evidence_here(),
            "batch": [f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in leaves],
        }
        with unchanged(model), put_back(model):
            prepare = functools.partial(_prepared, model, batches)
            candidates = candidates_of(policies, jit_compile)
            found = race(model.name, candidates, prepare, budget, evidence)
            best, number = found.best, int(dataset.cardinality())
            sizes = joined_steps.sizes_for(number if number >= 0 else None)
            is_short = (best.step_seconds or math.inf) < joined_steps.LONGEST_STEP
            is_told = model.run_eagerly or int(model.steps_per_execution or 1) != 1
            if is_short and not is_told and len(sizes) > 1:
                _put(model, best)
                settings = resolution.settings_of(model)
                if settings is not None:
                    settings.check = None  # of this measurement alone
                with console.progress("Joining steps", 1, unit="parts"):
                    seconds = joined_steps.measured(model, batches, sizes)
                found = dataclasses.replace(found, joined=tuple(seconds.items()))
        return found


def evidence_here() -> dict[str, Any]:
    """Returns the devices and the versions that something was measured on."""
    return {
        "devices": [device.name for device in devices.devices()],
        "versions": {**installed_versions(), "tfamp": tfamp.__version__},
    }


def model_of(build_model_or_model: Any) -> keras.Model:
    """Returns the compiled model that was given, or that the function builds."""
    model = build_model_or_model
    if callable(model) and not isinstance(model, keras.Model):
        model = model()
    check_model(model)
    return model


def candidates_of(
    policies: Sequence[str] | None, jit_compile: bool | None
) -> list[PolicyTime]:
    """Returns what may be timed, in the order in which it is prepared.

    With XLA comes last, as compiling takes longest. What the devices have no units for
    is only tried where it was asked for: a step may take a hundred times as long.
    """
    here = devices.devices()
    advised = devices.recommend(here).policy
    found = [PolicyTime("float32", False)]
    for way in (False, True) if jit_compile is None else (jit_compile,):
        for policy in sorted(policies or POLICIES, key=lambda name: name != advised):
            why = None if policies else devices.objection(policy, here)
            each = PolicyTime(policy, way, note=f"not tried: {why}" if why else "")
            found += [] if each in found else [each]
    return found


@dataclasses.dataclass
class Racer:
    """A step in a race."""

    run: Callable[[int], float]  # so many steps, on the device; returns their seconds
    step_seconds: float  # the last estimate
    logs: list[float] = dataclasses.field(default_factory=list)  # of them, by round

    def take_turn(self) -> None:
        """Runs some steps and notes what each took."""
        wanted = math.ceil(_TURN_SECONDS / max(self.step_seconds, 1e-6))
        steps = min(max(wanted, 1), _MAX_STEPS_A_TURN)
        self.step_seconds = max(self.run(steps) / steps, 1e-9)
        self.logs.append(math.log(self.step_seconds))


def race(
    name: str,
    candidates: Sequence[PolicyTime],
    prepare: Callable[[PolicyTime], Racer],
    budget_seconds: float,
    evidence: dict[str, Any],
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Prepares the candidates, the first in float32, and lets them take turns."""
    began, times = clock(), list(candidates)
    racers: dict[int, Racer] = {}

    def left() -> float:
        return budget_seconds - (clock() - began)

    with console.progress("Timing steps", len(times) + _ROUNDS, unit="parts") as done:
        for place, each in enumerate(candidates):
            done(place, f"Tracing {each.name}")
            note = each.note
            if not note and place and left() < budget_seconds / 2:
                note = "not tried: those before took half of the budget to prepare"
            if not note:
                try:
                    racers[place] = prepare(each)
                except _NOT_POSSIBLE as error:
                    note = f"cannot run: {checks.first_line(error)}"
            times[place] = dataclasses.replace(each, note=note)
        if 0 not in racers:
            raise ValueError(
                f"A step of {name!r} fails in float32: {times[0].note}. Expected a "
                "model that `fit` trains; see that it does without tfamp."
            )
        order, active = random.Random(0), list(racers)
        for number in range(_ROUNDS):
            done(len(times) + number)
            if number == _FIRST_ROUNDS and all(racers[p].logs for p in active):
                medians = {p: statistics.median(racers[p].logs) for p in active}
                most = min(medians.values()) + math.log(_HOPELESS)
                active = [p for p in active if not p or medians[p] <= most]
            for place in order.sample(active, len(active)):
                if len(active) > 1 and left() > 0:
                    racers[place].take_turn()
    rate, best = _ERROR_RATE / max(len(racers) - 1, 1), 0
    for place, racer in racers.items():
        seconds = racer.step_seconds
        if racer.logs:
            seconds = math.exp(statistics.median(racer.logs))
        found = _log_ratio(racers[0], racer, 0.025) if place else (math.inf,)
        is_known = all(map(math.isfinite, found))
        speedup: Any = tuple(map(math.exp, found)) if is_known else None
        times[place] = dataclasses.replace(
            times[place], step_seconds=seconds, speedup=speedup
        )
        # Worth a change is what is shown to be faster than float32.
        ratio, low, _ = _log_ratio(racers[0], racer, rate)
        if place and low > 0 and ratio >= math.log(MIN_GAIN):
            before = times[best].speedup
            best = place if not best or speedup > before else best
    reason = (
        "float32: no other policy was shown to be faster here by 5 % or more, beyond "
        "the noise."
    )
    if len(racers) < 2:
        reason = "float32 was the only policy that was timed."
    if best:
        ratio, low, high = times[best].speedup or (1.0, 1.0, 1.0)
        reason = (
            f"{times[best].name}: {ratio:.2f} times as fast as float32 on this model "
            f"here (95 % interval {low:.2f} to {high:.2f})."
        )
    return Measurement(name, tuple(times), best, reason, clock() - began, evidence)


def _log_ratio(slower: Racer, faster: Racer, rate: float) -> tuple[float, float, float]:
    """Returns the trimmed mean of the log ratio of two racers' times, and its ends.

    It is over the rounds that both ran, without ends where these are fewer than two;
    `rate` is the chance that the true value lies below the interval, and above it.

    Source: Tukey & McLaughlin, Sankhya 25, 1963, on trimmed means.
    """
    pairs = zip(slower.logs, faster.logs, strict=False)
    values = sorted(one - other for one, other in pairs)
    if len(values) < 2:
        return (values or [math.nan])[0], -math.inf, math.inf
    cut = int(_TRIMMED * len(values))
    middle = values[cut : len(values) - cut]
    mean = statistics.fmean(middle)
    winsorized = [middle[0]] * cut + middle + [middle[-1]] * cut
    half = student_quantile(rate, len(middle) - 1) * statistics.stdev(winsorized)
    half /= (1 - 2 * cut / len(values)) * math.sqrt(len(values))
    return mean, mean - half, mean + half


def _put(model: keras.Model, candidate: PolicyTime) -> None:
    settings, policy = resolution.settings_of(model), candidate.policy
    put_under(
        model, make_settings(policy) if settings is None else settings.under(policy)
    )
    trainer.set_jit_compile(model, candidate.jit_compile)


def _prepared(
    model: keras.Model, batches: Sequence[Any], candidate: PolicyTime
) -> Racer:
    """Traces the step under a policy and runs it until it is warm.

    It is called as traces: TensorFlow would warn of so many of one function.
    """
    _put(model, candidate)
    step, optimizer = around_training.on_batch(model), model.optimizer
    steps: list[Callable[[], Any]] = []
    whole, traces = tf.function(step, autograph=False), {}
    for batch in batches:
        if model.run_eagerly:
            steps.append(functools.partial(step, batch))
            continue
        specs = tf.nest.map_structure(
            lambda x: None if x is None else tf.type_spec_from_value(x), batch
        )
        shapes = tuple(tf.nest.flatten(specs))
        if shapes not in traces:
            traces[shapes] = whole.get_concrete_function(specs)
        steps.append(functools.partial(traces[shapes], batch))

    def run(num_steps: int) -> float:
        # What stands around the training function asks the model for it.
        model.optimizer = optimizer
        began = time.perf_counter()
        for number in range(num_steps):
            logs = steps[number % len(steps)]()
        for leaf in tf.nest.flatten(logs)[:1]:
            np.asarray(leaf)  # waits for the device
        return time.perf_counter() - began

    run(1)
    for _ in range(_MAX_FIRST_STEPS):
        seconds = run(1)
        is_scaled = isinstance(optimizer, LossScaleOptimizer)
        if not (is_scaled and bool(optimizer.last_step_skipped)):
            return Racer(run, seconds)
    raise ValueError(
        f"its gradients were not finite in {_MAX_FIRST_STEPS} steps in a row; "
        "`tfamp.tune` finds the layers that float32 is needed in"
    )


@contextlib.contextmanager
def put_back(model: keras.Model) -> Iterator[None]:
    """Gives a compiled model the dtypes, optimizers and XLA that it had."""
    known = {id(each) for each in optimizers_of(model)}
    optimizers = {name: o for name, o in vars(model).items() if id(o) in known}
    optimizer, jit_compile = model.optimizer, model.jit_compile
    try:
        with rows.restored(model):
            yield
    finally:
        for _, layer, _ in structure.walk(model):
            trainer.drop_traced_functions(layer)
        for name, each in optimizers.items():
            setattr(model, name, each)
        if optimizer is not None:
            trainer.replace_optimizer(model, optimizer)
        trainer.set_jit_compile(model, jit_compile)
