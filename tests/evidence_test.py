"""Verdicts: from runs to pairs, intervals by hand, each answer, and its sentence.

How often they claim what is not so is in `wild/verdicts_test.py`.
"""

import dataclasses
import math
import re

import numpy as np
import pytest

from tests import made_evidence
from tests.refusals import refusals
from tfamp.comparison import verdict as judgement
from tfamp.comparison.verdict import judge
from tfamp.trials.run_records import Run
from tfamp.trials.variant import Variant


def test_a_variant_is_written_as_it_was_read():
    for word in ("keras:float32+xla", "runs/plan.json+xla"):
        assert str(Variant.parse(word)) == word


REFUSED = {
    "policy": ("fp16", "Unknown `policies` 'fp16'; expected 'auto', 'float32'"),
    "stock auto": ("keras:auto", "stock Keras has no 'auto' and no plan"),
}
test_a_variant_that_means_nothing_is_refused = refusals(REFUSED, Variant.parse)


def test_a_run_comes_back_with_every_field():
    changed = {"status": "failed", "error": "it broke", "outcome": "fits"}
    changed |= {"energy_joules": 12.5, "num_nonfinite_weights": 3, "notes": ("one",)}
    changed |= {"model": "net", "replicas": 2, "data_batch_size": 8}
    run = dataclasses.replace(made_evidence.run("mixed_float16", 1), **changed)
    defaults = Run("", 0)
    for field in dataclasses.fields(Run):
        assert getattr(run, field.name) != getattr(defaults, field.name), field.name
    assert Run.from_json(run.to_json()) == run


def test_the_reference_is_the_fastest_float32_or_the_first():
    for policies, expected in (
        ({"float32": 1, "float32+xla": 1.5, "auto": 2}, "float32+xla"),
        ({"mixed_bfloat16": 1, "auto": 2}, "mixed_bfloat16"),
    ):
        found = made_evidence.evidence({word: (x, 0.9) for word, x in policies.items()})
        assert judgement.choose_reference(found.policies, found.runs) == expected


DIRECTIONS = {
    "max": "accuracy acc sparse_top_k_categorical_accuracy auc precision bleu psnr "
    "recall_at_precision f1_score mean_io_u binary_iou r2_score cosine_similarity dice "
    "val_accuracy my_top5_acc",
    "min": "loss mse mae root_mean_squared_error logcosh log_cosh nll wer cer rmse "
    "binary_crossentropy kl_divergence perplexity poisson hinge false_negatives "
    "head_loss",
}


@pytest.mark.parametrize("better", DIRECTIONS)
def test_known_metrics_have_their_direction_and_of_others_it_is_asked_for(better):
    known = {judgement.direction(name) for name in DIRECTIONS[better].split()}
    assert known == {better}
    for name in ("my_metric", "neg_log_loss"):
        message = f"`metric` is {name!r}, and `better` is None; expected"
        with pytest.raises(ValueError, match=re.escape(message)):
            judgement.direction(name)


TOLERANCES = {
    "half a point of an accuracy": (None, "max", [0.9, 0.92], 0.005),
    "5 % of a loss": (None, "min", [200, 220], 10.5),
    "5 % of a PSNR": (None, "max", [30.0, 32.0], 1.55),
    "given for an accuracy": (0.02, "max", [0.9], 0.02),
}


@pytest.mark.parametrize("row", TOLERANCES.values(), ids=TOLERANCES)
def test_what_loss_counts_as_none(row):
    *given, expected = row
    assert judgement.allowed(*given) == pytest.approx(expected)


def pairs_of(*values, number=0):
    """Runs of the reference and of "auto" with these accuracies, by seed."""
    settings = {"examples_per_second": 1.0, "num_examples": number}
    return [
        tuple(
            Run(policy, seed, final_metrics={"accuracy": value}, **settings)
            for policy, value in zip(("float32", "auto"), pair, strict=True)
        )
        for seed, pair in enumerate(values)
    ]


def judged(pairs, failures=(), **options):
    settings = {"metric": "accuracy", "better": "max", "tolerance": 0.005, **options}
    return judgement.verdict_on(pairs, failures, **settings)


def test_ties_on_few_examples_do_not_prove_equivalence():
    found = judged(pairs_of(*[(0.9, 0.9)] * 3, number=50))
    assert (found.answer, found.more_seeds) == ("undecided", None)
    # By hand: 0.9 * 0.1 * 50 lost and won, 1.645 * sqrt(8) / 50 is 0.093.
    assert 0.09 < found.tolerance_needed < 0.13
    assert found.num_examples == 50
    assert found.quality.low < -0.05
    # All right or all wrong is no certainty either.
    for value in (0.0, 1.0):
        found = judged(pairs_of(*[(value, value)] * 3, number=50))
        assert found.answer == "undecided"
        assert found.quality.low < -0.05 < 0.05 < found.quality.high


def test_the_same_examples_show_more_than_two_accuracies():
    pairs = pairs_of(*[(0.9, 0.9)] * 3, number=10_000)
    assert judged(pairs).answer == "undecided"
    examples = np.zeros((3, 10_000))
    examples[:, :20], examples[:, 20:40] = 1, -1
    found = judged(pairs, examples=examples)
    assert found.answer == "equivalent, not faster"
    # By hand: a deviation of sqrt(0.004) over 100, and quantile 1.645 of the normal.
    assert found.quality.low == pytest.approx(-1.645 * 0.004**0.5 / 100, rel=0.12)


def test_a_training_that_diverges_is_sent_to_triage():
    for after in (1.0, math.nan):
        found = judged(pairs_of((math.nan, after), (1.0, 1.0)))
        assert (found.answer, found.more_seeds) == ("undecided", None)
        assert "tfamp triage" in found.needs
    found = judged(pairs_of((1.0, math.nan), (1.0, 1.0)))
    assert found.answer == "worse" and "`tfamp triage`" in found.reason


