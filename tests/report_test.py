"""Reports of comparisons: sentences, rows, table, Markdown, HTML, plots, the schema.

How the page looks and behaves in a browser is in `report_browser_test.py`.
"""

import dataclasses
import errno
import html.parser
import json
import math
import os
import re
import sys
import typing
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import made_evidence
from tfamp.comparison import figures
from tfamp.comparison.evidence import Evidence, TunedPlan
from tfamp.comparison.report import bars, curves, drawing, rows, sentences, tables
from tfamp.comparison.report import html as report_html
from tfamp.comparison.report import text as report_text
from tfamp.comparison.report.html import to_html
from tfamp.comparison.report.text import table, to_markdown
from tfamp.comparison.result import Comparison
from tfamp.comparison.verdict import Verdict
from tfamp.machine.speeds import Device
from tfamp.records import record
from tfamp.trials.run_records import (
    Context,
    Latency,
    LayerDtype,
    Memory,
    Run,
    Spread,
)
from tfamp.trials.statistics import Interval, effect_of_ratio

DOCS = Path(__file__).parents[1] / "docs"


def failed(policy="auto", seed=1, error="ValueError: no such layer\n  line 3"):
    return Run(policy, seed, status="failed", error=error)


def judged(
    answer, *, quality, speed=(1.92, 1.85, 1.99), needs="", seeds=3, reason="as judged"
):
    """Evidence whose verdict on "auto" is made up too."""
    verdict = Verdict(
        answer, reason, Interval(*quality), Interval(*speed), 0.005, seeds, needs
    )
    found = made_evidence.evidence({"float32": (1, 0.98), "auto": (1.9, 0.981)})
    return replace(found, verdicts={"auto": verdict})


def same_under_another_name():
    """Evidence on an "auto" that came to float32."""
    found = judged(
        "equivalent, not faster", quality=(0.0, 0.0, 0.0), speed=(1.05, 1.05, 1.05)
    )
    runs = tuple(replace(run, resolved_policy="float32") for run in found.runs)
    return replace(found, runs=runs)


# Evidence that every form of a report has to stand -----------------------------------


def bare(policy, seed, **changed):
    """A run with as little in it as a run can have."""
    return Run(policy, seed, examples_per_second=10.0, **changed)


def nan_losses():
    run = made_evidence.run("auto", 1)
    losses = tuple((s, v if s < 150 else math.nan) for s, v in run.losses)
    history = {"val_accuracy": (0.5, math.nan, math.inf)}
    return replace(run, losses=losses, history=history)


def nothing_measured():
    runs = (bare("float32", 0), bare("auto", 0))
    found = replace(made_evidence.evidence(), runs=runs, seeds=(0,))
    return replace(found, context=None, notes=(), verdicts={})


def no_pair():
    found = made_evidence.evidence(seeds=(0, 1))
    runs = (failed("float32", 0), failed("auto", 1))
    return replace(found, runs=runs)


def less_is_better():
    found = made_evidence.evidence(metric="loss", better="min", tolerance=0.005)
    losses = {"float32": {"loss": 0.5}, "auto": {"loss": 0.51}}
    runs = [replace(run, final_metrics=losses[run.policy]) for run in found.runs]
    quality = Interval(-0.01, -0.012, -0.008)
    verdict = Verdict("worse", "as judged", quality, Interval(1.9, 1.8, 2.0), 0.005, 3)
    return replace(found, runs=tuple(runs), verdicts={"auto": verdict})


def tuned():
    """Evidence on a plan with many layers and its search, and on one without."""
    paths = tuple(f"encoder_with_a_long_name/block_{n}/attention" for n in range(30))
    policies = {"float32": (1, 0.98), PLAN: (1.9, 0.98), f"{PLAN}+xla": (1.8, 0.98)}
    plans = {PLAN: made_evidence.tuned_plan(paths)}
    return made_evidence.evidence(policies, plans=plans)


PLAN = "/a/folder/that/has/a/long/path/of/its/own/plan.json"
LONG = "keras:mixed_bfloat16+xla+rewrite" * 3
CASES = {
    "two policies": made_evidence.evidence,
    "five policies, ten seeds": lambda: made_evidence.evidence(
        {
            "float32": (1, 0.98),
            "float32+xla": (1.1, 0.98),
            "auto": (1.9, 0.98),
            "mixed_float16": (0.4, 0.5),
            "mixed_bfloat16": (1.8, 0.975),
        },
        seeds=tuple(range(10)),
    ),
    "one seed": lambda: made_evidence.evidence(seeds=(0,)),
    "a failed run": lambda: made_evidence.evidence(replaced=(failed(),)),
    "all runs failed": no_pair,
    "NaN in losses and metric": lambda: made_evidence.evidence(
        replaced=(nan_losses(),)
    ),
    "a metric that is NaN": lambda: made_evidence.evidence(
        {"float32": (1, 0.98), "auto": (1.9, math.nan)}
    ),
    "nothing but speed": nothing_measured,
    "less is better": less_is_better,
    "long names": lambda: made_evidence.evidence(
        {"float32": (1, 0.98), LONG: (1.9, 0.98), f"{LONG}+{LONG}": (1.8, 0.98)}
    ),
    "the reference alone": lambda: made_evidence.evidence({"float32": (1, 0.98)}),
    "a plan by tune": tuned,
    "a loss scale": lambda: made_evidence.evidence(
        {"float32": (1, 0.98), "mixed_float16": (0.5, 0.98)}
    ),
}


