"""Reports of comparisons: sentences, table, the page, the schema of the JSON.

How the page looks in a browser is in `report_browser_test.py`.
"""

import html.parser
import math
import re
from dataclasses import replace

import pytest

from tests import made_evidence
from tfamp.trials.run_records import Run

for module in ("jinja2", "matplotlib"):
    pytest.importorskip(module)
LONG = "keras:mixed_bfloat16+xla"


def failed(policy="auto", seed=1, error="ValueError: no such layer\n  line 3"):
    return Run(policy, seed, status="failed", error=error)


def same_under_another_name():
    run = made_evidence.run
    runs = [
        replace(run(policy, seed), resolved_policy="float32")
        for policy in ("float32", "auto")
        for seed in range(3)
    ]
    return made_evidence.evidence(replaced=tuple(runs))


def nothing_but_speed():
    known = {"examples_per_second": 10.0, "final_metrics": {"accuracy": 0.5}}
    pairs = [(p, s) for p in ("float32", "auto") for s in range(3)]
    runs = tuple(Run(*pair, **known) for pair in pairs)
    return made_evidence.evidence(replaced=runs, context=None, notes=())


def pair(word, *figures):
    return lambda: made_evidence.evidence({"float32": (1, 0.98), word: figures})


# Name -> a comparison, its word in the table, parts of sentence and advice.
CASES = {
    "faster": (
        made_evidence.evidence,
        "use it",
        "auto is as accurate as float32 and faster: accuracy 0.981 against 0.981, 3 "
        "seeds; the metric loses at most",
        "Use it: tfamp.enable('auto') before the model is built.",
    ),
    "worse": (
        pair("auto", 1.9, 0.5),
        "less accurate",
        "auto is less accurate than float32: accuracy 0.501 against 0.981",
        "keep the layers that lose it in float32 (keep_float32=).",
    ),
    "a metric that is NaN": (
        pair("auto", 2, math.nan),
        "less accurate",
        "accuracy not a number against 0.981, 3 seeds; the metric, or a weight, is",
        "Stay with float32, or keep the layers",
    ),
    "a failed run": (
        lambda: made_evidence.evidence(replaced=(failed(),)),
        "not enough runs",
        "auto with seed 1 failed: ValueError: no such layer",
        "Runs that do not fail would decide.",
    ),
    "the same under another name": (
        same_under_another_name,
        "same speed",
        "auto (float32) is as accurate as float32, but not faster",
        "auto costs nothing here, and pays on machines that can do more.",
    ),
    "stock Keras, compiled": (
        pair(LONG, 1.9, 0.98),
        "use it",
        f"{LONG} is as accurate as float32 and faster",
        "keras.config.set_dtype_policy('mixed_bfloat16') before the model is built, "
        "compile(jit_compile=True).",
    ),
    "nothing but speed": (
        nothing_but_speed,
        "not enough runs",
        "on how many examples accuracy was taken is not known",
        "Validation data whose examples can be counted would decide.",
    ),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request):
    make, *said = request.param
    return make(), *said


class Page(html.parser.HTMLParser):
    """Reads a page: its tags and its text; each tag has to be closed in order."""

    VOID = {"meta", "link", "img", "br"}

    def __init__(self, text):
        super().__init__()
        self.stack, self.tags, self.words = [], [], []
        self.feed(text)
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] != "style":
            self.words.append(data)


def test_every_form_says_the_verdict_and_what_to_do(case):
    found, word, sentence, advice = case
    text, page = " ".join(found.table().split()), Page(found.to_html())
    assert page.stack == []
    for shown in (text, page.text):
        assert sentence in shown and advice in shown
    assert word in text and word in page.text
    assert all(len(line) <= 110 for line in found.table().splitlines())


@pytest.mark.quick("faster", "worse")
def test_the_page_loads_nothing(case):
    page = case[0].to_html()
    for _, attributes in Page(page).tags:
        for name in ("src", "href", "srcset", "data"):
            assert attributes.get(name, "data:").startswith("data:")
    assert not re.search(r"https?://|@import|url\(|<script", page)


def test_the_page_has_a_row_for_each_policy_and_plots():
    found = made_evidence.evidence(
        {"float32": (1, 0.98), "auto": (1.9, 0.98), "mixed_float16": (0.5, 0.98)}
    )
    page = Page(found.to_html())
    rows = [tag for tag, given in page.tags if given.get("scope") == "row"]
    assert len(rows) >= 3
    images = [given["alt"] for tag, given in page.tags if tag == "img"]
    assert len(images) == 2
    assert images[0].startswith("Training loss") and "accuracy" in images[1]
    for expected in (
        *("skipped steps", "peak memory", "Made Up Processor", "avx512_bf16"),
        *("tfamp compare recipes.train_digits:build --seeds 3", "12,345"),
        *("Figures are made up.", "tensorflow 2.21.0", "latency, batch 1"),
    ):
        assert expected in page.text, expected


def test_names_do_nothing_in_a_page():
    evil = "<script>alert(1)</script>\"'&"
    run = replace(made_evidence.run("auto", 0), notes=(evil,), reason=evil)
    context = replace(made_evidence.CONTEXT, command=evil, system=evil)
    given = {"title": evil, "notes": (evil,), "context": context}
    found = made_evidence.evidence(replaced=(run, failed(error=evil)), **given)
    page = found.to_html()
    assert "<script" not in page and "alert(1)" in page
    assert evil in Page(page).text
