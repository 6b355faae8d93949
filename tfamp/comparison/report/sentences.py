"""What a comparison comes to, in one sentence for people."""

import contextlib
import dataclasses
import math
from typing import Literal

import numpy as np

from tfamp.comparison import figures
from tfamp.comparison.evidence import Evidence
from tfamp.comparison.judgement import are_same
from tfamp.comparison.report import rows
from tfamp.records.units import join_words
from tfamp.trials import storage
from tfamp.trials.variant import Variant

Kind = Literal["good", "neutral", "bad", "open"]
# Longer texts of errors stand in the table of runs, in full.
_MAX_ERROR = 300


@dataclasses.dataclass(frozen=True)
class Badge:
    """The answer in two words, with a sign, so that colour is never alone."""

    text: str
    kind: Kind
    sign: str


_BADGES = {
    "equivalent and faster": Badge("Equivalent and faster", "good", "✓"),
    "equivalent, not faster": Badge("Equivalent, not faster", "neutral", "="),
    "slower": Badge("Slower", "bad", "✕"),
    "worse": Badge("Worse", "bad", "✕"),
    "undecided": Badge("Undecided", "open", "?"),
}


def best(evidence: Evidence) -> str | None:
    """Returns the policy with the best verdict, None where there is no verdict."""
    judged = all(policy in evidence.verdicts for policy in evidence.candidates)
    return evidence.best if evidence.candidates and judged else None


def badge(evidence: Evidence, policy: str | None) -> Badge:
    """Returns the badge of a policy."""
    verdict = evidence.verdicts.get(policy or "")
    if verdict is None or not evidence.pairs(policy or ""):
        return Badge("Nothing to compare", "bad", "✕")
    return _BADGES[verdict.answer]


def verdict_sentence(evidence: Evidence) -> str:
    """Returns what the comparison comes to: the sentence on the best policy."""
    policy = best(evidence)
    if policy is not None:
        return policy_sentence(evidence, policy)
    if not evidence.candidates:
        reference = evidence.label(evidence.reference)
        return f"Only {reference} was measured, so nothing is compared."
    return f"Nothing is compared: {_why_nothing(evidence)}."


def policy_sentence(evidence: Evidence, policy: str) -> str:
    """Returns what a candidate comes to, with the figures that decide."""
    verdict, name = evidence.verdicts.get(policy), named(evidence, policy)
    reference = evidence.label(evidence.reference)
    if verdict is None or not evidence.pairs(policy):
        return (
            f"Nothing is known of {name}: no seed finished both under it and under "
            f"{reference}; {_why_nothing(evidence, policy)}."
        )
    alike = f"as {_adjective(evidence)} as {reference}"
    lead = {
        "equivalent and faster": f"{name} is {alike} and faster",
        "equivalent, not faster": f"{name} is {alike}, but not faster",
        "slower": f"{name} is slower than {reference}",
        "worse": f"{name} is less {_adjective(evidence)} than {reference}",
        "undecided": f"Not decided yet whether {name} is {alike} and faster",
    }[verdict.answer]
    number = verdict.num_seeds
    seeds = f"{number} seed" if number == 1 else f"{number} seeds"
    means = f"{_metric(evidence, policy)}, {seeds}"
    return f"{lead}: {means}; {shortened(verdict.reason)}."


def advice(evidence: Evidence, policy: str) -> str:
    """Returns what to do about a policy, in one sentence."""
    verdict = evidence.verdicts.get(policy)
    reference = evidence.label(evidence.reference)
    if verdict is None or not evidence.pairs(policy):
        return "Look at the errors of the runs, and measure again."
    if verdict.answer == "equivalent and faster":
        return f"Use it: {how_to_use(policy)}."
    is_same = all(are_same(*pair) for pair in evidence.pairs(policy))
    if verdict.answer == "equivalent, not faster" and is_same:
        name = evidence.label(policy)
        return f"{name} costs nothing here, and pays on machines that can do more."
    if verdict.answer == "equivalent, not faster":
        return f"Stay with {reference}, unless it is memory or size that you need."
    if verdict.answer == "worse":
        return (
            f"Stay with {reference}, or keep the layers that lose it in float32 "
            "(keep_float32=)."
        )
    if verdict.answer == "slower":
        return f"Stay with {reference}."
    return f"{verdict.needs[:1].upper()}{verdict.needs[1:]}."