# One of a kind for the module, since drawing takes most of the time.
@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request):
    return request.param()


@pytest.fixture(scope="module")
def page(case):
    return to_html(case)


@pytest.fixture(scope="module")
def plots(case):
    return made_evidence.plots(case)


class Page(html.parser.HTMLParser):
    """Reads a page: its tags, its text, whether each tag is closed in order."""

    VOID = {"meta", "link", "input", "br"}

    def __init__(self, text):
        super().__init__()
        self.stack, self.tags, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] not in ("style", "script"):
            self.text.append(data)


SEEN = "accuracy 0.982 against 0.981, 3 seeds"
SENTENCES = {
    "faster": (
        judged(
            "equivalent and faster",
            quality=(0.001, -0.003, 0.004),
            reason="the metric loses at most 0.003",
        ),
        f"auto is as accurate as float32 and faster: {SEEN}; the metric loses at most "
        "0.003.",
    ),
    "slower": (
        judged("slower", quality=(0, -0.001, 0.001), speed=(0.7, 0.6, 0.8)),
        f"auto is slower than float32: {SEEN}; as judged.",
    ),
    "as fast": (
        judged(
            "equivalent, not faster", quality=(0, -0.001, 0.001), speed=(1.0, 0.9, 1.1)
        ),
        f"auto is as accurate as float32, but not faster: {SEEN}; as judged.",
    ),
    "worse": (
        judged("worse", quality=(-0.03, -0.032, -0.028)),
        f"auto is less accurate than float32: {SEEN}; as judged.",
    ),
    "NaN": (
        replace(
            made_evidence.evidence({"float32": (1, 0.98), "auto": (1.9, math.nan)}),
            tolerance=0.005,
        ),
        "auto is less accurate than float32: accuracy not a number against 0.981, 3 "
        "seeds; the metric is not a number after training with seeds 0, 1, 2, where "
        "the reference's is.",
    ),
    "undecided": (
        judged(
            "undecided", quality=(-0.002, -0.012, 0.008), needs="4 seeds would decide"
        ),
        f"Not decided yet whether auto is as accurate as float32 and faster: {SEEN}; "
        "as judged.",
    ),
    "the same under another name": (
        same_under_another_name(),
        f"auto (float32) is as accurate as float32, but not faster: {SEEN}; as judged.",
    ),
    "one seed": (
        judged(
            "undecided",
            quality=(0.001, -math.inf, math.inf),
            speed=(1.9, 0, math.inf),
            seeds=1,
            needs="3 seeds may decide",
        ),
        "Not decided yet whether auto is as accurate as float32 and faster: accuracy "
        "0.982 against 0.981, 1 seed; as judged.",
    ),
    "a failed run": (
        judged(
            "undecided",
            quality=(math.nan,) * 3,
            reason="it failed: ValueError: no\nat",
            needs="runs that do not fail would decide",
        ),
        f"Not decided yet whether auto is as accurate as float32 and faster: {SEEN}; "
        "it failed: ValueError: no.",
    ),
    "less is better": (
        less_is_better(),
        "auto is less good than float32: loss 0.510 against 0.500, 3 seeds; as judged.",
    ),
    "no pair": (
        no_pair(),
        "Nothing is known of auto: no seed finished both under it and under float32; "
        "float32 with seed 0 failed with ValueError: no such layer.",
    ),
    "nothing to compare": (
        made_evidence.evidence({"float32": (1, 0.98)}),
        "Only float32 was measured, so nothing is compared.",
    ),
    "no verdict": (
        replace(no_pair(), verdicts={}),
        "Nothing is compared: float32 with seed 0 failed with ValueError: no such "
        "layer.",
    ),
}


@pytest.mark.parametrize("evidence, expected", SENTENCES.values(), ids=SENTENCES)
def test_the_verdict_is_one_sentence(evidence, expected):
    assert sentences.verdict_sentence(evidence) == expected


# Of different colours, different signs too.
SIGNS = {"good": "✓", "neutral": "=", "bad": "✕", "open": "?"}
BADGES = {
    "faster": (SENTENCES["faster"][0], "good"),
    "slower": (SENTENCES["slower"][0], "bad"),
    "as fast": (SENTENCES["as fast"][0], "neutral"),
    "worse": (SENTENCES["worse"][0], "bad"),
    "undecided": (SENTENCES["undecided"][0], "open"),
    "no pair": (SENTENCES["no pair"][0], "bad"),
}


