"""Plans in reports: what `tfamp.tune` measured and told, and short names."""

import dataclasses
import re

import keras
import pytest

import tfamp
from tests import made_evidence
from tfamp.comparison.evidence import TunedPlan, tuned_plans
from tfamp.comparison.judgement import are_same
from tfamp.comparison.report import plans, sentences
from tfamp.comparison.report.html import to_html
from tfamp.comparison.report.text import table, to_markdown
from tfamp.trials import child, storage
from tfamp.trials.variant import short_names

PLAN = "/home/somebody/runs/plan.json"
SPEEDS = {"float32": (1.0, 0.98), PLAN: (1.9, 0.98)}


def with_plan(**changed):
    """Evidence on a plan that was tuned; another one with `plans={}`."""
    given = {"plans": {PLAN: made_evidence.tuned_plan()}, **changed}
    return made_evidence.evidence(SPEEDS, **given)


@pytest.fixture(scope="module")
def page():
    """The report of that evidence."""
    return to_html(with_plan())


def section():
    (found,) = plans.plan_sections(with_plan())
    return found


def test_a_tuned_plan_has_a_section_and_another_plan_has_none(page):
    text = table(with_plan())
    for shown in (" ".join(re.sub("<[^>]*>", " ", page).split()), text):
        together = " ".join(shown.split())
        assert "How plan.json was found" in together
        assert "1 of 3 layers compute in float32, under the policy" in together
        assert "worse by 0.001, at most 0.008, on fresh examples" in together
        # Four tries of 1.5 s each.
        assert "cost 30.0 s: 3 evaluations and one on fresh examples, which" in together
        assert "took 6.0 s" in together
    bare = with_plan(plans={})
    assert "was found" not in to_html(bare) + table(bare)
    assert plans.plan_sections(bare) == ()


def test_rows_have_every_layer_and_every_evaluation():
    layers, evaluations = section().layers, section().evaluations
    # Layers in float32 first, then the largest error.
    assert layers == (
        ("squares", "float32", "overflow", "–", "2.0 %"),
        ("head", "half precision", "0.003", "0.0005", "3.0 %"),
        ("inputs", "half precision", "0.001", "0.0005", "1.0 %"),
    )
    assert [row[:5] for row in evaluations] == [
        ("1", "none beyond the rules'", "cannot run", "–", "does not hold"),
        ("2", "squares", "0.3", "0.35", "does not hold"),
        ("3", "squares", "0.001", "0.009", "holds"),
        ("fresh examples", "squares", "0.001", "0.008", "holds"),
    ]


def test_the_evidence_of_a_plan_comes_back_from_a_file(tmp_path):
    found = with_plan()
    found.to_json(tmp_path / "report.json")
    again = type(found).from_json(tmp_path / "report.json")
    assert again.plans == found.plans
    assert table(again) == table(found)


def test_a_report_names_the_file_of_a_plan_and_not_its_folders(page):
    shown = "\n".join((table(with_plan()), to_markdown(with_plan())))
    page = re.sub("<[^>]*>", "", page)
    # Only the line of code to copy has all of it.
    code = f"tfamp.enable({PLAN!r})"
    for text in (shown, page.replace("&#39;", "'")):
        rest = "".join(text.split()).replace(code, "")
        assert "plan.json" in rest and "/home/somebody" not in rest
    assert sentences.how_to_use(PLAN).startswith(code)


def test_a_plan_that_was_passed_itself_has_no_file_to_name(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    path = storage.plan_file(tmp_path, tfamp.PrecisionPlan.from_model(model))
    assert sentences.how_to_use(path).startswith("tfamp.enable(plan) before")


NAMES = {
    "no plan": (["float32", "keras:auto+xla"], ["float32", "keras:auto+xla"]),
    "options stay": (["a/p.json+xla", "a/p.json"], ["p.json+xla", "p.json"]),
    "folders differ": (["a/x/p.json", "b/x/p.json"], ["a/x/p.json", "b/x/p.json"]),
    "one is deeper": (["p.json", "/runs/p.json"], ["p.json", "runs/p.json"]),
    "backslashes": ([r"C:\a\p.json", r"C:\b\p.json"], ["a/p.json", "b/p.json"]),
}


@pytest.mark.parametrize("policies, expected", NAMES.values(), ids=NAMES)
def test_names_of_plans_are_short_and_distinct(policies, expected):
    assert list(short_names(policies).values()) == expected


def test_only_plans_with_the_evidence_of_a_search_are_told(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
    plan = tfamp.PrecisionPlan.from_model(model)
    tuning = made_evidence.tuned_plan().tuning
    plan.to_json(tmp_path / "bare.json")
    plan.replace(evidence={"tuning": {"reason": ""}}).to_json(tmp_path / "old.json")
    plan.replace(evidence={"tuning": tuning}).to_json(tmp_path / "tuned.json")
    words = [str(tmp_path / f"{name}.json") for name in ("bare", "old", "tuned")]
    assert tuned_plans(["float32", *words]) == {
        words[2]: TunedPlan("float32", ("a",), tuning)
    }


def test_a_plan_says_that_it_brings_xla(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "_measure", lambda *given, line: given[-1])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    plan = tfamp.PrecisionPlan.from_model(model).replace(jit_compile=True)
    path = storage.plan_file(tmp_path, plan)
    assert child.measure(tmp_path, None, path, 0).resolved_policy == "float32+xla"
    assert child.measure(tmp_path, None, "float32", 0).resolved_policy == "float32"


def test_a_plan_under_a_policy_is_not_that_policy():
    before = made_evidence.run("mixed_float16", 0)
    other = (dataclasses.replace(made_evidence.LAYERS[0], compute_dtype="float32"),)
    after = dataclasses.replace(before, policy=PLAN)
    assert are_same(before, dataclasses.replace(before, policy="auto"))
    # Not by its policy, but where every layer is the same.
    assert are_same(before, after)
    changed = (*other, *made_evidence.LAYERS[1:])
    assert not are_same(before, dataclasses.replace(after, layers=changed))
    assert not are_same(before, dataclasses.replace(after, resolved_policy="+xla"))
