"""From runs to verdicts: which policy is the reference, what each other comes to."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from tfamp.comparison.verdict import Examples, Verdict, judge
from tfamp.records import checks
from tfamp.trials.run_records import Run
from tfamp.trials.statistics import (
    Interval,
    effect_of_ratio,
    interval,
    interval_of_ratios,
)
from tfamp.trials.variant import Variant, short_names

Better = Literal["max", "min"]
# The losses of a metric that count as none, where nobody said: half a point of an
# accuracy, a part of everything else.
POINTS, PART = 0.005, 0.05
_UNKNOWN = Interval(math.nan, math.nan, math.nan)
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
# What a first comparison asks for where one run says nothing of the spread.
_USUAL_SEEDS = 3


def direction(metric: str) -> Better:
    """Returns whether a metric is better large or small; ValueError if unknown."""
    words = re.findall(r"[a-z]+\d*", metric.lower())
    # Keras numbers metrics of one name: "auc_1".
    for word in reversed(words if not _NEGATED & set(words) else []):
        forms = {word, word.rstrip("0123456789")}
        if forms & (_MIN_WORDS | _MAX_WORDS):
            return "min" if forms & _MIN_WORDS else "max"
    raise ValueError(
        f"`metric` is {metric!r}, and `better` is None; expected 'max' or 'min', since "
        "the name does not say whether a larger or a smaller value is better. Pass "
        "`better`."
    )


def choose_metric(runs: Sequence[Run], metric: str | None) -> str:
    """Returns the metric named, with or without "val_", else the first compiled one."""
    names = next(tuple(run.final_metrics) for run in runs if run.is_finished)
    if metric is not None:
        return checks.choice("metric", metric.removeprefix("val_"), names)
    return next((name for name in names if name != "loss"), "loss")


def choose_reference(policies: Sequence[str], runs: Sequence[Run]) -> str:
    """Returns the fastest float32, or the first policy where there is none.

    A gain over a float32 that could have been faster by a switch is none.
    """
    plain = [policy for policy in policies if Variant.parse(policy).is_float32]

    def rate(policy: str) -> float:
        own = (run for run in runs if run.policy == policy and run.is_finished)
        return float(np.median([run.examples_per_second for run in own] or [0.0]))

    return max(plain, key=rate, default=policies[0])


def allowed(tolerance: float | None, better: Better, values: Sequence[float]) -> float:
    """Returns the loss of a metric that counts as none, in the metric's own unit.

    Where more is better a tolerance is absolute, else a part of the mean of the
    reference's `values`; None takes `POINTS` of a metric in [0, 1] of which more is
    better, such as an accuracy, and `PART` of every other one.

    Example:
        >>> allowed(None, "max", [0.9, 0.92]), allowed(None, "min", [2.0, 4.0])
        (0.005, 0.15...)
    """
    known = [value for value in values if math.isfinite(value)]
    mean = abs(float(np.mean(known))) if known else 0.0
    if better == "max" and tolerance is not None:
        return tolerance
    if better == "max" and all(0 <= value <= 1 for value in known):
        return POINTS
    return (PART if tolerance is None else tolerance) * (mean or 1.0)


def verdict_on(
    pairs: Sequence[tuple[Run, Run]],
    failures: Sequence[Run],
    *,
    metric: str,
    better: Better,
    tolerance: float,
    examples: np.ndarray | None = None,
) -> Verdict:
    """Returns the verdict on a policy from its runs and the reference's of equal seeds.

    `failures` are runs of either that ended in an error; `tolerance` is in the metric's
    unit; `examples` has the metric of each validation example under the policy minus
    that under the reference, shape (pairs, examples).
    """
    ratios = [b.examples_per_second / a.examples_per_second for a, b in pairs]
    values = [(a.final_metrics[metric], b.final_metrics[metric]) for a, b in pairs]
    sign = 1 if better == "max" else -1
    differences = [sign * (y - x) for x, y in values]

    given: dict[str, Any] = {
        "quality": _UNKNOWN,
        "speed": interval_of_ratios(ratios),
        "tolerance": tolerance,
        "num_seeds": len(pairs),
    }
    given["speed_effect"] = effect_of_ratio(given["speed"], more_is_better=True)
    broken = [
        b.seed
        for (_, b), (x, y) in zip(pairs, values, strict=True)
        if math.isfinite(x) and not math.isfinite(y)
    ]
    if broken:
        reason = (
            "the metric is not a number after training with seeds "
            f"{', '.join(map(str, broken))}, where the reference's is"
        )
        return Verdict("worse", reason, **given, quality_effect="worse")
    reason = needs = ""
    if not all(math.isfinite(x) for x, _ in values):
        reason = "the reference itself trains to a metric that is not a number"
        needs = "a reference that trains would decide"
    elif failures:
        first = failures[0]
        name = short_names([run.policy for run in failures])[first.policy]
        reason = f"the run under {name} with seed {first.seed} failed: {first.error}"
        needs = "runs that do not fail would decide"
    if reason:
        return Verdict("undecided", reason, **given, needs=needs)
    given["quality"] = interval(differences)
    if pairs and all(are_same(before, after) for before, after in pairs):
        before, after = pairs[0]
        reason = (
            f"{after.policy} came to {before.policy} itself, so there is nothing to "
            "gain or to lose; what differs is noise"
        )
        given |= {"quality_effect": "same", "speed_effect": "same"}
        return Verdict("equivalent, not faster", reason, **given)
    if len(pairs) < 2:
        reason = "one seed shows no spread" if pairs else "0 seeds show no spread"
        given["more_seeds"] = _USUAL_SEEDS - len(pairs)
        needs = f"{_USUAL_SEEDS} seeds may decide"
        return Verdict("undecided", reason, **given, needs=needs)
    number = min(run.num_examples for pair in pairs for run in pair)
    is_rate = _is_fraction(values, number, better)
    found: Examples | None = None
    if examples is not None:
        is_rate = is_rate and bool(np.abs(examples).max(initial=0.0) <= 1)
        found = Examples.of(sign * examples, is_rate=is_rate)
    elif is_rate and number:
        before, after = np.mean(values, axis=0) if sign > 0 else 1 - np.mean(values, 0)
        found = Examples.of_fractions(float(before), float(after), number)
    elif is_rate:
        reason = (
            f"on how many examples {metric} was taken is not known, so nothing says "
            "how far it may be off"
        )
        needs = "validation data whose examples can be counted would decide"
        return Verdict("undecided", reason, **given, needs=needs)
    return judge(differences, ratios, tolerance=tolerance, examples=found)


def _is_fraction(
    values: Sequence[tuple[float, float]], number: int, better: Better
) -> bool:
    """Whether a metric is a mean of values in [0, 1], as accuracies are.

    All metrics in [0, 1] of which more is better are taken for such, and those of
    which less is better where they are multiples of one part of the examples.
    """
    array = np.asarray(values, np.float64)
    parts = array * number
    is_count = number > 0 and bool((np.abs(parts - np.round(parts)) < 1e-3).all())
    in_range = bool(((array >= 0) & (array <= 1)).all())
    return in_range and (better == "max" or is_count)


def are_same(before: Run, after: Run) -> bool:
    """Whether two runs computed the same under two names, as "auto" often does."""
    one, two = (
        {layer.path: layer.compute_dtype for layer in run.layers}
        for run in (before, after)
    )
    first, second = Variant.parse(before.policy), Variant.parse(after.policy)
    is_plan = first.is_plan or second.is_plan
    return (
        bool(before.resolved_policy)
        and before.resolved_policy == after.resolved_policy
        and one == two
        # The policy of a plan is not that of each of its layers.
        and (bool(one) or not is_plan)
        and first == dataclasses.replace(second, policy=first.policy)
    )
