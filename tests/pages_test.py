"""Errors, findings and triages name a page of the documentation, which is there."""

import configparser

import keras
import pytest
import tensorflow as tf

import tfamp
from tests.docs_test import DOCS, FAILURES, ROOT, TESTS, anchors
from tests.named_pages import USED, named_pages, triage_of
from tfamp.records import checks
from tfamp.records.findings import Finding, Findings


@pytest.mark.parametrize("page", sorted(USED))
def test_a_page_that_is_named_is_there(page):
    path, _, anchor = page.partition("#")
    file = DOCS / f"{path}.md"
    assert file.is_file()
    assert not anchor or anchor in anchors(file)


def test_errors_and_warnings_of_failures_are_found():
    failures = {page for page in USED if page.startswith("failures/")}
    assert {"failures/zero-scale", "failures/tiny-updates"} < failures
    assert len(named_pages()) > 5


@pytest.mark.parametrize("page", FAILURES, ids=lambda path: path.stem)
def test_a_page_of_a_failure_names_a_test(page):
    assert TESTS.findall(page.read_text(encoding="utf-8").partition("**Held by**")[2])


def test_the_site_is_that_of_the_projects_links():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = settings["metadata"]["project_urls"].strip().splitlines()
    links = dict(line.split(" = ") for line in lines)
    assert links["Documentation"] == f"{checks.SITE}/"
    owner, name = settings["metadata"]["url"].split("/")[-2:]
    assert f"https://{owner}.github.io/{name}" == checks.SITE
    others = [
        path
        for path in (ROOT / "tfamp").rglob("*.py")
        if "github.io" in path.read_text(encoding="utf-8")
    ]
    assert [path.name for path in others] == ["checks.py"]


def test_addresses_stand_on_one_line_where_they_can_be_copied():
    documentation = {"documentation": checks.address("lint#half-head")}
    finding = Finding("half-head", "error", "x" * 99, "y" * 99, details=documentation)
    shown = Findings((finding, finding), title="Lint").table().splitlines()
    assert shown.count("See https://tfamp.github.io/tfamp/lint.html#half-head") == 1
    shown = triage_of("loss scale").table().splitlines()
    assert f"See {checks.SITE}/triage.html#cause-loss-scale" in shown


@pytest.mark.parametrize("is_dynamic", [True, False])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_the_loss_scales_error_ends_with_its_page(is_dynamic, scale):
    def optimizer():
        inner = keras.optimizers.SGD()
        options = dict(dynamic=is_dynamic, max_consecutive_skips=1)
        return tfamp.LossScaleOptimizer(inner, scale, **options)

    weight, nan = keras.Variable(1.0), tf.constant(float("nan"))
    with pytest.raises(tfamp.LossScaleError) as raised:
        optimizer().apply([nan], [weight])
    traced = optimizer()
    traced.build([weight])
    traced.scale_loss(0.0)
    with pytest.raises(tf.errors.InvalidArgumentError) as in_graph:
        tf.function(lambda: traced.apply([nan], [weight]))()
    page = f" See {checks.SITE}/failures/zero-scale.html"
    assert str(raised.value).endswith(page)
    assert page in str(in_graph.value)
