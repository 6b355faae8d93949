"""`tfamp.measure_policies`: times the user's own step under each policy."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfamp.keras_hooks import trainer
from tfamp.machine import cpus, devices
from tfamp.records import checks, units
from tfamp.records.console import progress
from tfamp.stepping.arguments import build, check_model, dataset_of, first_batch
from tfamp.stepping.unchanged import seeds_put_back, unchanged
from tfamp.tuning import measurement, races
from tfamp.tuning.measurement import Measurement, PolicyTime
from tfamp.tuning.races import (
    HOPELESS,
    Candidate,
    PolicySteps,
    Prepared,
    Racer,
    put_back,
)

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
_REFERENCE = Candidate("float32", False)
# Batches that are held in memory; the steps run on them in turn.
_NUM_BATCHES = 2
_PROBED_EXAMPLES = 2
_TIMED_PART = 0.25
# Noise is a matter of seconds, not of steps: shorter steps count as parts of one.
_WHOLE_STEP_SECONDS = 0.01
# A gain of less is none: another policy has its own cost.
MIN_GAIN = 1.05
# Compiling took so many times as long as tracing, for models of several sizes.
_XLA_FACTOR = 4.0


def measure_policies(
    build_model_or_model: Callable[[], keras.Model] | keras.Model,
    data: Any,
    *,
    budget_seconds: float = 20.0,
    max_steps: int = 200,
    policies: Sequence[str] = POLICIES,
    jit_compile: bool | None = None,
    batch_size: int = 32,
) -> Measurement:
    """Times a model's own training step under several policies, and says which is best.

    All steps are traced first and then run in turns on the same batches, so that what
    else the machine does falls on all alike. It stops as soon as the order is clear.
    Nothing is picked that is not shown to be faster than float32 by more than the
    noise, nor for a gain of less than 5 %: of policies that take the same time another
    than float32 is picked in at most 2 % of measurements. Weights, optimizers, dtypes,
    metrics and seeds are afterwards what they were.

    Args:
        build_model_or_model: A compiled model, or a function that returns one.
        data: As `fit` takes it; the first two batches are used.
        budget_seconds: What it may take in all; tracing one more policy, or compiling
            by XLA, is left out where it would take longer.
        max_steps: Steps of each policy in turns, at most; of steps under 10 ms, as many
            as take the time of so many of 10 ms.
        policies: What is tried beside float32: names as `enable` takes them.
        jit_compile: Whether XLA compiles the steps; None tries both ways.
        batch_size: Examples in a batch of arrays.

    Returns:
        The `Measurement`: `.best`, `.table()`, `.times`.

    Raises:
        TypeError: It is neither a model nor a function that returns one, or the data
            is nothing that `fit` takes.
        ValueError: A policy is unknown, the data is empty, the budget is not positive,
            or the step fails in float32.

    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.zeros((4, 2), "float32")
        >>> found = measure_policies(model, (x, x[:, :1]), policies=["float32"],
        ...     jit_compile=False)
        >>> found.best.policy, found.reason
        ('float32', 'float32 was the only policy that was timed.')
    """
    for policy in policies:
        checks.choice("policies", policy, POLICIES)
    budget = checks.positive("budget_seconds", budget_seconds)
    checks.positive_int("max_steps", max_steps)
    with seeds_put_back():
        model = model_of(build_model_or_model)
        dataset = dataset_of(data, batch_size, needs_targets=False)
        cpus.avoid_broken_amx()
        batches = [*map(_as_in_fit, dataset.take(_NUM_BATCHES))] or [
            first_batch(dataset)
        ]
        build(model, batches[0])
        trainer.build_metrics(model, batches[0])
        evidence = measurement.evidence_for(batches[0])
        candidates = candidates_of(policies, jit_compile)
        evidence["candidates"] = [candidate.name for candidate in candidates]
        with unchanged(model), put_back(model):
            steps = PolicySteps(model, batches)
            return Measuring(model.name, steps, budget, max_steps).run(
                candidates, evidence
            )


def _as_in_fit(batch: Any) -> Any:
    """Returns a batch as `train_step` gets it: inputs without targets stand alone."""
    return keras.utils.pack_x_y_sample_weight(
        *keras.utils.unpack_x_y_sample_weight(batch)
    )


def model_of(build_model_or_model: Any) -> keras.Model:
    """Returns the compiled model that was given, or that the function builds."""
    if isinstance(build_model_or_model, keras.Model):
        model = build_model_or_model
    elif callable(build_model_or_model):
        model = build_model_or_model()
    else:
        raise TypeError(
            f"`build_model_or_model` is {build_model_or_model!r}; expected a compiled "
            "`keras.Model`, or a function without arguments that returns one."
        )
    check_model(model)
    return model


def candidates_of(policies: Sequence[str], jit_compile: bool | None) -> list[Candidate]:
    """Returns what is to be timed, in the order in which it is prepared.

    Float32 without XLA comes first; then what the table of devices thinks best; with
    XLA last, as compiling takes longest.
    """
    advised = devices.recommend(devices.devices()).policy
    ordered = sorted(dict.fromkeys(policies), key=lambda name: name != advised)
    ways = (False, True) if jit_compile is None else (jit_compile,)
    pairs = [Candidate(policy, way) for way in ways for policy in ordered]
    return [_REFERENCE, *(pair for pair in pairs if pair != _REFERENCE)]


class Measuring:
    """One measurement of the model of this name, whose steps `PolicySteps` prepares."""

    def __init__(
        self,
        name: str,
        steps: Any,
        budget_seconds: float,
        max_steps: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._name, self._steps, self._clock = name, steps, clock
        self._budget, self._max_steps = budget_seconds, max_steps
        self._began = clock()

    def run(self, candidates: Sequence[Candidate], evidence: Any) -> Measurement:
        """Prepares the candidates, lets them run in turns, and judges."""
        total = len(candidates)
        with progress("Tracing steps", total, unit="policies") as done:
            prepared: list[Prepared] = []
            for number, candidate in enumerate(candidates):
                done(number, f"Tracing {candidate.name}")
                prepared.append(self._prepare(candidate, prepared))
        reference = prepared[0]
        if reference.racer is None:
            raise ValueError(
                f"A step of {self._name!r} fails in float32: {reference.note}. "
                "Expected a model that `fit` trains; see that it does without tfamp."
            )
        racers = [each.racer for each in prepared if each.racer is not None]
        most = self._max_steps * len(racers)
        began = self._clock()
        with progress("Timing steps", most, unit="steps") as done:

            def goes_on(num_steps: int) -> bool:
                timed = (self._clock() - began) / _WHOLE_STEP_SECONDS
                spent = min(num_steps, int(timed))
                done(spent)
                return spent < most and self._left() > 0

            outcome = races.race(racers, goes_on=goes_on)
        times = tuple(_time_of(each, reference.racer) for each in prepared)
        chosen, reason = _judge(times, prepared, outcome.is_clear)
        return Measurement(
            model=self._name,
            times=times,
            chosen=chosen,
            reason=reason,
            num_steps=outcome.num_steps,
            seconds=self._clock() - self._began,
            is_clear=outcome.is_clear,
            evidence=evidence,
        )

    def _left(self) -> float:
        return self._budget - (self._clock() - self._began)

    def _prepare(self, candidate: Candidate, before: Sequence[Prepared]) -> Prepared:
        if before:
            expected = _expected_seconds(candidate, before)
            if self._left() - _TIMED_PART * self._budget < expected:
                note = (
                    "not tried: preparing it would take about "
                    f"{units.format_seconds(expected)}, beyond the budget"
                )
                return Prepared(candidate, None, 0.0, note)
            hopeless = self._hopeless(candidate, before)
            if hopeless:
                return Prepared(candidate, None, 0.0, hopeless)
        return self._steps.prepare(candidate)

    def _hopeless(self, candidate: Candidate, before: Sequence[Prepared]) -> str:
        """Returns why a policy is not worth whole batches, "" where it may be.

        Where the devices have no units for it, a step may take a hundred times as long.
        """
        objection = devices.objection(candidate.policy, devices.devices())
        if objection is None:
            return ""
        for each in before:  # with XLA it fares as without
            if each.candidate.policy == candidate.policy and each.racer is None:
                return each.note
        if any(each.candidate.policy == candidate.policy for each in before):
            return ""
        few = [
            self._steps.probe(each, _PROBED_EXAMPLES)
            for each in (_REFERENCE, candidate)
        ]
        if few[1] <= HOPELESS * few[0]:
            return ""
        return (
            f"{few[1] / few[0]:.1f} times as slow as float32 on {_PROBED_EXAMPLES} "
            "examples"
        )


def _expected_seconds(candidate: Candidate, before: Sequence[Prepared]) -> float:
    """Returns what preparing a candidate will take, as others took it."""
    tried = [each for each in before if each.seconds]
    alike = [p for p in tried if p.candidate.jit_compile == candidate.jit_compile]
    factor = 1.0 if alike else _XLA_FACTOR
    return factor * max((each.seconds for each in alike or tried), default=0.0)


def _time_of(prepared: Prepared, reference: Racer) -> PolicyTime:
    candidate, racer = prepared.candidate, prepared.racer
    if racer is None:
        return PolicyTime(
            *candidate, prepare_seconds=prepared.seconds, note=prepared.note
        )
    seconds = math.exp(statistics.median(racer.logs.values())) if racer.logs else None
    speedup = None
    if racer is not reference:
        found = races.log_ratio(reference, racer, 0.025)
        if all(map(math.isfinite, found)):
            speedup = tuple(map(math.exp, found))
    return PolicyTime(
        *candidate,
        step_seconds=seconds or racer.step_seconds,
        speedup=speedup,  # type: ignore[arg-type]
        prepare_seconds=prepared.seconds,
    )


def _judge(
    times: Sequence[PolicyTime], prepared: Sequence[Prepared], is_clear: bool
) -> tuple[int, str]:
    """Returns which of the times is best, and why in a line.

    Worth a change is what is shown to be faster than float32. Of those within
    `INDIFFERENCE` of the fastest the first is taken: float32 before half precision,
    without XLA before with it.
    """
    reference = prepared[0].racer
    rivals = {n: e.racer for n, e in enumerate(prepared) if n and e.racer is not None}
    if reference is None or not rivals:
        return 0, "float32 was the only policy that was timed."
    rate, shown = races.rate_of_a_look(len(rivals) + 1), {}
    for place, racer in rivals.items():
        ratio, low, _ = races.log_ratio(reference, racer, rate)
        if low > 0 and ratio >= math.log(MIN_GAIN):
            shown[place] = times[place].speedup or (1.0, 1.0, 1.0)
    if not shown:
        return 0, (
            "float32: no other policy was shown to be faster here by 5 % or more, "
            f"beyond the noise{'' if is_clear else ', within the budget'}."
        )
    limit = max(each[0] for each in shown.values()) / (1 + races.INDIFFERENCE)
    simplest = sorted(shown, key=lambda place: (times[place].jit_compile, place))
    best = next(place for place in simplest if shown[place][0] >= limit)
    ratio, low, high = shown[best]
    return best, (
        f"{times[best].name}: {ratio:.2f} times as fast as float32 on this model here "
        f"(95 % interval {low:.2f} to {high:.2f})."
    )
