"""Plans in reports: what `tfamp.tune` measured, drawn and told, and short names."""

import dataclasses
import re
from xml.etree import ElementTree

import keras
import pytest
from matplotlib.backends import backend_agg

import tfamp
from tests import made_evidence
from tfamp.comparison.evidence import TunedPlan, tuned_plans
from tfamp.comparison.judgement import are_same
from tfamp.comparison.report import drawing, plans, sentences
from tfamp.comparison.report.html import to_html
from tfamp.comparison.report.text import table, to_markdown
from tfamp.dtypes import plan_plot
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


def marks_of(plot):
    """The centres of the marks of a plot."""
    root = ElementTree.fromstring(plot.svg)
    uses = [each for each in root.iter() if each.tag.endswith("use")]
    return [(float(u.attrib["x"]), float(u.attrib["y"])) for u in uses]


def test_the_plot_of_layers_has_error_over_saving_and_names():
    layers, search = plans.plan_plots(section())
    marks = marks_of(layers)
    # Circles first, 1 % and 3 %; the square at 2 % lies highest, as it overflows.
    (x1, _), (x3, y3), (x2, y2) = marks[-3:]
    assert x1 < x2 < x3
    assert (x1 + x3) / 2 == pytest.approx(x2, abs=0.01)
    assert y2 == min(y for _, y in marks[-3:]) and y3 < marks[-3][1]
    for name in ("inputs", "squares", "head"):
        assert f">{name}</text>" in layers.svg
    assert "3 layers, 1 of them in float32: squares." in layers.summary
    assert "The largest error is that of squares, overflow." in layers.summary
    assert layers.notes == ("Those that overflow stand at the top.",)
    assert "4 evaluations" in search.summary and "with 0.02 allowed" in search.summary


def test_an_overflow_stands_above_what_has_a_size():
    tuning = made_evidence.tuned_plan().tuning
    errors = {mark.path: mark.error for mark in plan_plot.marks(tuning, [])}
    # Ten times 1, as no error is larger.
    assert errors == {"inputs": 0.001, "squares": 10.0, "head": 0.003}


def test_the_plot_of_the_search_has_tolerance_and_bounds():
    found = plan_plot.evaluations(made_evidence.tuned_plan().tuning)
    assert [(each.num_float32, each.bound, each.is_fresh) for each in found[1:]] == [
        (1, 0.35, False),
        (1, 0.009, False),
        (1, 0.008, True),
    ]
    axes = drawing.axes_of(200, 20)
    ticks = plan_plot.draw_search(axes, found, 0.02, plan_plot.Look())
    assert ticks[:4] == [0.0, 0.01, 0.02, 0.2]
    lines = {line.get_marker(): line for line in axes.get_lines()}
    assert list(lines) == ["None", "^", "x", "o", "D"]
    # What cannot run stands above all others, not at infinity.
    assert 0.35 < lines["^"].get_ydata()[0] < 10


def test_names_of_layers_do_not_cover_one_another():
    marks = [
        plan_plot.Mark(f"layer_{n}", 0.1 * (n % 7), 10.0 ** -(n % 5), n % 3 == 0)
        for n in range(60)
    ]
    axes = drawing.axes_of(250, 36)
    plan_plot.draw_layers(axes, marks, plan_plot.Look())
    shown = plan_plot.name_layers(axes, marks, plan_plot.Look())
    assert 3 < len(shown) <= 12
    renderer = backend_agg.FigureCanvasAgg(axes.figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[place + 1 :])


def test_a_plan_s_plots_are_read_out(page):
    drawn = plans.plan_plots(section())
    assert [plot.key for plot in drawn] == ["plan-1-layers", "plan-1-search"]
    for plot in drawn:
        root = ElementTree.fromstring(plot.svg)
        assert root.attrib["role"] == "img"
        assert root.attrib["aria-labelledby"] == f"{plot.key}-title {plot.key}-summary"
        assert plot.svg in page


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


def test_layers_of_a_float32_plan_are_drawn_in_float32(monkeypatch):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
    evidence = {"tuning": made_evidence.tuned_plan(("a",)).tuning}
    plan = tfamp.PrecisionPlan.from_model(model, evidence=evidence)
    given = []
    monkeypatch.setattr(plan_plot, "draw", lambda *each: given.extend(each))
    plan.plot("plan.png")
    assert "a" in given[1]


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
