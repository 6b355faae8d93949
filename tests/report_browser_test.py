"""The HTML report in a real browser: errors, requests, widths, contrast of texts.

Skips where there is no Chromium: `playwright install chromium` brings one.
"""

import dataclasses
import shutil

import pytest

from tests import made_evidence
from tfamp.trials.run_records import Run

# Playwright's own comes first; these are what systems call theirs.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic"]


@pytest.fixture(scope="module")
def browser():
    """A Chromium, or a skip that says why there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    with api.sync_playwright() as playwright:
        for path in (None, found):
            how = {"executable_path": path, "args": ARGUMENTS}
            try:
                launched = playwright.chromium.launch(**how)
            except api.Error as error:
                reason = str(error).splitlines()[0]
                continue
            yield launched
            launched.close()
            return
        pytest.skip(f"no Chromium: {reason}")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report with every part of the page, and names as long as they come."""
    pytest.importorskip("jinja2")
    policies = {
        "float32": (1, 0.98),
        "float32+xla": (1.1, 0.98),
        "auto": (1.9, 0.98),
        "mixed_float16": (0.4, 0.5),
        "keras:mixed_bfloat16+xla": (1.8, 0.978),
        "runs/plan.json": (1.2, 0.98),
    }
    long = "a_layer_with_a_very_long_name_that_goes_on/" * 6
    failed = Run("mixed_float16", 1, status="failed", error=f"ValueError: {long}" * 4)
    found = made_evidence.evidence(policies, replaced=(failed,))
    path = tmp_path_factory.mktemp("report") / "report.html"
    told = {"title": f"digits CNN {long}", "notes": ("A note.", long)}
    dataclasses.replace(found, **told).to_html(path)
    return path


@pytest.mark.quick("400")
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_its_window_shows_its_plots_and_asks_for_nothing(
    browser, report, width
):
    page = browser.new_page(viewport={"width": width, "height": 900})
    asked, complaints = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    # In words of Playwright: no script of the page's own is allowed to run.
    across = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert across[0] <= across[1] == width
    plots = page.locator("figure img")
    assert plots.count() == 2
    for index in range(2):
        box = plots.nth(index).bounding_box()
        assert box["width"] > 250 and box["height"] > 100
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        assert plots.nth(index).evaluate("each => each.naturalWidth") > 0
    assert page.locator("tbody .word").count() == 6
    assert complaints == []
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
    page.close()