@pytest.mark.parametrize("evidence, kind", BADGES.values(), ids=BADGES)
def test_a_badge_has_a_colour_words_and_a_sign(evidence, kind):
    found = sentences.badge(evidence, sentences.best(evidence))
    assert found.kind == kind
    assert found.text and found.sign == SIGNS[kind]


ADVICE = {
    "faster": "Use it: tfamp.enable('auto') before the model is built.",
    "slower": "Stay with float32.",
    "as fast": "Stay with float32, unless it is memory or size that you need.",
    "the same under another name": "auto costs nothing here, and pays on machines that "
    "can do more.",
    "worse": "Stay with float32, or keep the layers that lose it in float32 "
    "(keep_float32=).",
    "undecided": "4 seeds would decide.",
    "one seed": "3 seeds may decide.",
    "a failed run": "Runs that do not fail would decide.",
    "no pair": "Look at the errors of the runs, and measure again.",
}


@pytest.mark.parametrize("name, expected", ADVICE.items(), ids=ADVICE)
def test_each_verdict_says_what_to_do(name, expected):
    assert sentences.advice(SENTENCES[name][0], "auto") == expected


USES = {
    "a policy": ("mixed_bfloat16", "tfamp.enable('mixed_bfloat16') before the model"),
    "without rules": ("auto+no_rules", "tfamp.enable('auto', keep_float32='none')"),
    "stock": ("keras:bfloat16", "keras.config.set_dtype_policy('bfloat16')"),
    "compiled": ("auto+xla", "compile(jit_compile=True)"),
    "rewritten": ("float32+rewrite", "TensorFlow's graph rewrite for bfloat16"),
    "unknown": ("mine", "policy mine"),
}


@pytest.mark.parametrize("policy, expected", USES.values(), ids=USES)
def test_a_policy_is_used_by_lines_of_code(policy, expected):
    assert expected in sentences.how_to_use(policy)


def test_the_reference_is_explained():
    one = made_evidence.evidence()
    assert sentences.reference_sentence(one) == "Compared with float32."
    two = made_evidence.evidence(
        {"float32+xla": (2, 0.98), "float32": (1, 0.98), "auto": (3, 0.98)}
    )
    found = sentences.reference_sentence(two)
    assert found.startswith("Compared with float32+xla, the fastest of 2 ways to train")
    # Seeds 0 to 2 have waves 1 + 0.01 sin(7 seed + 11 or 7); the middle one is 1.
    assert re.search(r"float32\+xla 1,98\d and float32 1,00\d examples/s", found)
    none = made_evidence.evidence({"bfloat16": (1, 0.98), "auto": (3, 0.98)})
    assert "bfloat16, the first policy, since none is float32" in (
        sentences.reference_sentence(none)
    )


def test_what_auto_came_to_stands_beside_it():
    came_to = {"resolved_policy": "mixed_bfloat16", "reason": "It is fast."}
    runs = (made_evidence.run("auto", seed) for seed in range(3))
    replaced = tuple(replace(run, **came_to) for run in runs)
    found = made_evidence.evidence(replaced=replaced)
    assert sentences.named(found, "auto") == "auto (mixed_bfloat16)"
    assert sentences.named(found, "float32") == "float32"
    assert tables.chosen(found) == ("auto came to mixed_bfloat16: It is fast.",)


def test_a_long_error_is_cut_in_a_sentence():
    found = sentences.shortened("x" * 500)
    assert len(found) == 300 and found.endswith("…")


FORMATS = {
    "ms": ("seconds", [0.0641, 0.0337], ["64.1 ms", "33.7 ms"]),
    "us where ms are few": ("seconds", [0.00085, 0.0045], ["850 µs", "4,500 µs"]),
    "ms where they are many": ("seconds", [0.0005, 0.05], ["0.500 ms", "50.000 ms"]),
    "MiB": ("bytes", [2.0**29, 1.2 * 2**30], ["512 MiB", "1,229 MiB"]),
    "a rate": ("per second", [12.3, 1234.5], ["12.3 examples/s", "1,234.5 examples/s"]),
    "a count": ("count", [512.0, 64.0], ["512", "64"]),
    "kJ": ("joules", [12500.0, 30000.0], ["12.5 kJ", "30.0 kJ"]),
    "nothing": ("seconds", [None, math.nan], ["–", "–"]),
}


@pytest.mark.parametrize("unit, values, expected", FORMATS.values(), ids=FORMATS)
def test_figures_of_a_row_share_unit_and_decimals(unit, values, expected):
    form = figures.format_for(unit, values)
    assert [form.with_unit(value) for value in values] == expected


