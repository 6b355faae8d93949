"""Says whether a policy is as accurate as another one and faster, or what is missing.

Runs are paired by seed: what a seed does to both policies cancels in the difference.
Quality and speed are two answers, each from one interval (`tfamp.trials.statistics`).
"""

import bisect
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from tfamp.records import checks
from tfamp.records.record import Record
from tfamp.records.units import join_words
from tfamp.trials import statistics
from tfamp.trials.run_records import Run
from tfamp.trials.statistics import MIN_GAIN, Effect, Interval
from tfamp.trials.variant import Variant, short_names

Better = Literal["max", "min"]
# The best one last.
Answer = Literal[
    "worse", "slower", "undecided", "equivalent, not faster", "equivalent and faster"
]
# The losses of a metric that count as none, where nobody said: half a point of an
# accuracy, a part of everything else.
POINTS, PART = 0.005, 0.05
# Beyond so many seeds, or so many times the examples, more of them is no advice.
_MAX_SEEDS, _MAX_FACTOR, _USUAL_SEEDS = 100, 100, 3
# How much of the variance that examples make seeds differ by is left out of the seeds'
# part, and how much wider that makes the examples'. With three seeds, of those that err
# least (below 5 % where seeds scatter as much as examples make them) these see most.
_LEFT_OUT, _WIDER = 1.4, 1.25**2
# Words of a metric's name that say which way is better. Keras puts the name of an
# output before that of its metric, so the last word that is known decides.
_MIN_WORDS = frozenset(
    "crossentropy cer deviance divergence entropy error errors false hinge kl kld "
    "logcosh cosh loss mae mape mse msle nll perplexity poisson rmse wer".split()
)
_MAX_WORDS = frozenset(
    "acc accuracy auc bleu correct dice f1 fbeta io iou kappa map mcc miou mrr ndcg "
    "precision psnr r2 recall rouge score sensitivity similarity specificity ssim "
    "true".split()
)
_NEGATED = frozenset(("neg", "negative", "minus", "inverse"))


@dataclasses.dataclass(frozen=True)
class Verdict(Record):
    """What a comparison of two policies comes to.

    `quality` is of the difference of the metric, above 0 where the policy is better,
    `speed` of the ratio of examples/s, above 1 where it is faster. Undecided ones say
    what would decide, in words (`needs`) and by number.
    """

    answer: Answer
    reason: str
    quality: Interval
    speed: Interval
    tolerance: float
    num_seeds: int
    needs: str = ""
    more_seeds: int | None = None
    num_examples: int = 0
    examples_needed: int | None = None
    tolerance_needed: float | None = None
    quality_effect: Effect = ""
    speed_effect: Effect = ""

    def __str__(self) -> str:
        """Returns the answer, the reason and what would decide."""
        return "; ".join(filter(None, (self.answer, self.reason, self.needs)))


@dataclasses.dataclass(frozen=True)
class Examples:
    """What the validation examples, which all seeds share, leave open of a metric.

    `changes` are those of each example, the mean over seeds, above 0 where the policy
    is better, and in [-1, 1] where `is_rate`. `within` is the variance that examples
    give to the difference of one seed; more seeds take away the part `passing`.
    """

    changes: np.ndarray
    is_rate: bool
    within: float = 0.0
    passing: float = 0.0

    @classmethod
    def of(cls, changes: np.ndarray, *, is_rate: bool) -> "Examples":
        """Returns them of changes of shape (seeds, examples)."""
        seeds, number = changes.shape
        of_each = np.var(changes, axis=0, ddof=1) if seeds > 1 else np.zeros(number)
        within, means = float(of_each.mean()), changes.mean(axis=0)
        all_in_all = float(np.var(means))
        passing = min(within / seeds / all_in_all, 1.0) if all_in_all else 0.0
        return cls(means, is_rate, within / number, passing)

    @classmethod
    def of_fractions(cls, before: float, after: float, number: int) -> "Examples":
        """Returns them of two fractions, as if right answers came independently."""
        lost = round(before * (1 - after) * number)
        won = round(after * (1 - before) * number)
        changes = np.zeros(number)
        changes[:lost], changes[lost : lost + won] = -1, 1
        return cls(changes, is_rate=True)

    def reach(self, times: float = 1.0) -> tuple[float, float]:
        """Returns how far the true mean may lie below and above, of `times` as many."""
        if self.is_rate:
            middle, limit = float(self.changes.mean()), statistics.change_limit
            return middle + limit(-self.changes, times), limit(
                self.changes, times
            ) - middle
        spread = float(np.std(self.changes, ddof=1))
        return (statistics.half_width(spread, int(times * len(self.changes))),) * 2


