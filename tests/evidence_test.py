"""Evidence as a record: variants, measures, ratios, references, verdicts from runs."""

import dataclasses
import math
import re

import numpy as np
import pytest

from tests import made_evidence
from tests.refusals import refusals
from tfamp.comparison import verdict as judgement
from tfamp.trials.run_records import Run
from tfamp.trials.variant import Variant

WORDS = ("auto", "float32+xla", "keras:mixed_bfloat16", "keras:float32+xla")


@pytest.mark.parametrize("word", [*WORDS, "runs/plan.json+xla"])
def test_a_variant_is_written_as_it_was_read(word):
    assert str(Variant.parse(word)) == word


REFUSED = {
    "policy": ("fp16", "Unknown `policies` 'fp16'; expected 'auto', 'float32'"),
    "stock auto": ("keras:auto", "stock Keras has no 'auto' and no plan"),
}


test_a_variant_that_means_nothing_is_refused = refusals(REFUSED, Variant.parse)


def test_a_run_comes_back_with_every_field():
    run = dataclasses.replace(
        made_evidence.run("mixed_float16", 1),
        status="failed",
        error="it broke",
        energy_joules=12.5,
        num_nonfinite_weights=3,
        notes=("one",),
        outcome="fits",
    )
    defaults = Run("", 0)
    for field in dataclasses.fields(Run):
        assert getattr(run, field.name) != getattr(defaults, field.name), field.name
    assert Run.from_json(run.to_json()) == run


REFERENCES = {
    "the fastest float32": (
        {"float32": 1, "float32+xla": 1.5, "auto": 2},
        "float32+xla",
    ),
    "the first without one": ({"mixed_bfloat16": 1, "auto": 2}, "mixed_bfloat16"),
}


@pytest.mark.parametrize("speeds, expected", REFERENCES.values(), ids=REFERENCES)
def test_the_reference(speeds, expected):
    found = made_evidence.evidence({word: (x, 0.9) for word, x in speeds.items()})
    assert judgement.choose_reference(found.policies, found.runs) == expected


DIRECTIONS = {
    "max": (
        *("accuracy", "acc", "sparse_top_k_categorical_accuracy", "auc", "precision"),
        *("recall_at_precision", "f1_score", "mean_io_u", "binary_iou", "r2_score"),
        *("cosine_similarity", "dice", "val_accuracy", "my_top5_acc", "psnr", "bleu"),
    ),
    "min": (
        *("loss", "mse", "mae", "root_mean_squared_error", "logcosh", "log_cosh"),
        *("nll", "wer", "cer", "binary_crossentropy", "kl_divergence", "perplexity"),
        *("poisson", "hinge", "rmse", "false_negatives", "head_loss"),
    ),
}


@pytest.mark.parametrize("better", DIRECTIONS)
def test_known_metrics_have_their_direction(better):
    assert {judgement.direction(name) for name in DIRECTIONS[better]} == {better}


@pytest.mark.parametrize("name", ["gain", "my_metric", "answer", "neg_log_loss"])
def test_of_other_metrics_the_direction_is_asked_for(name):
    message = f"`metric` is {name!r}, and `better` is None; expected"
    with pytest.raises(ValueError, match=re.escape(message)):
        judgement.direction(name)


def pairs_of(metric, *values, number=0):
    """Runs of the reference and of "auto" with these values of a metric, by seed."""
    settings = {"examples_per_second": 1.0, "num_examples": number}
    return [
        tuple(
            Run(policy, seed, final_metrics={metric: value}, **settings)
            for policy, value in zip(("float32", "auto"), pair, strict=True)
        )
        for seed, pair in enumerate(values)
    ]


def losses(*values):
    return pairs_of("loss", *values)


def accuracies(*values, number=0):
    return pairs_of("accuracy", *values, number=number)


def judged(pairs, failures=(), **options):
    settings = {"metric": "loss", "better": "min", "tolerance": 0.01, **options}
    values = [run.final_metrics[settings["metric"]] for run, _ in pairs]
    settings["tolerance"] = judgement.allowed(
        settings["tolerance"], settings["better"], values
    )
    return judgement.verdict_on(pairs, failures, **settings)


TOLERANCES = {
    "half a point of an accuracy": (None, "max", [0.9, 0.92], 0.005),
    "5 % of a loss": (None, "min", [200, 220], 10.5),
    "5 % of a PSNR": (None, "max", [30.0, 32.0], 1.55),
    "given for an accuracy": (0.02, "max", [0.9], 0.02),
}


@pytest.mark.parametrize(
    ("given", "better", "values", "expected"), TOLERANCES.values(), ids=TOLERANCES
)
def test_what_loss_counts_as_none(given, better, values, expected):
    assert judgement.allowed(given, better, values) == pytest.approx(expected)