def test_a_metric_is_as_fine_as_its_tolerance():
    assert figures.metric_format(0.005)(0.98) == "0.9800"
    assert figures.metric_format(0.005)(-0.00001, sign=True) == "0.0000"
    assert figures.metric_format(20.0)(1234.5) == "1,234"
    assert figures.metric_format(1e-9)(1.5e-7) == "1.5e\u221207"
    assert figures.metric_format(math.nan)(0.98) == "0.9800"


EFFECTS = {
    "more is better": ((1.9, 1.8, 2.0), True, "better"),
    "less is better": ((0.5, 0.4, 0.6), False, "better"),
    "more is worse": ((1.9, 1.8, 2.0), False, "worse"),
    "less is worse": ((0.5, 0.4, 0.6), True, "worse"),
    "around 1": ((1.0, 0.9, 1.1), True, "unclear"),
    "1.00 throughout": ((1.002, 1.001, 1.003), True, "same"),
    "within 5 %": ((0.98, 0.96, 1.04), False, "same"),
    "sure and less than 5 %": ((1.04, 1.01, 1.07), True, "unclear"),
    "one seed": ((1.9, 0.0, math.inf), True, "one seed"),
}


@pytest.mark.parametrize("ends, more, expected", EFFECTS.values(), ids=EFFECTS)
def test_what_a_ratio_comes_to(ends, more, expected):
    assert effect_of_ratio(Interval(*ends), more_is_better=more) == expected


def cell(evidence, label):
    row = next(row for row in rows.rows(evidence) if row.label == label)
    return row, row.cells[0]


def test_rows_hold_every_measure():
    evidence = made_evidence.evidence()
    names = {row.name for row in rows.rows(evidence)} - {""}
    measured = figures.measures_of(evidence.runs)
    assert names == {measure.name for measure in measured}


P50 = figures.find("latency_p50_batch_1", made_evidence.evidence().runs)
SIZES = {"float32": (100, 200, 400), "auto": (50, 100, 200)}


def test_a_row_has_means_their_ratio_interval_and_effect():
    runs = tuple(
        bare(policy, seed, file_bytes=size * 2**20)
        for policy, sizes in SIZES.items()
        for seed, size in enumerate(sizes)
    )
    evidence = replace(made_evidence.evidence(), runs=runs)
    row, found = cell(evidence, "saved model")
    assert (row.unit, row.reference, row.group) == ("MiB", "200", "Memory and size")
    assert found == rows.Cell("auto", "100", "0.50×", "0.50 to 0.50", "better")


def effects(evidence):
    return {row.label: row.cells[0].effect for row in rows.rows(evidence)}


def test_one_measure_answers_for_those_of_one_question():
    found = effects(made_evidence.evidence())
    assert found["training"] == found["p50, batch 64"] == "better"
    for label in ("training step", "p90, batch 64", "p99, batch 64", "rate, batch 64"):
        assert found[label] == ""
    assert found["best accuracy of an epoch"] == ""


def noisy(policy, seed, **changed):
    """A run whose latency is a tenth less under another policy, and sure to be."""
    found = made_evidence.run(policy, seed)
    factor = 1.0 if policy == "float32" else 0.85 + 0.01 * seed
    latency = replace(found.latencies[0], p50_seconds=0.001 * factor)
    return replace(found, latencies=(latency,), **changed)


def test_a_ratio_whose_runs_have_no_pair_says_that_it_is_paired():
    sizes = {("float32", 0): 100, ("auto", 0): 50, ("float32", 1): 400}
    runs = [bare(p, seed, file_bytes=n * 2**20) for (p, seed), n in sizes.items()]
    evidence = replace(made_evidence.evidence(), runs=(*runs, failed("auto", 1)))
    row, found = cell(evidence, "saved model")
    # The geometric mean of 100 and 400 beside that of 50 alone.
    assert (row.reference, found.value, found.change) == (
        *("200.0", "50.0"),
        "0.50× paired",
    )


def test_where_policies_came_to_the_same_every_measure_is_the_same():
    runs = tuple(
        replace(noisy(policy, seed), resolved_policy="float32", file_bytes=size)
        for seed in range(3)
        for policy, size in {"float32": 100, "auto": 50}.items()
    )
    same = made_evidence.evidence(replaced=runs)
    found = {effect for effect in effects(same).values() if effect}
    assert found == {"same"}


QUALITIES = {
    "better": ((0.008, 0.006, 0.01), "+0.0080 +0.0060 to +0.0100", "better"),
    "better by little": (
        (0.002, 0.001, 0.003),
        "+0.0020 +0.0010 to +0.0030",
        "as good",
    ),
    "as good": ((0.0, -0.004, 0.004), "0.0000 -0.0040 to +0.0040", "as good"),
    "worse": ((-0.02, -0.03, -0.01), "-0.0200 -0.0300 to -0.0100", "worse"),
    "less": ((-0.002, -0.003, -0.001), "-0.0020 -0.0030 to -0.0010", "as good"),
    "unclear": ((0.0, -0.01, 0.01), "0.0000 -0.0100 to +0.0100", "unclear"),
    "one seed": ((0.001, -math.inf, math.inf), "+0.0010 ", "one seed"),
}


