"""Finds by brute force which layers of a model half precision spoils.

Every unit is lowered alone, all are, and all but the guilty ones: the truth counts
only where these runs agree with one another, with a wide gap between good and bad.
"""

import dataclasses

from benchmarks.faults.lowering import Harm, Subject

# Error of outputs against the spread over the batch, and of a layer's gradient against
# its norm. Rounding alone stays below GOOD in healthy models of 20 layers. Gradients
# get more: a ReLU whose input changes its sign switches one. A resnet of 29 layers so
# had errors to 0.12 in float16 and 0.30 in bfloat16; with GELU in place of ReLU, 0.005
# and 0.034. What is to be found is above BAD. Between the two nobody can say, and the
# case does not count.
GOOD = {"float16": Harm(0.05, 0.15), "bfloat16": Harm(0.10, 0.35)}
BAD = {"float16": Harm(0.10, 0.30), "bfloat16": Harm(0.30, 0.50)}


@dataclasses.dataclass(frozen=True)
class Truth:
    """What the runs prove.

    Attributes:
        verdict: "safe", "layers", "loss scale" or "amplification", "undecided" where
            the runs prove nothing.
        guilty: Paths of the guilty layers.
        why: The figures, or what stayed undecided.
    """

    verdict: str
    guilty: frozenset[str]
    why: str


def prove(subject: Subject, dtype: str) -> Truth:
    """Returns the truth on a model in a dtype.

    Args:
        subject: The model and its batches.
        dtype: "float16" or "bfloat16".
    """
    good, bad = GOOD[dtype], BAD[dtype]
    everything = set(subject.paths)
    all_low = subject.harm(everything, dtype)
    if all_low.is_within(good):
        return Truth("safe", frozenset(), f"all low: {_text(all_low)}")
    scaled = subject.least_harm(everything, dtype, enough=good)
    if scaled.is_within(good):
        if all_low.is_within(bad):
            return _undecided(f"all low at scale 1: {_text(all_low)}")
        why = f"all low: {_text(all_low)}, scaled: {_text(scaled)}"
        return Truth("loss scale", frozenset(), why)
    if scaled.is_within(bad):
        return _undecided(f"all low: {_text(scaled)}")
    rounded = subject.harm_of_rounded_inputs(dtype)
    alone = {
        path: subject.least_harm({path}, dtype, enough=good) for path in subject.paths
    }
    if not rounded.is_within(bad) and (
        sum(not harm.is_within(bad) for harm in alone.values()) > 2
    ):
        return _amplification(subject, dtype, f"rounded inputs: {_text(rounded)}")
    unclear = {
        path: _text(harm)
        for path, harm in alone.items()
        if harm.is_within(bad) and not harm.is_within(good)
    }
    if unclear:
        return _undecided(f"alone between good and bad: {unclear}")
    guilty = frozenset(path for path, harm in alone.items() if not harm.is_within(bad))
    if not guilty:
        return _undecided(f"none bad alone, all low: {_text(scaled)}")
    cured = subject.least_harm(everything - guilty, dtype, enough=good)
    if not cured.is_within(good):
        return _undecided(f"{sorted(guilty)} in float32 leave {_text(cured)}")
    for path in sorted(guilty):
        without = subject.least_harm(everything - (guilty - {path}), dtype, enough=good)
        if without.is_within(bad):
            return _undecided(f"{path} may be low among {sorted(guilty)}")
    least = min(alone[path].worst for path in guilty)
    why = f"cured: {_text(cured)}, alone at least {least:.2g}"
    return Truth("layers", guilty, why)


def is_right(subject: Subject, dtype: str, guilty: frozenset[str]) -> bool:
    """Whether float32 for these units, low for all others, is as good as float32."""
    low = set(subject.paths) - guilty
    return subject.least_harm(low, dtype, enough=GOOD[dtype]).is_within(GOOD[dtype])


def _amplification(subject: Subject, dtype: str, why: str) -> Truth:
    """Proves that no single unit in float32 helps."""
    everything = set(subject.paths)
    for path in subject.paths:
        harm = subject.least_harm(everything - {path}, dtype, enough=GOOD[dtype])
        if harm.is_within(BAD[dtype]):
            return _undecided(f"{path} in float32 alone leaves {_text(harm)}")
    return Truth("amplification", frozenset(), why)


def _undecided(why: str) -> Truth:
    return Truth("undecided", frozenset(), why)


def _text(harm: Harm) -> str:
    return f"output {harm.output:.2g}, gradient {harm.gradient:.2g}"