def direction(metric: str) -> Better:
    """Returns whether a metric is better large or small; ValueError if unknown."""
    words = re.findall(r"[a-z]+\d*", metric.lower())
    # Keras numbers metrics of one name: "auc_1".
    for word in reversed(words if not _NEGATED & set(words) else []):
        forms = {word, word.rstrip("0123456789")}
        if forms & (_MIN_WORDS | _MAX_WORDS):
            return "min" if forms & _MIN_WORDS else "max"
    raise ValueError(
        f"`metric` is {metric!r}, and `better` is None; expected 'max' or 'min', which "
        "the name does not say. Pass `better`."
    )


def choose_metric(runs: Sequence[Run], metric: str | None) -> str:
    """Returns the metric named, with or without "val_", else the first compiled one."""
    names = next(tuple(run.final_metrics) for run in runs if run.is_finished)
    if metric is not None:
        return checks.choice("metric", metric.removeprefix("val_"), names)
    return next((name for name in names if name != "loss"), "loss")


def choose_reference(policies: Sequence[str], runs: Sequence[Run]) -> str:
    """Returns the fastest float32, or the first policy where there is none."""

    def rate(policy: str) -> float:
        own = (run for run in runs if run.policy == policy and run.is_finished)
        return float(np.median([run.examples_per_second for run in own] or [0.0]))

    plain = [policy for policy in policies if Variant.parse(policy).policy == "float32"]
    return max(plain, key=rate, default=policies[0])


def allowed(tolerance: float | None, better: Better, values: Sequence[float]) -> float:
    """Returns the loss of a metric that counts as none, in the metric's own unit.

    Where more is better a tolerance is absolute, else a part of the mean of the
    reference's `values`.
    """
    known = [value for value in values if math.isfinite(value)]
    mean = abs(float(np.mean(known))) if known else 0.0
    if better == "max" and tolerance is not None:
        return tolerance
    if better == "max" and all(0 <= value <= 1 for value in known):
        return POINTS
    return (PART if tolerance is None else tolerance) * (mean or 1.0)


def are_same(before: Run, after: Run) -> bool:
    """Whether two runs computed the same under two names, as "auto" often does."""
    first, second = Variant.parse(before.policy), Variant.parse(after.policy)
    return (
        bool(before.resolved_policy)
        and before.resolved_policy == after.resolved_policy
        and before.layers == after.layers
        # The policy of a plan is not that of each of its layers.
        and (bool(before.layers) or not (first.is_plan or second.is_plan))
        and first == dataclasses.replace(second, policy=first.policy)
    )