@pytest.mark.parametrize("quality, text, effect", QUALITIES.values(), ids=QUALITIES)
def test_quality_is_a_difference_held_to_the_tolerance(quality, text, effect):
    _, found = cell(judged("worse", quality=quality), "accuracy, validation")
    change, _, between = text.replace("-", "\u2212").partition(" ")
    assert (found.change, found.interval, found.effect) == (change, between, effect)


def test_where_less_is_better_more_is_worse():
    row, found = cell(less_is_better(), "loss, validation")
    assert (row.reference, found.value) == ("0.5000", "0.5100")
    assert (found.change, found.interval) == ("+0.0100", "+0.0080 to +0.0120")
    assert found.effect == "worse"


def test_the_best_epoch_counts_by_seed():
    # Validation accuracy ends at metric + 0.001 seed, its best: 0.981 on the mean.
    row, found = cell(made_evidence.evidence(), "best accuracy of an epoch")
    assert (row.reference, found.value, found.change) == ("0.9810", "0.9810", "0.0000")


def test_a_metric_that_is_no_number_is_said_to_be_none():
    _, found = cell(CASES["a metric that is NaN"](), "accuracy, validation")
    assert (found.value, found.change) == ("not a number", "")


def test_numerics_are_shown_where_something_happened():
    labels = [row.label for row in rows.rows(CASES["a loss scale"]())]
    assert "skipped steps" in labels
    assert "NaN and inf in weights" not in labels
    found = [row.label for row in rows.rows(CASES["nothing but speed"]())]
    assert found == ["training"]


# Table and Markdown ------------------------------------------------------------------


def test_the_table_fits_and_ends_with_the_verdict(case):
    lines = table(case).splitlines()
    assert max(map(len, lines)) <= 110
    # The paragraph may be broken into lines anywhere.
    verdict = figures.plain(sentences.verdict_sentence(case))
    together = "".join(lines).replace(" ", "")
    assert together.endswith(f"Verdict:{verdict}".replace(" ", ""))
    assert "nan" not in " ".join(lines).lower().replace("nan and inf", "")


def test_the_table_holds_every_policy_and_measure():
    found = table(CASES["five policies, ten seeds"]())
    for policy in ("float32+xla", "auto", "mixed_float16", "mixed_bfloat16"):
        assert policy in found
    lines = [line for line in found.splitlines() if "rate, batch 64" in line]
    # Two beside the reference in each of two tables.
    assert [line.count("x (") for line in lines] == [2, 2]
    # 1.9 times the speed, with waves of at most 1 %.
    assert re.search(r"1,\d{3}  1\.\d\dx \(1\.\d\d to 1\.\d\d\) \+", found)


def test_markdown_fits_a_comment(case):
    found = to_markdown(case)
    assert len(found.splitlines()) <= report_text.MAX_LINES
    shown = sentences.verdict_sentence(case)
    assert report_text.escaped(shown) in found
    lines = [line for line in found.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} <= {
        len(case.policies) + 2
    }


def test_markdown_leaves_out_the_ends_of_latencies_first():
    def latencies(run):
        return tuple(replace(run.latencies[0], batch_size=2**n) for n in range(16))

    runs = made_evidence.evidence().runs
    many = tuple(replace(run, latencies=latencies(run)) for run in runs)
    found = to_markdown(made_evidence.evidence(replaced=many))
    assert "inference p50, batch 32768" in found
    assert "p99" not in found
    # 16 batch sizes with two rows each.
    assert "32 more rows in the HTML report." in found
    assert len(found.splitlines()) <= 60


def test_markdown_names_errors_and_settings():
    found = to_markdown(CASES["a failed run"]())
    assert "- auto, seed 1, failed: ValueError: no such layer\n" in found
    assert "⚠️ 1 of 6 runs failed." in found
    assert "device Made Up Processor" in found and "TF32" not in found
    assert "`tfamp compare recipes.train_digits:build --seeds 3`" in found


def test_names_do_nothing_in_markdown():
    found = to_markdown(made_evidence.evidence(title="a|b <img> @all\n# c `d` [e](f)"))
    first = found.splitlines()[0]
    assert first == ("## a\\|b &lt;img&gt; @\u200ball \\# c \\`d\\` \\[e\\](f)")


def test_the_page_is_whole_and_says_the_verdict(case, page):
    found = Page(page)
    assert found.stack == []
    shown = "".join(found.text)
    assert sentences.verdict_sentence(case) in shown
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    # Marks are drawn once and used by name.
    uses = [attributes["href"] for tag, attributes in found.tags if tag == "use"]
    assert {use.removeprefix("#") for use in uses} <= set(ids)
    assert [tag for tag, _ in found.tags].count("h1") == 1


