"""What the measures beside the verdict come to, with one error rate for a report.

A report judges some ten measures of each policy. At 5 % on each side of each of them,
two reports of three call something better or worse between a policy and itself. So the
error of a report is shared: half of it belongs to the two primary measures, the metric
and the training speed, which the verdict judges; the other half to all others together,
by Holm's method. Measures that answer one question are judged once: a training step by
the training speed, the percentiles and the rate of calls of one batch size by their
median. "Better" and "worse" need a difference of `MIN_GAIN` besides; "same" is an
equivalence test with that margin. Where a policy came to the reference itself,
everything is the same.

Source: Holm, A simple sequentially rejective multiple test procedure, Scandinavian
Journal of Statistics 6, 1979; Bretz et al., A graphical approach to sequentially
rejective multiple test procedures, Statistics in Medicine 28, 2009.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tfamp.comparison.evidence.evidence import Evidence
from tfamp.comparison.evidence.judgement import are_same
from tfamp.comparison.evidence.measures import measures_of
from tfamp.records import checks
from tfamp.trials.intervals import (
    ERROR_RATE,
    MIN_GAIN,
    Effect,
    difference_rate_of,
    effect_of_ratio,
    interval_of_ratios,
)

# The metric beside it has no ratio.
PRIMARY = "examples_per_second"
_REST_RATE = ERROR_RATE / 2


def effects_of(evidence: Evidence) -> dict[tuple[str, str], Effect]:
    """Returns what each measure comes to, by policy and name of the measure.

    Measures that another one answers for have none.

    Args:
        evidence: What was measured.
    """
    asked = [m for m in measures_of(evidence.runs) if not m.answered_by]
    found: dict[tuple[str, str], Effect] = {}
    ratios: dict[tuple[str, str], list[float]] = {}
    for policy in evidence.candidates:
        pairs = evidence.pairs(policy)
        is_same = bool(pairs) and all(are_same(*pair) for pair in pairs)
        for measure in asked:
            key = policy, measure.name
            values = evidence.ratios(measure, policy)
            if is_same and values:
                found[key] = "same"
            elif measure.name == PRIMARY and values:
                found[key] = _of_speed(evidence, policy, values)
            elif values:
                ratios[key] = values
    differs = holm({key: p_value(each) for key, each in ratios.items()}, _REST_RATE)
    more = {measure.name: measure.more_is_better for measure in asked}
    for key, values in ratios.items():
        found[key] = _effect(values, key in differs, more_is_better=more[key[1]])
    return found


def holm(
    p_values: Mapping[tuple[str, str], float], rate: float
) -> set[tuple[str, str]]:
    """Returns the questions whose null hypotheses are rejected.

    Args:
        p_values: Of each question; NaN for one that cannot be tested.
        rate: Chance that any true hypothesis is among the rejected.

    Example:
        >>> found = holm({("a", "x"): 0.01, ("a", "y"): 0.02, ("a", "z"): 0.4}, 0.05)
        >>> sorted(name for _, name in found)
        ['x', 'y']
    """
    known = sorted((p, key) for key, p in p_values.items() if not math.isnan(p))
    rejected = set()
    for place, (p, key) in enumerate(known):
        if p > rate / (len(known) - place):
            break
        rejected.add(key)
    return rejected


def p_value(ratios: Sequence[float]) -> float:
    """Returns the chance of a mean so far from 1, of ratios that are 1 in truth.

    Args:
        ratios: One for each seed; of one alone it is NaN.
    """
    if len(ratios) < 2:
        return math.nan
    logarithms = np.log(np.asarray(ratios, np.float64))
    middle, spread = float(np.mean(logarithms)), float(np.std(logarithms, ddof=1))
    if not spread:
        # Sizes of files do not scatter.
        return 0.0 if middle else 1.0
    stats = checks.require("scipy.stats", extra="report", purpose="`tfamp.compare`")
    distance = abs(middle) / spread * math.sqrt(len(ratios))
    return float(2 * stats.t.sf(distance, len(ratios) - 1))


def _effect(ratios: Sequence[float], differs: bool, *, more_is_better: bool) -> Effect:
    found = interval_of_ratios(ratios)
    if differs and abs(math.log(found.estimate)) >= math.log(MIN_GAIN):
        return "better" if (found.estimate > 1) == more_is_better else "worse"
    plain = effect_of_ratio(found, more_is_better=more_is_better)
    return "unclear" if plain in ("better", "worse") else plain


def _of_speed(evidence: Evidence, policy: str, ratios: Sequence[float]) -> Effect:
    """Returns what the verdict says of the training speed."""
    verdict = evidence.verdicts.get(policy)
    if verdict is not None and verdict.speed_effect:
        return verdict.speed_effect
    number = max(len(evidence.candidates), 1)
    rate = difference_rate_of(evidence.num_looks, number)
    return effect_of_ratio(interval_of_ratios(ratios, rate), more_is_better=True)