def verdict_on(
    pairs: Sequence[tuple[Run, Run]],
    failures: Sequence[Run],
    *,
    metric: str,
    better: Better,
    tolerance: float,
    examples: np.ndarray | None = None,
) -> Verdict:
    """Returns the verdict on a policy from pairs of runs, the reference's first."""
    sign, number = (1 if better == "max" else -1), len(pairs)
    # What an accuracy is worth of weights that are not finite nobody should know.
    rows = [
        [math.nan if r.num_nonfinite_weights else r.final_metrics[metric] for r in pair]
        for pair in pairs
    ]
    values = np.array(rows, np.float64).reshape(-1, 2)
    finite = np.isfinite(values)
    differences = (sign * (values[:, 1] - values[:, 0])).tolist()
    ratios = [b.examples_per_second / a.examples_per_second for a, b in pairs]
    speed = statistics.interval_of_ratios(ratios)

    def because(answer: Answer, reason: str, needs: str = "", **more: Any) -> Verdict:
        known = {"quality": statistics.interval([]), "needs": needs, **more}
        given: Any = {"speed": speed, "tolerance": tolerance, "num_seeds": number}
        return Verdict(answer, reason, **given, **known)

    broken = [
        str(pair[1].seed)
        for pair, (before, after) in zip(pairs, finite, strict=True)
        if before and not after
    ]
    if broken:
        reason = "the metric, or a weight, is not a number after training with seeds "
        reason += (
            f"{', '.join(broken)}, where the reference's is; `tfamp triage` names the "
            "layer or the learning rate"
        )
        return because("worse", reason, quality_effect="worse")
    if not finite.all():
        reason = (
            "the reference itself trains to a metric, or weights, that are no numbers"
        )
        needs = "a reference that trains would decide; `tfamp triage` says why it fails"
        return because("undecided", reason, needs)
    if failures:
        first = failures[0]
        name = short_names([run.policy for run in failures])[first.policy]
        reason = f"the run under {name} with seed {first.seed} failed: {first.error}"
        needs = "runs that do not fail would decide"
        is_stopped = "LossScaleError" in first.error
        needs += "; `tfamp triage` names the cause" * is_stopped
        return because("undecided", reason, needs)
    quality: Any = {"quality": statistics.interval(differences)}
    if pairs and all(are_same(*pair) for pair in pairs):
        reason = (
            f"{pairs[0][1].policy} came to {pairs[0][0].policy} itself, so there is "
            "nothing to gain or to lose; what differs is noise"
        )
        same: Any = {"quality_effect": "same", "speed_effect": "same", **quality}
        return because("equivalent, not faster", reason, **same)
    if number < 2:
        reason = f"{'one seed shows' if pairs else '0 seeds show'} no spread"
        needs = f"{_USUAL_SEEDS} seeds may decide"
        more = _USUAL_SEEDS - number
        return because("undecided", reason, needs, more_seeds=more, **quality)
    # A mean of values in [0, 1], as accuracies are: all metrics in it of which more is
    # better, of the others those that are multiples of one part of the examples.
    count = min(run.num_examples for pair in pairs for run in pair)
    parts = values * count
    is_count = count > 0 and bool((np.abs(parts - np.round(parts)) < 1e-3).all())
    is_rate = bool(((values >= 0) & (values <= 1)).all())
    is_rate = is_rate and (better == "max" or is_count)
    found: Examples | None = None
    if examples is not None:
        is_rate = is_rate and bool(np.abs(examples).max(initial=0.0) <= 1)
        found = Examples.of(sign * examples, is_rate=is_rate)
    elif is_rate and count:
        means = values.mean(axis=0) if sign > 0 else 1 - values.mean(axis=0)
        found = Examples.of_fractions(float(means[0]), float(means[1]), count)
    elif is_rate:
        reason = (
            f"on how many examples {metric} was taken is not known, so nothing says "
            "how far it may be off"
        )
        needs = "validation data whose examples can be counted would decide"
        return because("undecided", reason, needs, **quality)
    return judge(differences, ratios, tolerance=tolerance, examples=found)


def judge(
    differences: Sequence[float],
    ratios: Sequence[float],
    *,
    tolerance: float,
    examples: Examples | None = None,
) -> Verdict:
    """Returns the verdict on a policy from differences of the metric and speed ratios.

    "Worse" is a loss beyond `tolerance`; a policy that is better is equivalent. What
    is slower is "slower" however good it is, unless it is worse. "Not faster" means
    that a gain of `MIN_GAIN` or more can be ruled out.

    Example:
        >>> judge([0.001, -0.001, 0.0], [1.9, 2.0, 2.1], tolerance=0.005).answer
        'equivalent and faster'
        >>> judge([0.01, -0.01], [2.0, 2.1], tolerance=0.005).needs
        '24 seeds or a tolerance of 0.064 would decide'

    Source: Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15, 1987.
    """
    quality = _quality(differences, examples)
    speed = statistics.interval_of_ratios(ratios)
    effect = _effect(quality, tolerance)
    speed_effect = statistics.effect_of_ratio(speed, more_is_better=True)
    lost = f"at most {-quality.low:.3g}" if quality.low < 0 else "nothing"
    reason = f"the metric loses {lost}"
    rest: dict[str, Any] = {}
    answer: Answer = "undecided"
    if effect == "worse":
        answer = "worse"
        reason = f"the metric loses {-quality.high:.3g} or more"
    elif effect == "unclear":
        reason = (
            f"the metric may lose {-quality.low:.3g} or change by {quality.high:+.3g}"
        )
        rest = _what_decides_quality(quality, differences, tolerance, examples)
    elif speed_effect == "better":
        answer = "equivalent and faster"
    elif speed.high < MIN_GAIN:
        answer = "equivalent, not faster"
    else:
        reason = f"as accurate, but maybe faster and maybe not: {reason}"
        rest = _what_decides_speed(ratios)
    if answer != "worse" and speed_effect == "worse":
        answer, rest = "slower", {"tolerance_needed": rest.get("tolerance_needed")}
    middle, low, high = (
        f"{value:#.3g}".rstrip(".") for value in dataclasses.astuple(speed)
    )
    return Verdict(
        answer,
        f"{reason}, where {tolerance:.3g} is allowed; {middle} times ({low} to {high}) "
        "as many examples/s",
        *(quality, speed, tolerance, len(ratios)),
        num_examples=0 if examples is None else len(examples.changes),
        quality_effect=effect,
        speed_effect=speed_effect,
        **rest,
    )