def test_the_page_loads_nothing(page):
    sources = [
        value
        for _, attributes in Page(page).tags
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "srcset", "data")
    ]
    assert all(s.startswith(("#", "data:")) for s in sources)
    assert "http://" not in page and "https://" not in page
    assert "@import" not in page and "url(" not in page


def places(root, name):
    """Coordinates of the elements of a name that have a place."""
    return [
        (float(each.attrib["x"]), float(each.attrib["y"]))
        for each in root.iter(name)
        if "x" in each.attrib and "transform" in each.attrib or name == "use"
    ]


def test_no_chart_holds_a_number_that_is_none(plots):
    for plot in plots:
        root = ElementTree.fromstring(plot.svg)
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for each in root.iter():
            for name in ("d", "x", "y", "transform"):
                value = each.attrib.get(name, "")
                assert not re.search(r"nan|inf", value.lower()), (plot.key, name)
        # Every mark lies inside the drawing, as far as its edges.
        for x, y in (*places(root, "use"), *places(root, "text")):
            assert -1 <= x <= width + 1 and -1 <= y <= height + 1


def test_charts_have_no_colours_but_the_page_s(plots):
    style = report_html.resource("style.css")
    for plot in plots:
        assert not re.search(r"(fill|stroke): (#|rgb|black)", plot.svg)
        names = set(re.findall(r"var\((--[\w-]+)\)", plot.svg))
        assert {"--ink", "--soft", "--line"} <= names
        # One for light and one for dark.
        assert all(style.count(f"{name}: #") == 2 for name in names)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = (
        "`to_html` needs matplotlib, which is not installed. Run `pip install "
        "'tfamp[report]'`."
    )
    with pytest.raises(ImportError, match=re.escape(message)):
        to_html(made_evidence.evidence())
    assert "auto" in to_markdown(made_evidence.evidence())
    assert "auto" in table(made_evidence.evidence())


def test_names_do_nothing_in_the_page():
    evil = "<script>alert(1)</script>\"'&"
    run = made_evidence.run("auto", 0)
    layer = replace(run.layers[0], path=evil, class_name=evil, rule=evil)
    run = replace(run, layers=(layer,), notes=(evil,), reason=evil)
    evidence = made_evidence.evidence(
        replaced=(run, failed(error=evil)),
        title=evil,
        metric=evil,
        notes=(evil,),
        context=replace(made_evidence.CONTEXT, command=evil, driver=evil),
    )
    text = to_html(evidence)
    assert "alert(1)" in text
    assert "<script>alert" not in text
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert evil in "".join(page.text)


def test_the_page_has_what_was_measured():
    evidence = CASES["a loss scale"]()
    keys = {plot.key for plot in made_evidence.plots(evidence)}
    assert keys == {
        *("speed", "quality", "metric", "loss", "latency", "memory", "step", "scale")
    }
    text = "".join(Page(to_html(evidence)).text)
    for expected in (
        *("head <b>", "Conv2D", "bfloat16, weights float32", "Made Up Processor"),
        *("tfamp compare recipes.train_digits:build --seeds 3", "12,345", "10 steps"),
        *("Figures are made up.", "tensorflow 2.21.0", "Skipped steps by seed"),
        *("paired differences", "5 % error"),
    ):
        assert expected in text, expected


def test_plots_follow_what_was_measured():
    keys = [plot.key for plot in made_evidence.plots(CASES["nothing but speed"]())]
    assert keys == ["speed"]
    assert made_evidence.plots(CASES["all runs failed"]()) == ()
    found = [plot.key for plot in made_evidence.plots(made_evidence.evidence())]
    assert "scale" not in found


def test_every_plot_says_what_one_would_see(plots):
    for plot in plots:
        root = ElementTree.fromstring(plot.svg)
        assert root.attrib["role"] == "img"
        said = {each.attrib["id"]: each.text for each in root if "id" in each.attrib}
        by = root.attrib["aria-labelledby"].split()
        assert [said[name] for name in by] == [plot.title, plot.summary]
        assert re.search(r"\d", plot.summary)


def plot_of(evidence, key):
    (plot,) = [plot for plot in made_evidence.plots(evidence) if plot.key == key]
    return plot


def test_what_is_not_a_number_leaves_a_gap_and_a_note():
    found = made_evidence.evidence(replaced=(nan_losses(),), seeds=(1,))
    plot = plot_of(found, "loss")
    assert plot.notes == (
        "Left out where it is not a finite number, first auto with seed 1 at step 150.",
    )


def test_a_failed_run_shows_its_error_in_full():
    error = "ValueError: one\n" + "\n".join(f"line {n}" for n in range(50))
    text = to_html(made_evidence.evidence(replaced=(failed(error=error),)))
    assert error in "".join(Page(text).text)
    assert "1 of 6 runs failed." in text


