"""By how much a metric is worse under a plan than in float32, example by example."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.dtypes.settings import make_settings
from tfamp.models import put_under
from tfamp.plan import PrecisionPlan
from tfamp.records.checks import first_line
from tfamp.stepping.unchanged import unchanged
from tfamp.trials import scores
from tfamp.trials.statistics import change_limit, interval
from tfamp.tuning.measured_policies import put_back
from tfamp.tuning.search import Evaluation


class Judge:
    """Compares the outputs of a trained model under plans with those in float32.

    `halves` are batches to choose by, and batches to judge by at the end.
    """

    def __init__(
        self,
        model: keras.Model,
        halves: tuple[Sequence[Any], Sequence[Any]],
        metric: Any,
    ) -> None:
        self._model, self._halves = model, halves
        with unchanged(model), put_back(model):
            put_under(model, make_settings("float32"))
            outputs = [scores.predict(model, half) for half in halves]
        y = keras.utils.unpack_x_y_sample_weight(halves[0][0])[1]
        self.score = scores.score_of(model, metric, outputs[0][0], y)
        self._exact = [self._values(each, half) for half, each in enumerate(outputs)]
        values = np.concatenate(self._exact)
        self.fewest = min(map(len, self._exact))
        self.reference = float(np.mean(values))
        self.is_rate = set(np.unique(values)) <= {0.0, 1.0}

    def evaluate(
        self,
        plan: PrecisionPlan,
        float32: Sequence[str],
        half: int,
        *,
        rate: float,
        tolerance: float,
    ) -> Evaluation:
        """Returns how a plan does on a half; one that cannot run does not hold."""
        try:
            worse = self.worsening(plan, half)
        except (TypeError, ValueError, NotImplementedError, tf.errors.OpError) as error:
            # In float32 the model ran: the plan's dtypes do not go together.
            logging.info("A plan cannot run: %s", first_line(error))
            worse = np.array([np.inf])
        mean = bound = math.inf
        if np.isfinite(worse).all():
            mean = float(np.mean(worse))
            bound = upper_bound(worse, rate, is_rate=self.is_rate)
        holds = bound <= tolerance
        return Evaluation(tuple(float32), mean, bound, holds, len(worse))

    def worsening(self, plan: PrecisionPlan, half: int) -> np.ndarray:
        """Returns by how much each example is worse under a plan."""
        with put_back(self._model):
            plan.apply(self._model)
            outputs = scores.predict(self._model, self._halves[half])
        return self.score.worsening(self._values(outputs, half), self._exact[half])

    def _values(self, outputs: Sequence[Any], half: int) -> np.ndarray:
        """Returns the score of each example."""
        unpack, batches = keras.utils.unpack_x_y_sample_weight, self._halves[half]
        pairs = zip((unpack(batch)[1] for batch in batches), outputs, strict=True)
        return np.concatenate([scores.values_of(self.score, y, x) for y, x in pairs])


def upper_bound(worsening: np.ndarray, rate: float, *, is_rate: bool) -> float:
    """Returns what the true mean worsening is below, but for a chance of `rate`."""
    if is_rate:
        return change_limit(worsening, rate=rate)
    return interval(worsening, rate).high
