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
            suspects,
            key=lambda s: (not s.is_guilty, -s.error / (s.saving + 1e-3)),
        )
        self._evaluate, self._most = evaluate, max_evaluations
        self._min_saving = min_saving
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
                return
            below, number = number, min(number + grown, len(self._order))
            grown *= 2
        while number - below > 1 and self._saving(below + 1, number):
            # Without any first: most models need none beyond the rules'.
            middle = 0 if below < 0 else (below + number) // 2
            if self._try(self._order[:middle]):
                number = middle
            else:
                below = middle

    def _give_back(self) -> None:
        """Gives back what only lay on the way at once, then one after the other."""
        kept = self._in_float32()
        between = [each for each in kept if not each.is_guilty][:-1]
        if between and self._try([each for each in kept if each not in between]):
            kept = self._in_float32()
        # The dearest for their error first; what saves too little is not worth a try.
        for suspect in sorted(kept, key=lambda s: -s.saving / (s.error + 1e-12)):
            if suspect.saving <= self._min_saving or len(kept) < 2:
                continue
            rest = [each for each in kept if each is not suspect]
            if self._try(rest):
                kept = rest

    def _in_float32(self) -> list[Suspect]:
        """Returns the layers that the best plan so far has in float32."""
        kept = () if self.best is None else self.best.float32
        return [suspect for suspect in self._order if suspect.path in kept]

    def _saving(self, first: int, end: int) -> bool:
        """States whether some layers save enough for a clock to see it."""
        return sum(s.saving for s in self._order[first:end]) > self._min_saving

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
        now = sum(suspect.saving for suspect in suspects), len(suspects)
        best = self._in_float32()
        before = sum(suspect.saving for suspect in best), len(best)
        if found.holds and (self.best is None or now < before):
            self.best = found
        return found.holds
