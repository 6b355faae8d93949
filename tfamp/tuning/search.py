"""Finds the fewest layers in float32 with which a metric holds, in few evaluations.

The first k of a ranking are in float32: k starts from the ranking's own word, doubles
where that does not hold, and halves what lies between. Rankings err, so what
evaluations are left give layers back to half precision.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.dtypes.settings import make_settings
from tfamp.models import put_under
from tfamp.plan import PrecisionPlan
from tfamp.records.checks import first_line
from tfamp.records.record import Record
from tfamp.stepping.unchanged import unchanged
from tfamp.trials import scores
from tfamp.trials.statistics import change_limit, interval
from tfamp.tuning.measured_policies import put_back


@dataclasses.dataclass(frozen=True)
class Evaluation(Record):
    """One plan that was tried."""

    float32: tuple[str, ...]  # the layers in float32 beyond those that rules keep
    worsening: float  # by how much the metric is worse than in float32, the mean
    bound: float  # what the true worsening is below, with the confidence of the search
    holds: bool  # whether that is within the tolerance
    num_examples: int  # that it comes from


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A layer that may be in float32."""

    path: str
    error: float  # what half precision does to it alone
    saving: float  # the share of a step that half precision saves on it
    is_guilty: bool  # whether the ranking holds that it needs float32


class Stopped(Exception):
    """The evaluations are spent."""


class Search:
    """One search among layers that may be in either precision."""

    def __init__(
        self,
        suspects: Sequence[Suspect],
        evaluate: Callable[[tuple[str, ...]], Evaluation],
        *,
        max_evaluations: int,
        min_saving: float = 0.0,
    ) -> None:
        # Guilty ones first; then by how much error a unit of saving brings.
        self._order = sorted(
            suspects, key=lambda s: (not s.is_guilty, -s.error / (s.saving + 1e-3))
        )
        self._evaluate, self._most = evaluate, max_evaluations
        self._min_saving, self._kept = min_saving, list(self._order)
        self.tried: list[Evaluation] = []
        self.best: Evaluation | None = None

    def run(self) -> Evaluation | None:
        """Returns the best plan that holds, None where none of those tried does."""
        with contextlib.suppress(Stopped):
            self._find_first_that_holds()
            self._give_back()
        return self.best

    def _find_first_that_holds(self) -> None:
        below, grown = -1, 1
        number = sum(suspect.is_guilty for suspect in self._order)
        while not self._try(self._order[:number]):
            if number >= len(self._order):
                raise Stopped
            below, number = number, min(number + grown, len(self._order))
            grown *= 2
        while number - below > 1:
            saved = sum(s.saving for s in self._order[below + 1 : number])
            if saved <= self._min_saving:
                break
            # Without any first: most models need none beyond the rules'.
            middle = 0 if below < 0 else (below + number) // 2
            if self._try(self._order[:middle]):
                number = middle
            else:
                below = middle

    def _give_back(self) -> None:
        """Gives back what only lay on the way at once, then one after the other."""
        between = [each for each in self._kept if not each.is_guilty][:-1]
        if between:
            self._try([each for each in self._kept if each not in between])
        # The dearest for their error first; what saves too little is not worth a try.
        for suspect in sorted(self._kept, key=lambda s: -s.saving / (s.error + 1e-12)):
            if suspect.saving > self._min_saving and len(self._kept) > 1:
                self._try([each for each in self._kept if each is not suspect])

    def _try(self, suspects: Sequence[Suspect]) -> bool:
        """Returns whether the metric holds with these in float32."""
        float32 = tuple(suspect.path for suspect in suspects)
        for known in self.tried:
            if set(known.float32) == set(float32):
                return known.holds
        if len(self.tried) >= self._most:
            raise Stopped
        found = self._evaluate(float32)
        self.tried.append(found)
        now, before = (
            (sum(each.saving for each in kept), len(kept))
            for kept in (suspects, self._kept)
        )
        if found.holds and (self.best is None or now < before):
            self.best, self._kept = found, list(suspects)
        return found.holds


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
        with unchanged(self._model), put_back(self._model):
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