def test_what_came_to_the_same_is_no_gain_whatever_the_noise():
    def run(policy, seed, speed):
        made = made_evidence.run(policy, seed, speed=speed)
        return dataclasses.replace(made, resolved_policy="float32")

    pairs = [(run("float32", seed, 1.0), run("auto", seed, 1.2)) for seed in range(3)]
    found = judged(pairs)
    assert found.answer == "equivalent, not faster"
    assert found.reason.startswith("auto came to float32 itself, so there is")
    with_xla = [(a, dataclasses.replace(b, policy="auto+xla")) for a, b in pairs]
    assert judged(with_xla).answer == "equivalent and faster"


def test_the_best_policy_gives_the_verdict():
    found = made_evidence.evidence(
        {"float32": (1, 0.98), "auto": (1.5, 0.98), "float16": (3, 0.5)}
    )
    assert {p: v.answer for p, v in found.verdicts.items()} == {
        "auto": "equivalent and faster",
        "float16": "worse",
    }
    assert (found.best, found.verdict) == ("auto", "equivalent and faster")


def test_a_plan_under_a_policy_is_not_that_policy():
    before = made_evidence.run("mixed_float16", 0)
    after = dataclasses.replace(before, policy="/home/somebody/runs/plan.json")
    # Not by its policy, but where every layer is the same.
    assert judgement.are_same(before, after)
    changed = {**made_evidence.LAYERS, "conv": "float32"}
    assert not judgement.are_same(before, dataclasses.replace(after, layers=changed))


@pytest.mark.parametrize(
    "policies, expected",
    [
        (["a/p.json+xla", "a/p.json"], ["p.json+xla", "p.json"]),
        (["a/x/p.json", "b/x/p.json"], ["a/x/p.json", "b/x/p.json"]),
    ],
)
def test_names_of_plans_are_short_and_distinct(policies, expected):
    given = {"float32": (1, 0.9), **dict.fromkeys(policies, (1, 0.9))}
    found = made_evidence.evidence(given)
    assert [*map(found.label, policies)] == expected


SAME_SPEED = (1.0, 1.0, 1.0)
TOLERANCE = 0.005


# By hand: with three seeds the half width is 2.920 / sqrt(3) = 1.686 deviations.
FASTER, NOT_FASTER = "equivalent and faster", "equivalent, not faster"
NONE, FAST = [0.0] * 3, [2.0, 2.0, 2.1]
ANSWERS = {
    "same and faster": ([0.001, 0.0, -0.001], [1.9, 2.0, 2.1], FASTER),
    "same and as fast": ([0.001, 0.0, -0.001], SAME_SPEED, NOT_FASTER),
    "faster in the noise": (NONE, [0.9, 1.1, 1.3], "undecided"),
    "a sure gain too small to count": (NONE, [1.002] * 3, NOT_FASTER),
    "slower": (NONE, [0.5, 0.5, 0.51], "slower"),
    "slower by too little to count": (NONE, [0.97, 0.971, 0.972], NOT_FASTER),
    "slower, and maybe less accurate": ([-0.02, 0.0, 0.02], [0.5, 0.5, 0.51], "slower"),
    "slower and less accurate": ([-0.011, -0.012, -0.01], [0.5, 0.5, 0.51], "worse"),
    "better counts as same": ([0.19, 0.2, 0.21], FAST, FASTER),
    "1 % worse": ([-0.011, -0.012, -0.01], FAST, "worse"),
    "too little to be sure": ([-0.006, -0.007, -0.005], SAME_SPEED, "undecided"),
    "noise": ([-0.02, 0.0, 0.02], FAST, "undecided"),
    "at the tolerance": ([-0.005] * 3, SAME_SPEED, NOT_FASTER),
    "just beyond it": ([-0.00501] * 3, SAME_SPEED, "worse"),
}


@pytest.mark.parametrize("differences, ratios, answer", ANSWERS.values(), ids=ANSWERS)
def test_each_case_has_its_answer(differences, ratios, answer):
    assert judge(differences, ratios, tolerance=TOLERANCE).answer == answer


def test_the_sentence_has_the_figures():
    verdict = judge([0.001, 0.0, -0.001], [1.9, 2.0, 2.1], tolerance=TOLERANCE)
    assert str(verdict) == (
        "equivalent and faster; the metric loses at most 0.00169, where 0.005 is "
        "allowed; 2.00 times (1.84 to 2.17) as many examples/s"
    )
    worse = judge([-0.011, -0.012, -0.01], SAME_SPEED, tolerance=TOLERANCE)
    assert str(worse).startswith("worse; the metric loses 0.00931 or more, where")


def test_as_many_seeds_as_it_asks_for_decide():
    def judged_of(number):
        drawn = np.random.default_rng(0).normal(size=number)
        spread = 0.01 * (drawn - drawn.mean()) / drawn.std(ddof=1)
        return judge(spread, [1.0] * number, tolerance=TOLERANCE)

    needed = 4 + judged_of(4).more_seeds
    assert judged_of(needed).answer == NOT_FASTER
    assert judged_of(needed - 1).answer == "undecided"


def test_a_loss_of_just_the_tolerance_is_told_by_no_number_of_seeds():
    found = judge([-0.005 - 0.01, -0.005 + 0.01], [1.0, 1.0], tolerance=TOLERANCE)
    assert (found.answer, found.more_seeds) == ("undecided", None)
    # Quantile 6.314 of one degree of freedom: 0.005 + 6.314 * 0.01 = 0.0681.
    assert found.needs == "a tolerance of 0.069 would decide"