def test_settings_name_what_decides_and_no_more():
    gpu = Device("gpu", "Made Up Card", memory_bytes=16 * 2**30, partition=True)
    cpu = Device("cpu", "Processor", features=("avx2", "avx512_bf16", "sse"))
    context = replace(made_evidence.CONTEXT, devices=(cpu, gpu), tf32=True)
    found = tables.setting_rows(made_evidence.evidence(context=context))
    assert ("Device", "Processor (CPU, avx512_bf16)") in found
    assert ("Device", "Made Up Card (GPU, 16.0 GiB, a slice of it (MIG))") in found
    assert ("TF32", "on") in found
    without = dict(tables.setting_rows(made_evidence.evidence()))
    assert "TF32" not in without and "Driver" not in without


def test_layers_differ_where_dtypes_do():
    evidence = made_evidence.evidence()
    assert tables.layer_policies(evidence) == ("float32", "auto")
    first, second = made_evidence.LAYERS
    layers = replace(first, compute_dtype="float32"), second
    half = replace(made_evidence.run("float32", 0), layers=layers)
    first, second = tables.layer_rows(made_evidence.evidence(replaced=(half,)))
    assert first.dtypes == ("float32", "bfloat16, weights float32")
    assert (first.differs, second.differs, second.path) == (True, False, "head <b>")


def test_a_page_of_five_seeds_and_many_layers_is_small():
    layers = tuple(
        replace(made_evidence.LAYERS[0], path=f"block_{n}/conv_{n}") for n in range(300)
    )
    losses = tuple((step, 2.0 / step) for step in range(1, 401))
    policies = {"float32": (1, 0.98), "auto": (1.9, 0.98), "bfloat16": (1.8, 0.98)}
    runs = tuple(
        replace(
            made_evidence.run(policy, seed, speed=speed), layers=layers, losses=losses
        )
        for policy, (speed, _) in policies.items()
        for seed in range(5)
    )
    evidence = made_evidence.evidence(policies, seeds=tuple(range(5)), replaced=runs)
    assert len(to_html(evidence).encode()) < 500_000


# Parts of the plots ------------------------------------------------------------------


def test_a_curve_is_median_and_ends_of_what_is_finite():
    series = [
        [(1, 3.0), (2, math.nan), (3, math.nan)],
        [(1, 1.0), (2, math.inf), (3, 5.0)],
        [(1, 2.0)],
    ]
    first, second, third = curves.curve(series).tolist()
    assert first == [1, 2.0, 1.0, 3.0]
    assert second[0] == 2 and all(map(math.isnan, second[1:]))
    assert third == [3, 5.0, 5.0, 5.0]


def drawn(values, **how):
    """The labels of an axis, and whether it is logarithmic."""
    axes = drawing.axes_of(100, 20)
    axes.plot(values, [0] * len(values))
    drawing.set_ticks(axes.xaxis, "", **how)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    return labels[:3], axes.get_xscale()


TICKS = {
    "from 0": ([900, 1900], {"from_zero": True}, ["0", "500", "1,000"], "linear"),
    "log": ([0.01, 10], {"may_be_log": True}, ["0.01", "0.1", "1"], "log"),
    "near": ([0.9, 10], {"may_be_log": True}, ["2", "4", "6"], "linear"),
    "epochs": ([1, 2, 3], {"whole": True}, ["1", "2", "3"], "linear"),
    "minus": (
        [-0.02, 0.02],
        {},
        ["\u22120.02", "\u22120.01", "0.00"],
        "linear",
    ),
    "equal": ([5.0, 5.0], {}, ["4.8", "5.0", "5.2"], "linear"),
    "large": ([2e6, 8e6], {}, ["2e6", "4e6", "6e6"], "linear"),
}


@pytest.mark.parametrize("values, how, labels, scale", TICKS.values(), ids=TICKS)
def test_ticks_are_round(values, how, labels, scale):
    assert drawn(values, **how) == (labels, scale)


def test_an_interval_that_would_dwarf_the_runs_is_cut():
    wide = Interval(2.0, -50.0, 50.0)
    found = bars.reachable(wide, [1.0, 2.0])
    assert found == pytest.approx((1.0 - 0.6, 2.0 + 0.6))
    # Beyond a tolerance where the runs are next to nothing.
    assert bars.reachable(wide, [0.0], 10.0) == (-10.0, 10.0)


ARROWS = {
    "cut": (Interval(1.0, -9.0, 9.0), ["<", ">", "o"]),
    "whole": (Interval(1.0, 0.9, 1.1), ["o"]),
}


@pytest.mark.parametrize("found, markers", ARROWS.values(), ids=ARROWS)
def test_an_interval_that_is_cut_ends_in_arrows(found, markers):
    axes = drawing.axes_of(100, 20)
    (look, *_) = drawing.looks(made_evidence.evidence())
    bars._runs_line(look, "2", [1.0], found).draw(axes, 50.0)
    assert [line.get_marker() for line in axes.get_lines()] == markers


