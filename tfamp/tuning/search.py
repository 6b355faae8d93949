"""Finds the fewest layers in float32 with which a metric holds, in few evaluations.

A ranking says which layers need float32 most. Then "the first k of it are in float32"
has one number to find: it starts from the ranking's own word, doubles where that does
not hold, and halves what lies between a k that holds and one that does not. Rankings
err, so what evaluations are left give layers back to half precision.
"""

import dataclasses
from collections.abc import Callable, Sequence

from tfamp.records.record import Record


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
    """One search among layers that may be in either precision.

    `evaluate` tries a plan with some of them in float32; `min_saving` is the share of a
    step below which a gain cannot be seen.
    """

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
        try:
            self._find_first_that_holds()
            self._give_back()
        except Stopped:
            pass
        except KeyboardInterrupt:
            if self.best is None:
                raise
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
