"""The HTML report in a real browser: errors, requests, widths, contrast, plots, paper.

Skips where there is no Chromium: `playwright install chromium` brings one.
"""

import dataclasses
import shutil

import pytest

from tests import made_evidence
from tfamp.comparison.report.html import to_html
from tfamp.trials.run_records import Run

# Playwright's own comes first; these are what systems call theirs.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--disable-background-networking", "--disable-component-update"),
    "--disable-sync",
]
WIDTHS = (380, 1280)
# Of text, for eyes with moderately low vision (WCAG 2.2, 1.4.3).
MIN_CONTRAST = 4.5

# Every text of the page with its colour and that of what lies behind it. A canvas
# turns any way to write a colour into numbers.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext(
    "2d", {willReadFrequently: true});
  const numbers = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return Array.from(canvas.getImageData(0, 0, 1, 1).data);
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : Math.pow((part + 0.055) / 1.055, 2.4);
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const found = numbers(getComputedStyle(each).backgroundColor);
      if (found[3] === 255) { return found; }
    }
    return [255, 255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || node.closest("script, title, desc") || !node.getClientRects().length) {
      continue;
    }
    const style = getComputedStyle(node);
    const colour = node.closest("svg") ? style.fill : style.color;
    const [one, two] = [numbers(colour), behind(node)].map(
      (each) => luminance(each.slice(0, 3)));
    const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    const kind = node.closest("svg") ? "plot"
      : node.closest(".badge") ? "badge" : node.closest("td, th") ? "table" : "body";
    found.push([kind, text.slice(0, 40), ratio]);
  }
  return found;
}"""
# What is cut off at an edge of what holds it.
CLIPPED = """() => Array.from(document.querySelectorAll(".scroll, pre, dd"))
  .filter((each) => each.scrollWidth > each.clientWidth + 1)
  .map((each) => each.className || each.tagName)"""

# Pairs of labels of a plot that cover one another.
OVERLAPS = """() => {
  const plots = Array.from(document.querySelectorAll("svg.plot"));
  return plots.flatMap((plot) => {
    const texts = Array.from(plot.querySelectorAll("text"));
    const boxes = texts.map((each) => each.getBoundingClientRect());
    const found = [];
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b, j) => {
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
          && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3) {
        found.push([texts[i].textContent, texts[i + 1 + j].textContent]);
      }
    }));
    return found;
  });
}"""


@pytest.fixture(scope="module")
def browser():
    """A Chromium, or a skip that says why there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    with api.sync_playwright() as playwright:
        for path in (None, found):
            try:
                launched = playwright.chromium.launch(
                    executable_path=path, args=ARGUMENTS
                )
            except api.Error as error:
                reason = str(error).splitlines()[0]
                continue
            yield launched
            launched.close()
            return
        pytest.skip(f"no Chromium: {reason}")


def everything():
    """Evidence with every part of the page, and names as long as they come."""
    policies = {
        "float32": (1, 0.98),
        "float32+xla": (1.1, 0.98),
        "auto": (1.9, 0.98),
        "mixed_float16": (0.4, 0.5),
        "keras:mixed_bfloat16+xla+rewrite": (1.8, 0.978),
        "runs/plan.json": (1.2, 0.98),
    }
    long = "a_layer_with_a_very_long_name_that_goes_on/" * 6
    names = (f"{long}{number}" for number in range(30))
    run = made_evidence.run("auto", 2, speed=1.9, metric=0.98)
    layers = (dataclasses.replace(run.layers[0], path=long), *run.layers)
    failed = Run("mixed_float16", 1, status="failed", error=f"ValueError: {long}" * 4)
    return made_evidence.evidence(
        policies,
        replaced=(
            dataclasses.replace(made_evidence.run("auto", 0), layers=layers),
            failed,
        ),
        title=f"digits CNN {long}",
        notes=("A note.", long),
        plans={"runs/plan.json": made_evidence.tuned_plan((*names, "a", "b"))},
    )


