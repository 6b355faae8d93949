"""Judges of plans: by how much a metric is worse under one than in float32."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.dtypes.settings import make_settings
from tfamp.keras_hooks import around_training
from tfamp.models import put_under
from tfamp.plan import PrecisionPlan
from tfamp.records import checks
from tfamp.records.checks import first_line
from tfamp.records.console import progress
from tfamp.stepping.arguments import build
from tfamp.stepping.unchanged import unchanged
from tfamp.tuning import scores
from tfamp.tuning.measured_policies import model_of
from tfamp.tuning.races import put_back
from tfamp.tuning.search import Evaluation

# Chance that a plan is taken whose metric is worse than the tolerance allows: half of
# it for all evaluations of a search together, half for the one on fresh data.
ERROR_RATE = 0.05


def evaluated(
    judge: Any,
    plan: PrecisionPlan,
    float32: Sequence[str],
    half: int,
    rate: float,
    tolerance: float,
) -> Evaluation:
    """Returns what a judge says of a plan; one that cannot run does not hold.

    The judge, one of the classes below, is asked on a half of the examples or seeds;
    `rate` is the chance that the bound is too low, `tolerance` what it may be at most.
    """
    began = time.perf_counter()
    try:
        worse = judge.worsening(plan, half)
    except (TypeError, ValueError, NotImplementedError, tf.errors.OpError) as error:
        # In float32 the same step ran: it is the plan's dtypes that do not go together.
        logging.info("A plan cannot run: %s", first_line(error))
        worse = np.array([np.inf])
    mean = bound = math.inf
    if np.isfinite(worse).all():
        mean = float(np.mean(worse))
        bound = scores.upper_bound(worse, rate, is_rate=judge.is_rate)
    seconds = time.perf_counter() - began
    return Evaluation(
        tuple(float32), mean, bound, bound <= tolerance, len(worse), seconds
    )


class FixedWeights:
    """Compares the outputs of a trained model, example by example."""

    def __init__(
        self,
        model: keras.Model,
        halves: tuple[Sequence[Any], Sequence[Any]],
        metric: Any,
        tolerance: float,
    ) -> None:
        self._model, self._halves = model, halves
        with unchanged(model), put_back(model):
            put_under(model, make_settings("float32"))
            outputs = [scores.predict(model, half) for half in halves]
        y = scores.targets(halves[0][0])
        self.score = scores.score_of(model, metric, outputs[0][0], y)
        self._exact = [
            scores.of_batches(self.score, half, given)
            for half, given in zip(halves, outputs, strict=True)
        ]
        self.is_rate = all(set(np.unique(e)) <= {0.0, 1.0} for e in self._exact)
        self.reference = float(np.mean(np.concatenate(self._exact)))
        self.kind = "outputs of the trained model, example by example"
        if self.is_rate:
            needed = scores.examples_needed(tolerance, ERROR_RATE / 2)
            fewest = min(map(len, self._exact))
            if fewest < needed:
                raise ValueError(
                    f"`tolerance` {tolerance} is below what {fewest} examples in each "
                    f"half can show; expected at least {needed} in each. Pass more as "
                    "`validation`, or another tolerance."
                )

    def worsening(self, plan: PrecisionPlan, half: int) -> np.ndarray:
        """Returns by how much each example is worse under a plan."""
        with put_back(self._model):
            plan.apply(self._model)
            outputs = scores.predict(self._model, self._halves[half])
        low = scores.of_batches(self.score, self._halves[half], outputs)
        return self.score.worsening(low, self._exact[half])


class ShortTrainings:
    """Compares short trainings that begin alike, seed by seed."""

    def __init__(
        self,
        build_model: Callable[[], keras.Model],
        dataset: Any,
        halves: tuple[Sequence[Any], Sequence[Any]],
        metric: Any,
        seeds: int,
        num_steps: int,
    ) -> None:
        checks.positive_int("seeds", seeds, minimum=2)
        self._build, self._halves, self._seeds = build_model, halves, seeds
        self._batches = list(dataset.take(num_steps))
        self._num_steps = num_steps
        self._check_deterministic()
        self._metric = metric
        self.score: Any = None
        found = []
        with progress("Training in float32", 2 * seeds, unit="trainings") as done:
            for seed in range(2 * seeds):
                found.append(self._trained(None, seed))
                done(len(found))
        self._exact = np.array(found)
        self.reference = float(np.mean(self._exact))
        self.is_rate = False
        self.kind = f"{seeds} short trainings of {num_steps} steps"

    def worsening(self, plan: PrecisionPlan, half: int) -> np.ndarray:
        """Returns by how much each seed of a half is worse under a plan."""
        seeds = range(half * self._seeds, (half + 1) * self._seeds)
        low = np.array([self._trained(plan, seed) for seed in seeds])
        return self.score.worsening(low, self._exact[seeds])

    def _trained(self, plan: PrecisionPlan | None, seed: int) -> float:
        """Returns the metric after a training, on the half that its seed is of."""
        model = self._made(seed)
        if plan is None:
            put_under(model, make_settings("float32"))
        else:
            plan.apply(model)
        # Unlike `train_on_batch`, which hands all steps three parts, as `fit` does.
        step = around_training.on_batch(model)
        for number in range(self._num_steps):
            step(self._batches[number % len(self._batches)])
        batches = self._halves[seed // self._seeds]
        outputs = scores.predict(model, batches)
        if self.score is None:
            y = scores.targets(batches[0])
            self.score = scores.score_of(model, self._metric, outputs[0], y)
        return float(np.mean(scores.of_batches(self.score, batches, outputs)))

    def _made(self, seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        model = model_of(self._build)
        build(model, self._batches[0])
        return model

    def _check_deterministic(self) -> None:
        one, two = self._made(0).get_weights(), self._made(0).get_weights()
        shapes = [[w.shape for w in each] for each in (one, two)]
        if shapes[0] != shapes[1] or not all(map(np.array_equal, one, two)):
            raise ValueError(
                "`build_model` returns another model each time, although seeds were "
                "set; expected the same weights for the same seed. Draw them by "
                "`keras.initializers` with no seed of their own generator."
            )