def test_a_policy_has_one_look_and_its_own_name():
    looks = drawing.looks(CASES["long names"]())
    assert [look.style for look in looks] == ["c0", "c1", "c2"]
    assert len({look.short for look in looks}) == 3
    assert all(len(look.short) <= 18 for look in looks)
    many = {f"auto{n}": (1, 0.98) for n in range(8)}
    styles = [look.style for look in drawing.looks(made_evidence.evidence(many))]
    assert styles[6:] == ["c0 broken", "c1 broken"]


def test_labels_of_curves_that_end_together_stand_apart():
    evidence = CASES["five policies, ten seeds"]()
    plot = plot_of(evidence, "metric")
    root = ElementTree.fromstring(plot.svg)
    names = {look.short for look in drawing.looks(evidence)}
    labels = [each for each in root.iter("text") if each.text in names]
    heights = sorted(float(each.attrib["y"]) for each in labels)
    assert len(heights) == 5
    gaps = [b - a for a, b in zip(heights, heights[1:], strict=False)]
    assert min(gaps) > 12
    assert heights[0] > 0


@pytest.mark.parametrize("write", [to_html, to_markdown], ids=["html", "markdown"])
def test_a_report_is_written_as_it_is_returned(write, tmp_path):
    path = tmp_path / "report"
    text = write(made_evidence.evidence(), path)
    assert path.read_text(encoding="utf-8") == text
    assert "auto is as accurate as float32 and faster" in text
    assert os.listdir(tmp_path) == ["report"]


def test_a_place_that_takes_no_file_is_named(tmp_path):
    path = tmp_path / "none" / "report.html"
    message = f"`path` is {str(path)!r}, and its folder is not there; expected a file"
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        to_html(made_evidence.evidence(), path)
    message = f"`path` is {str(tmp_path)!r}, a folder; expected a file. Add a name"
    with pytest.raises(IsADirectoryError, match=re.escape(message)):
        to_markdown(made_evidence.evidence(), tmp_path)


ERRORS = {
    "full": (errno.ENOSPC, "expected room for 5 bytes and the right to write. Free"),
    "no": (errno.EACCES, "expected room for 5 bytes and the right to write. Make"),
}


@pytest.mark.parametrize("number, message", ERRORS.values(), ids=ERRORS)
def test_a_failed_write_leaves_the_old_file(number, message, tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    path.write_text("old")

    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match=re.escape(message)) as found:
        record.write_text(path, "whole")
    assert found.value.errno == number
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.md"]


def documented(page):
    """The tables of a page on JSON: class -> rows of its fields."""
    sections = re.split(r"^## (\w+)$", (DOCS / page).read_text(), flags=re.MULTILINE)[
        1:
    ]
    return {
        name: re.findall(
            r"^\| `(\w+)` \| (.*?) \| (.*?) ?\| .+ \|$", text, re.MULTILINE
        )
        for name, text in zip(sections[::2], sections[1::2], strict=True)
        if name != "Example"
    }


PAGES = {
    "report_json.md": (
        *(Evidence, Run, Spread, Latency),
        *(Memory, LayerDtype, Verdict, Interval),
        *(Context, Device, TunedPlan),
    ),
}
CLASSES = {each.__name__: (page, each) for page in PAGES for each in PAGES[page]}


@pytest.mark.parametrize("page", PAGES)
def test_the_schema_names_every_class_and_version(page):
    assert list(documented(page)) == [each.__name__ for each in PAGES[page]]
    assert {each.SCHEMA for each in (*PAGES[page], Comparison)} == {1}
    assert "now 1 for all of them" in (DOCS / page).read_text()


@pytest.mark.parametrize("page, kind", CLASSES.values(), ids=CLASSES)
def test_the_schema_names_every_field(page, kind):
    fields = [field.name for field in dataclasses.fields(kind)]
    assert [field for field, _, _ in documented(page)[kind.__name__]] == fields


@pytest.mark.parametrize("page, kind", CLASSES.values(), ids=CLASSES)
def test_the_schema_says_what_may_be_null_and_in_which_unit(page, kind):
    hints = typing.get_type_hints(kind)
    for field, written, unit in documented(page)[kind.__name__]:
        nullable = type(None) in typing.get_args(hints[field])
        assert nullable == written.endswith("or null"), field
        if field.endswith(("_seconds", "_bytes", "_joules")):
            assert unit == field.rsplit("_", 1)[1], field


def test_the_example_of_the_schema_is_read():
    (example,) = re.findall(
        r"```json\n(.*?)```", (DOCS / "report_json.md").read_text(), re.DOTALL
    )
    found = Comparison.from_json(example)
    assert (found.verdict, found.runs[0].seed) == ("undecided", 0)
    assert math.isnan(found.runs[1].losses[1][1])
    # What stands in the example stands in what is written.
    written = json.loads(found.to_json())
    assert set(json.loads(example)) <= set(written)