CASES = {"everything": everything, "two policies": made_evidence.evidence}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def report(request, tmp_path_factory):
    """A report on disk, and how many plots it has."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    evidence = request.param()
    to_html(evidence, path)
    return path, len(made_evidence.plots(evidence))


@pytest.fixture
def opened(browser, report):
    """Opens the report, and fails the test on any error or request of the page."""
    path, _ = report
    pages, complaints = [], []

    def open_(width=1280, scheme="light", **options):
        page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **options
        )
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.close()
    others = [each for each in complaints if not each.startswith("data:")]
    assert others == [path.as_uri()] * len(pages)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_no_wider_than_its_window(opened, width):
    page = opened(width)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = 1 })")
    across = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert across[0] <= across[1] == width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out(opened, scheme):
    page = opened(scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = 1 })")
    found = page.evaluate(CONTRASTS)
    assert {kind for kind, _, _ in found} == {"body", "badge", "table", "plot"}
    assert [each for each in found if each[2] < MIN_CONTRAST] == []


def test_the_reader_chooses_light_or_dark(opened):
    back = "getComputedStyle(document.body).backgroundColor"
    light, dark = (opened(scheme=each).evaluate(back) for each in ("light", "dark"))
    assert light == "rgb(251, 251, 250)"
    assert dark == "rgb(20, 23, 28)"


@pytest.mark.parametrize("width", WIDTHS)
def test_every_plot_is_seen(opened, report, width):
    plots = opened(width).locator("svg.plot")
    assert plots.count() == report[1] > 0
    for index in range(plots.count()):
        box = plots.nth(index).bounding_box()
        assert box["width"] > 250 and box["height"] > 50
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        # Text as large as in the drawing itself, within a quarter.
        assert 0.75 < box["width"] / 360 < 1.25


def test_no_two_labels_of_a_plot_lie_on_one_another(opened):
    assert opened().evaluate(OVERLAPS) == []


def test_paper_shows_everything_in_light(opened):
    # 186 mm, what A4 leaves between its margins.
    page = opened(703, scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    # Polled from outside: the page's own rules forbid scripts from text.
    api = pytest.importorskip("playwright.sync_api")
    api.expect(page.locator("details:not([open])")).to_have_count(0)
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 30, 36)"
    assert page.evaluate(CLIPPED) == []
    assert page.locator("#layer-table td").last.bounding_box()["height"] > 0
    assert page.get_by_text("shown, not assumed").bounding_box()["height"] > 0
    assert not page.locator("#layer-tools").is_visible()
    across = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert across[0] <= across[1]
    page.emulate_media(media="screen")
    api.expect(page.locator("details[open]")).to_have_count(0)


def test_paper_needs_no_script(opened):
    page = opened(703, java_script_enabled=False)
    page.emulate_media(media="print")
    box = page.get_by_text("shown, not assumed").bounding_box()
    assert box is not None and box["height"] > 0


def test_layers_are_searched(opened):
    page = opened()
    page.locator("section[aria-labelledby=layers] summary").click()
    lines = page.locator("#layer-table tbody tr:visible")
    every = lines.count()
    page.locator("#layer-search").fill("HEAD")
    assert lines.count() == 1
    assert page.locator("#layer-count").inner_text() == f"1 of {every} layers"
    page.locator("#layer-search").fill("")
    assert lines.count() == every
    page.locator("#layer-differing").check()
    assert lines.count() == page.locator("tr[data-differs]").count() < every


def test_what_slips_into_the_page_does_not_run(browser, tmp_path):
    path = tmp_path / "report.html"
    text = to_html(made_evidence.evidence())
    slipped = "<script>document.title = 'run'</script><img src='x' onerror='alert(1)'>"
    path.write_text(text.replace("</main>", f"{slipped}</main>"))
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.title() == "digits CNN: Equivalent and faster"
    # Its own script does run.
    page.locator("section[aria-labelledby=layers] summary").click()
    assert page.locator("#layer-tools").is_visible()
    page.close()
