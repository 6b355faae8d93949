"""How often verdicts of `tfamp.compare` claim what is not so, simulated.

Of every setting the truth is known: a policy that loses just the tolerance, or one that
is the same as the reference. Printed is the part of the comparisons with a false claim.
`equal_policies` trains instead.

Time: about ten minutes on two CPU cores, in which nothing is trained.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfamp.comparison.evidence import Evidence
from tfamp.comparison.report.rows import rows
from tfamp.comparison.result import conclude
from tfamp.comparison.verdict import Verdict, judge
from tfamp.trials.intervals import Fractions, PairedExamples, Sampling, rate_of
from tfamp.trials.run_records import Latency, Memory, Run, Spread
from tfamp.trials.storage import Job

TOLERANCE = 0.005
# At these numbers of seeds it is looked, or where the last look advises it.
LOOKS = (3, 5, 8, 12)
MOST_LOOKS, MOST_SEEDS = 12, 60
FLAGS = (("integer", "comparisons", 2000, "Of each setting."),)
Setting = Callable[[np.random.Generator], bool]


def lost_examples(
    rng: np.random.Generator,
    *,
    seeds: int,
    examples: int,
    loss: float = TOLERANCE,
    shared: float = 0.0,
    flips: float = 0.0,
    seed_deviation: float = 0.0,
) -> np.ndarray:
    """Returns what a policy changes on each example, shape (seeds, examples).

    Args:
        rng: Draws them.
        seeds: Pairs of runs.
        examples: Of the validation set.
        loss: The true loss of accuracy.
        shared: Part of the loss on examples that every seed loses.
        flips: Chance that an example is lost by a seed, and that it is gained, beside
            that loss.
        seed_deviation: Of the loss, over seeds.
    """
    of_seed = rng.normal((1 - shared) * loss, seed_deviation, (seeds, 1))
    drawn = rng.random((seeds, examples), np.float32)
    lost = drawn < flips + np.maximum(of_seed, 0)
    gained = drawn > 1 - flips - np.maximum(-of_seed, 0)
    always = rng.random(examples) < shared * loss
    return np.where(always, -1, gained.astype(np.int8) - lost.astype(np.int8))


def is_called_equivalent(
    rng: np.random.Generator, *, per_example: bool = True, **given: Any
) -> bool:
    """Whether a policy that loses the tolerance is called equivalent."""
    changes = lost_examples(rng, **given)
    differences = changes.mean(axis=1)
    sampling: Sampling = PairedExamples(changes, is_bounded=True)
    if not per_example:
        mean = float(differences.mean())
        sampling = Fractions(0.9, min(max(0.9 + mean, 0.0), 1.0), changes.shape[1])
    ratios = np.ones(len(differences))
    found = judge(differences, ratios, tolerance=TOLERANCE, sampling=sampling)
    return found.is_as_good


def is_called_equivalent_by_a_loss(
    rng: np.random.Generator, *, seeds: int, examples: int
) -> bool:
    """Whether a loss that grows by the tolerance is called equivalent.

    Losses of examples scatter log-normally, those of seeds besides.
    """
    of_example = rng.lognormal(-1.0, 1.0, examples)
    change = rng.normal(0, 0.3, (seeds, examples)) * of_example
    of_seed = rng.normal(0, 0.002, (seeds, 1))
    differences = change + of_seed - TOLERANCE
    found = judge(
        differences.mean(axis=1),
        np.ones(seeds),
        tolerance=TOLERANCE,
        sampling=PairedExamples(differences, is_bounded=False),
    )
    return found.is_as_good


def is_ever_claimed(
    rng: np.random.Generator,
    claim: Callable[[Verdict], bool],
    *,
    looks: Sequence[int] | None = LOOKS,
    mean: float = -TOLERANCE,
    ratio: float = 1.0,
    deviation: float = 0.004,
) -> bool:
    """Whether one of several looks makes a false claim.

    Args:
        rng: Draws differences and ratios of the seeds.
        claim: Whether a verdict makes it.
        looks: Numbers of seeds; None follows the advice of each look, and looks at two
            more seeds where there is none.
        mean: True difference of the metric.
        ratio: True ratio of the examples/s.
        deviation: Of the differences, over seeds.
    """
    differences = rng.normal(mean, deviation, MOST_SEEDS)
    ratios = ratio * np.exp(rng.normal(0, 0.05, MOST_SEEDS))
    number, look = (looks or LOOKS)[0], 1
    while look <= MOST_LOOKS and number <= MOST_SEEDS:
        found = judge(
            differences[:number], ratios[:number], tolerance=TOLERANCE, look=look
        )
        if claim(found):
            return True
        if looks is not None:
            if look == len(looks):
                return False
            number = looks[look]
        else:
            number += min(found.more_seeds or 2, 10)
        look += 1
    return False


def is_one_of_several_called_equivalent(rng: np.random.Generator) -> bool:
    """Whether one of four policies that lose the tolerance is called equivalent."""
    return any(
        judge(
            rng.normal(-TOLERANCE, 0.004, 5),
            np.ones(5),
            tolerance=TOLERANCE,
            num_candidates=4,
        ).is_as_good
        for _ in range(4)
    )


def report_of_the_same(
    rng: np.random.Generator, *, seeds: int, noise: float, num_policies: int = 2
) -> Evidence:
    """Returns evidence on policies that are all the same but for noise.

    Args:
        rng: Draws the noise.
        seeds: Of each policy's runs.
        noise: Deviation of the training speed over runs; latencies scatter twice as
            much and with heavy tails, memory a tenth as much.
        num_policies: With the reference.
    """
    names = ("float32", "auto", "mixed_bfloat16", "bfloat16")[:num_policies]
    right, examples = rng.normal(0.9, 0.01, seeds), 1000

    def run(policy: str, seed: int) -> Run:
        speed = 1000 * math.exp(rng.normal(0, noise))
        latencies = []
        for size in (1, 8, 32, 64):
            p50 = 0.001 * size * math.exp(2 * noise * rng.standard_t(3))
            tail = math.exp(abs(rng.normal(0, 4 * noise)))
            rate = size / p50 * math.exp(rng.normal(0, noise))
            latencies.append(Latency(size, p50, p50 * tail, p50 * tail**2, rate, 100))
        held = 500 + 400 * math.exp(rng.normal(0, noise / 10))
        accuracy = min(max(right[seed] + rng.normal(0, noise / 10), 0), 1)
        return Run(
            policy,
            seed,
            resolved_policy=policy,
            examples_per_second=speed,
            step=Spread(64 / speed, 60 / speed, 70 / speed, 100),
            first_step_seconds=2 * math.exp(rng.normal(0, noise)),
            final_metrics={"accuracy": round(accuracy * examples) / examples},
            num_examples=examples,
            latencies=tuple(latencies),
            memory=Memory(500 * 2**20, int(held * 2**20)),
            file_bytes=160_000,
        )

    runs = [run(policy, seed) for seed in range(seeds) for policy in names]
    job = Job("", names, tuple(range(seeds)), 1)
    settings = {"metric": "accuracy", "better": "max", "tolerance": TOLERANCE}
    return conclude(job, runs, context=None, **settings)


def has_a_difference(evidence: Evidence) -> bool:
    """Whether a report calls anything better or worse."""
    found = {cell.effect for row in rows(evidence) for cell in row.cells}
    return bool(found & {"better", "worse"})


def worst_choice_of_seeds(
    looks: int = 8, *, rate_of: Callable[[int], float] = rate_of, points: int = 241
) -> float:
    """Returns the error of whoever chooses the seeds of each look by the last one.

    By dynamic programming over the standardized mean of differences with a known
    deviation: the number of seeds that is added is any part or multiple of those there
    are, chosen to make a false claim as likely as possible.

    Args:
        looks: How many there are.
        rate_of: What a look may spend, by its number.
        points: Of the grids of means and of noise.
    """
    means = np.linspace(-6.0, 6.0, points)
    chances = np.exp(-(means**2) / 2)
    chances /= chances.sum()
    limits = [statistics.NormalDist().inv_cdf(1 - rate_of(k + 1)) for k in range(looks)]
    later = np.zeros(points)
    for limit in limits[:0:-1]:
        best = np.zeros(points)
        for added in np.geomspace(0.02, 500, 40):
            after = (means[:, None] + np.sqrt(added) * means) / np.sqrt(1 + added)
            needed = (limit * np.sqrt(1 + added) - means) / np.sqrt(added)
            claimed = np.array([math.erfc(each / math.sqrt(2)) / 2 for each in needed])
            rest = np.where(after > limit, 0, np.interp(after, means, later)) @ chances
            best = np.maximum(best, claimed + rest)
        later = best
    first = rate_of(1)
    return first + float(chances @ np.where(means > limits[0], 0, later))


def _equivalent(found: Verdict) -> bool:
    return found.is_as_good


def _faster(found: Verdict) -> bool:
    return found.speed_effect == "better"


def _examples(**given: Any) -> Setting:
    return lambda rng: is_called_equivalent(rng, **given)


def _looks(claim: Callable[[Verdict], bool], **given: Any) -> Setting:
    return lambda rng: is_ever_claimed(rng, claim, **given)


def _report(**given: Any) -> Setting:
    return lambda rng: has_a_difference(report_of_the_same(rng, **given))


# What is claimed falsely: "equivalent" at a loss of the tolerance unless it says else.
SETTINGS: dict[str, Setting] = {
    "50 examples, 1 % lost, 2 seeds": _examples(seeds=2, examples=50, loss=0.01),
    "50 examples, 1 % lost, 3 seeds": _examples(seeds=3, examples=50, loss=0.01),
    "800 examples, few flips": _examples(seeds=2, examples=800),
    "1,000 examples, all seeds lose the same": _examples(
        seeds=3, examples=1000, shared=1.0
    ),
    "1,000 examples, 10 seeds, ties": _examples(seeds=10, examples=1000, shared=0.5),
    "2,000 examples, seeds scatter": _examples(
        seeds=3, examples=2000, flips=0.01, seed_deviation=0.003
    ),
    "10,000 examples, 2 seeds": _examples(
        seeds=2, examples=10_000, flips=0.02, seed_deviation=0.001
    ),
    "10,000 examples, 5 seeds": _examples(
        seeds=5, examples=10_000, flips=0.02, shared=0.5, seed_deviation=0.001
    ),
    "10,000 examples that are not known one by one": _examples(
        seeds=3, examples=10_000, flips=0.02, per_example=False
    ),
    "50 examples that are not known one by one": _examples(
        seeds=2, examples=50, loss=0.01, per_example=False
    ),
    "a loss, 500 examples": lambda rng: is_called_equivalent_by_a_loss(
        rng, seeds=3, examples=500
    ),
    "looks at 3, 5, 8 and 12 seeds": _looks(_equivalent),
    "looks that follow the advice": _looks(_equivalent, looks=None),
    "looks after each seed": _looks(_equivalent, looks=tuple(range(2, 14))),
    "faster where it is as fast, looks that follow the advice": _looks(
        _faster, looks=None, mean=0.0
    ),
    "the best of four policies": is_one_of_several_called_equivalent,
    "a report between equals, 2 seeds, 3 % noise": _report(seeds=2, noise=0.03),
    "a report between equals, 3 seeds, 3 % noise": _report(seeds=3, noise=0.03),
    "a report between equals, 5 seeds, 3 % noise": _report(seeds=5, noise=0.03),
    "a report between equals, 3 seeds, 20 % noise": _report(seeds=3, noise=0.2),
    "a report between equals, 10 seeds, 20 % noise": _report(seeds=10, noise=0.2),
    "a report between four equals, 5 seeds": _report(
        seeds=5, noise=0.1, num_policies=4
    ),
}


def rate(name: str, comparisons: int) -> float:
    """Returns the part of the comparisons in which a setting's false claim is made."""
    rng = np.random.default_rng(sum(map(ord, name)))
    return sum(SETTINGS[name](rng) for _ in range(comparisons)) / comparisons


def measure(settings: Any) -> dict[str, Any]:
    """Returns each rate, and prints it as it comes."""
    comparisons = 3 if settings.smoke else settings.comparisons
    rates = {}
    for name in SETTINGS:
        # A report takes as long as some fifty comparisons.
        is_report = "report" in name and not settings.smoke
        rates[name] = rate(name, comparisons // 5 if is_report else comparisons)
        print(f"{100 * rates[name]:5.1f} %  {name}", flush=True)
    name = "seeds of each look chosen to err as often as possible, computed"
    rates[name] = worst_choice_of_seeds(2 if settings.smoke else 8)
    print(f"{100 * rates[name]:5.1f} %  {name}", flush=True)
    met = max(rates.values()) <= 0.05
    return {"comparisons": comparisons, "rates": rates, "met": met}