def _effect(found: Interval, tolerance: float) -> Effect:
    """Returns what a difference of the metric comes to."""
    if found.high < -tolerance:
        return "worse"
    if found.low > tolerance:
        return "better"
    return "as good" if found.low >= -tolerance else "unclear"


def _quality(
    differences: Sequence[float],
    examples: Examples | None,
    *,
    seeds: int | None = None,
    times: float = 1.0,
    reach: Callable[[float], tuple[float, float]] | None = None,
) -> Interval:
    """Returns the interval of the difference over seeds and over examples.

    Both parts are joined by adding squares. What the examples alone make seeds differ
    by is left out of the seeds' part, else it would count twice, and widens its own,
    since the spread of a few seeds may be small by chance; two seeds tell nothing.

    Source: Zou & Donner, Statistics in Medicine 27, 2008.
    """
    middle, variance = float(np.mean(differences)), float(np.var(differences, ddof=1))
    number, within, below, above = len(differences), 0.0, 0.0, 0.0
    seeds = number if seeds is None else seeds
    if examples is not None:
        wider = _WIDER if seeds > 2 else 1.0
        left = 1 + examples.passing * (wider * number / seeds - 1)
        below, above = (
            math.sqrt(left) * each for each in (reach or examples.reach)(times)
        )
        within = examples.within / times
        variance = max(variance - (examples.within - within), 0.0)
    own = variance - (_LEFT_OUT * within if seeds > 2 else 0.0)
    half = statistics.half_width(math.sqrt(max(own, 0.0)), seeds)
    return Interval(
        middle, middle - math.hypot(half, below), middle + math.hypot(half, above)
    )


def _what_decides_quality(
    quality: Interval,
    differences: Sequence[float],
    tolerance: float,
    examples: Examples | None,
) -> dict[str, Any]:
    """Returns the fields of a verdict that say what would decide its quality."""
    reach = None if examples is None else functools.cache(examples.reach)

    def decides(**more: Any) -> bool:
        found = _quality(differences, examples, reach=reach, **more)
        return _effect(found, tolerance) != "unclear"

    seeds = _first(lambda count: decides(seeds=count), len(differences))
    needed = None
    if examples is not None:
        sizes = np.geomspace(1.0, _MAX_FACTOR, 64).tolist()
        place = bisect.bisect_left(sizes, True, key=lambda each: decides(times=each))
        if place < len(sizes):
            needed = int(_rounded_up(sizes[place] * len(examples.changes)))
    least = _rounded_up(-quality.low)
    ways = [f"{seeds} seeds"] * bool(seeds)
    ways += [f"{needed or 0:,} validation examples"] * bool(needed)
    ways.append(f"a tolerance of {least:.3g}")
    return {
        "needs": f"{join_words(ways, 'or')} would decide",
        "more_seeds": seeds and seeds - len(differences),
        "examples_needed": needed,
        "tolerance_needed": least,
    }


def _what_decides_speed(ratios: Sequence[float]) -> dict[str, Any]:
    """Returns the fields of a verdict that say what would decide its speed."""
    logarithms = np.log(np.asarray(ratios, np.float64))
    middle, least = float(np.mean(logarithms)), math.log(MIN_GAIN)
    # From 1, to be faster; from the least gain, to be not.
    distance = middle if middle >= least else least - middle
    spread, width = float(np.std(logarithms, ddof=1)), statistics.half_width
    seeds = _first(lambda count: width(spread, count) < distance, len(ratios))
    if seeds is None:
        return {"needs": "a machine with less noise would decide: the gain is small"}
    return {"needs": f"{seeds} seeds would decide", "more_seeds": seeds - len(ratios)}


def _first(decides: Callable[[int], bool], number: int) -> int | None:
    """Returns the first number of seeds above one that decides."""
    return next(filter(decides, range(number + 1, _MAX_SEEDS + 1)), None)


def _rounded_up(value: float) -> float:
    """Returns a number above 0 with two digits, no smaller."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")