def how_to_use(policy: str) -> str:
    """Returns the lines of code that turn a policy on."""
    try:
        variant = Variant.parse(policy)
    except ValueError:
        return f"policy {policy}"
    none = "" if variant.has_rules else ", keep_float32='none'"
    call = f"tfamp.enable({variant.policy!r}{none})"
    if storage.is_plan_file(variant.policy):
        # What was given is a plan itself; its file may be gone.
        call = "tfamp.enable(plan)"
    if variant.is_stock:
        call = f"keras.config.set_dtype_policy({variant.policy!r})"
    steps = [f"{call} before the model is built"]
    if variant.jit_compile:
        steps.append("compile(jit_compile=True)")
    if variant.rewrite:
        steps.append("TensorFlow's graph rewrite for bfloat16")
    return ", ".join(steps)


def reference_sentence(evidence: Evidence) -> str:
    """Returns which policy the others are held against, and why that one."""
    reference = evidence.reference
    plain = []
    for policy in evidence.policies:
        with contextlib.suppress(ValueError):  # no policy that is known here
            plain += [policy] if Variant.parse(policy).is_float32 else []
    if reference not in plain:
        name = evidence.label(reference)
        return f"Compared with {name}, the first policy, since none is float32."
    if len(plain) == 1:
        return f"Compared with {reference}."
    speeds = {
        p: rows.middle(evidence, p, lambda run: run.examples_per_second) for p in plain
    }
    form = figures.format_for("per second", speeds.values())
    each = [f"{policy} {form(speed)}" for policy, speed in speeds.items()]
    return (
        f"Compared with {reference}, the fastest of {len(plain)} ways to train in "
        f"float32 ({join_words(each)} examples/s); a gain over a slower one would be "
        "none."
    )


def named(evidence: Evidence, policy: str) -> str:
    """Returns a policy with what it came to, where that is another name."""
    found = [run.resolved_policy for run in evidence.finished(policy)]
    name = evidence.label(policy)
    if not found or not found[0] or found[0] in name:
        return name
    return f"{name} ({found[0]})"


def failures(evidence: Evidence) -> str:
    """Returns how many runs failed, "" if none did."""
    number = sum(not run.is_finished for run in evidence.runs)
    return f"{number} of {len(evidence.runs)} runs failed." if number else ""


def _why_nothing(evidence: Evidence, policy: str | None = None) -> str:
    """Returns the first error of the runs that matter."""
    wanted = (policy, evidence.reference) if policy else evidence.policies
    for run in evidence.runs:
        if not run.is_finished and run.policy in wanted:
            where = f"{evidence.label(run.policy)} with seed {run.seed}"
            return f"{where} failed with {shortened(run.error)}"
    return "no two runs have the same seed"


def _adjective(evidence: Evidence) -> str:
    return "accurate" if "acc" in evidence.metric.lower() else "good"


def _metric(evidence: Evidence, policy: str) -> str:
    """Returns the metric's mean under a policy against the reference's."""
    pairs = evidence.pairs(policy)
    form = figures.metric_format(evidence.tolerance, digits=1)
    means = []
    for runs in ([b for _, b in pairs], [a for a, _ in pairs]):
        mean = float(np.mean([rows.final(evidence, run) for run in runs]))
        means.append(form(mean) if math.isfinite(mean) else "not a number")
    return f"{evidence.metric} {means[0]} against {means[1]}"


def shortened(error: str) -> str:
    r"""Returns the first line of an error, cut.

    Example:
        >>> shortened("ValueError: no such layer.\n  at line 3")
        'ValueError: no such layer'
    """
    first = next((line for line in error.strip().splitlines() if line), "no error text")
    first = first.rstrip(".")
    return first if len(first) <= _MAX_ERROR else f"{first[: _MAX_ERROR - 1]}…"
