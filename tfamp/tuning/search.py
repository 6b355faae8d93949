"""Finds the fewest layers in float32 with which a metric holds, in few evaluations.

A ranking says which layers need float32 most. Then "the first k of it are in float32"
has one number to find: it starts from the ranking's own word, doubles where that does
not hold, and halves what lies between a k that holds and one that does not. Rankings
err, so what evaluations are left try single layers, the dearest first.
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
    num_examples: int  # examples, or seeds, that it comes from
    seconds: float = 0.0  # what it took


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A layer that may be in float32."""

    path: str  # its path
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

    @property
    def num_guilty(self) -> int:
        """How many layers the ranking holds to need float32."""
        return sum(suspect.is_guilty for suspect in self._order)

    def run(self) -> Evaluation | None:
        """Returns the best plan that holds, None where none of those tried does."""
        try:
            holds = self._first_that_holds()
            if holds is not None:
                self._shrink(*holds)
                self._give_back_together()
                self._give_back_singly()
        except Stopped:
            pass
        except KeyboardInterrupt:
            if self.best is None:
                raise
        return self.best

    def _first_that_holds(self) -> tuple[int, int] | None:
        """Returns the largest number known not to hold, and one that does."""
        below, number, grown = -1, self.num_guilty, 1
        while True:
            if self._holds(number):
                return below, number
            if number >= len(self._order):
                return None
            below, number = number, min(number + grown, len(self._order))
            grown *= 2

    def _shrink(self, below: int, holds: int) -> None:
        """Halves what lies between; what saves too little is not worth a try."""
        while holds - below > 1 and self._saving(below + 1, holds) > self._min_saving:
            # Without any first: most models need none beyond the rules'.
            middle = 0 if below < 0 else (below + holds) // 2
            if self._holds(middle):
                holds = middle
            else:
                below = middle

    def _give_back_together(self) -> None:
        """Gives back those that only lay on the way to one that the ranking missed."""
        kept = self._in_float32()
        between = [each for each in kept if not each.is_guilty][:-1]
        middle = len(between) // 2
        for group in (between, between[:middle], between[middle:]):
            if sum(each.saving for each in group) <= self._min_saving:
                continue
            rest = [each for each in kept if each not in group]
            if self._try(tuple(each.path for each in rest)).holds:
                kept = rest
                if group is between:
                    return

    def _give_back_singly(self) -> None:
        """Gives back one after the other, the dearest for their error first."""
        kept = self._in_float32()
        for suspect in sorted(kept, key=lambda s: -s.saving / (s.error + 1e-12)):
            if suspect.saving <= self._min_saving or len(kept) < 2:
                continue
            rest = [each for each in kept if each is not suspect]
            if self._try(tuple(each.path for each in rest)).holds:
                kept = rest

    def _in_float32(self) -> list[Suspect]:
        """Returns the layers that the best plan so far has in float32."""
        kept = () if self.best is None else self.best.float32
        by_path = {suspect.path: suspect for suspect in self._order}
        return [by_path[path] for path in kept]

    def _saving(self, first: int, end: int) -> float:
        return sum(suspect.saving for suspect in self._order[first:end])

    def _holds(self, number: int) -> bool:
        return self._try(tuple(s.path for s in self._order[:number])).holds

    def _try(self, float32: tuple[str, ...]) -> Evaluation:
        for known in self.tried:
            if set(known.float32) == set(float32):
                return known
        if len(self.tried) >= self._most:
            raise Stopped
        found = self._evaluate(float32)
        self.tried.append(found)
        if found.holds and self._is_better(found):
            self.best = found
        return found

    def _is_better(self, found: Evaluation) -> bool:
        if self.best is None:
            return True
        saved = {suspect.path: suspect.saving for suspect in self._order}

        def cost(plan: Evaluation) -> tuple[float, int]:
            return sum(saved[path] for path in plan.float32), len(plan.float32)

        return cost(found) < cost(self.best)
