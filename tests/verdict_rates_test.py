"""Error rates of verdicts where the truth is known, simulated in NumPy and printed."""

import dataclasses

import pytest

from benchmarks import equal_policies as EQUALS
from benchmarks import verdict_rates as RATES
from tfamp.comparison.judgement import are_same
from tfamp.trials.child import layers_of
from tfamp.trials.intervals import rate_of
from tfamp.trials.run_records import Run
from tfamp.trials.variant import Variant, in_force

pytest.importorskip("scipy")


MOST_FALSE = 0.05


@pytest.mark.parametrize("name", RATES.SETTINGS)
def test_false_claims_are_at_most_one_in_twenty(name):
    comparisons = 40 if "report" in name else 100 if "examples" in name else 300
    rate = RATES.rate(name, comparisons)
    print(f"{100 * rate:.1f} % of {comparisons} comparisons: {name}")
    assert rate <= MOST_FALSE


def test_whoever_chooses_when_to_look_errs_in_at_most_one_of_twenty():
    rate = RATES.worst_choice_of_seeds(5, points=121)
    print(f"{100 * rate:.1f} % of comparisons whose looks are chosen so as to err")
    assert MOST_FALSE / 2 < rate <= MOST_FALSE

    # Half of what is left at each look is too much, though it adds up to 5 %.
    def halves(look):
        return MOST_FALSE / 2**look

    assert RATES.worst_choice_of_seeds(5, rate_of=halves, points=121) > MOST_FALSE
    assert sum(rate_of(look) for look in range(1, 99)) < MOST_FALSE


def test_what_is_the_same_is_mostly_called_as_accurate():
    given = {"seeds": 5, "examples": 10_000, "loss": 0.0, "flips": 0.01}
    rng = RATES.np.random.default_rng(0)
    found = [RATES.is_called_equivalent(rng, **given) for _ in range(50)]
    assert sum(found) > 0.9 * len(found)


@pytest.mark.parametrize("kind", EQUALS.KINDS)
def test_policies_that_are_trained_as_equals_are_and_are_not_known_to_be(kind):
    build_model, make = EQUALS.KINDS[kind]
    layers, runs = [], []
    for word in EQUALS.POLICIES:
        with in_force(Variant.parse(word)) as (resolved, _):
            rows = layers_of(build_model())
            layers.append([(row.class_name, row.compute_dtype) for row in rows])
            runs.append(Run(word, 0, resolved_policy=resolved))
    assert layers[0] == layers[1]
    assert {dtype for _, dtype in layers[0]} == {"float32"}
    assert not are_same(*runs)
    x, y = make(RATES.np.random.default_rng(0), 8)
    assert build_model().test_on_batch(x, y)


def test_reports_that_are_kept_are_counted_and_not_made_again(tmp_path, capsys):
    rng = RATES.np.random.default_rng(0)
    for index, kind in enumerate(EQUALS.KINDS):
        found = RATES.report_of_the_same(rng, seeds=3, noise=0.01)
        if index == 1:
            faster = dataclasses.replace(found.verdicts["auto"], speed_effect="better")
            found = dataclasses.replace(found, verdicts={"auto": faster})
        found.to_json(tmp_path / f"{index:03}_{kind}.json")
    result = EQUALS.judge(len(EQUALS.KINDS), tmp_path)
    told = {
        **{"report": 1, "kind": list(EQUALS.KINDS)[1]},
        "measures": {"examples_per_second": "better"},
    }
    assert result["told_apart"] == [told]
    assert (result["rate"], result["met"]) == (1 / 3, False)
    assert "report 1" in capsys.readouterr().out