def judged_accuracy(pairs, **options):
    settings = {"metric": "accuracy", "better": "max", "tolerance": 0.005, **options}
    return judged(pairs, **settings)


def test_ties_on_few_examples_do_not_prove_equivalence():
    found = judged_accuracy(accuracies(*[(0.9, 0.9)] * 3, number=50))
    assert (found.answer, found.more_seeds) == ("undecided", None)
    # By hand: 0.9 * 0.1 * 50 lost and won, 1.645 * sqrt(8) / 50 is 0.093.
    assert 0.09 < found.tolerance_needed < 0.13
    assert found.num_examples == 50
    assert found.quality.low < -0.05
    # All right or all wrong is no certainty either.
    for value in (0.0, 1.0):
        found = judged_accuracy(accuracies(*[(value, value)] * 3, number=50))
        assert found.answer == "undecided"
        assert found.quality.low < -0.05 < 0.05 < found.quality.high


def test_an_accuracy_of_unknown_examples_decides_nothing():
    found = judged_accuracy(accuracies(*[(0.9, 0.9)] * 3))
    assert found.answer == "undecided"
    assert found.reason.startswith("on how many examples accuracy was taken is not")


def test_the_same_examples_show_more_than_two_accuracies():
    pairs = accuracies(*[(0.9, 0.9)] * 3, number=10_000)
    assert judged_accuracy(pairs).answer == "undecided"
    examples = np.zeros((3, 10_000))
    examples[:, :20], examples[:, 20:40] = 1, -1
    found = judged_accuracy(pairs, examples=examples)
    assert found.answer == "equivalent, not faster"
    # By hand: a deviation of sqrt(0.004) over 100, and quantile 1.645 of the normal.
    assert found.quality.low == pytest.approx(-1.645 * 0.004**0.5 / 100, rel=0.12)


def test_a_reference_that_is_nan_itself_decides_nothing():
    for after in (1.0, math.nan):
        found = judged(losses((math.nan, after), (1.0, 1.0)))
        assert (found.answer, found.more_seeds) == ("undecided", None)


def test_what_came_to_the_same_is_no_gain_whatever_the_noise():
    pairs = [
        tuple(
            dataclasses.replace(
                made_evidence.run(policy, seed, speed=speed), resolved_policy="float32"
            )
            for policy, speed in {"float32": 1.0, "auto": 1.2}.items()
        )
        for seed in range(3)
    ]

    found = judged_accuracy(pairs)
    assert found.answer == "equivalent, not faster"
    assert found.reason.startswith("auto came to float32 itself, so there is")
    assert judged_accuracy(pairs[:1]).answer == "equivalent, not faster"
    with_xla = [(a, dataclasses.replace(b, policy="auto+xla")) for a, b in pairs]
    assert judged_accuracy(with_xla).answer == "equivalent and faster"


def test_the_best_policy_gives_the_verdict():
    found = made_evidence.evidence(
        {"float32": (1, 0.98), "auto": (1.5, 0.98), "float16": (3, 0.5)}
    )
    assert {p: v.answer for p, v in found.verdicts.items()} == {
        "auto": "equivalent and faster",
        "float16": "worse",
    }
    assert (found.best, found.verdict) == ("auto", "equivalent and faster")


PLAN = "/home/somebody/runs/plan.json"


def test_a_plan_under_a_policy_is_not_that_policy():
    before = made_evidence.run("mixed_float16", 0)
    after = dataclasses.replace(before, policy=PLAN)
    # Not by its policy, but where every layer is the same.
    assert judgement.are_same(before, after)
    changed = {**made_evidence.LAYERS, "conv": "float32"}
    assert not judgement.are_same(before, dataclasses.replace(after, layers=changed))
    came_to = dataclasses.replace(after, resolved_policy="+xla")
    assert not judgement.are_same(before, came_to)


NAMES = {
    "options stay": (["a/p.json+xla", "a/p.json"], ["p.json+xla", "p.json"]),
    "folders differ": (["a/x/p.json", "b/x/p.json"], ["a/x/p.json", "b/x/p.json"]),
    "one is deeper": (["p.json", "/runs/p.json"], ["p.json", "/runs/p.json"]),
}


@pytest.mark.parametrize("policies, expected", NAMES.values(), ids=NAMES)
def test_names_of_plans_are_short_and_distinct(policies, expected):
    found = made_evidence.evidence(
        {"float32": (1, 0.9), **dict.fromkeys(policies, (1, 0.9))}
    )
    assert [*map(found.label, policies)] == expected
