"""One HTML file that holds all of a comparison and needs nothing else to be read."""

import base64
import dataclasses
import hashlib
import importlib.resources
import itertools
import os
from typing import Any

from tfamp.comparison import figures
from tfamp.comparison.evidence import Evidence
from tfamp.comparison.figures import measures_of
from tfamp.comparison.report import bars, curves, drawing, plans, sentences, tables
from tfamp.comparison.report.drawing import Plot
from tfamp.comparison.report.plans import plan_sections
from tfamp.comparison.report.rows import Cell, Row, rows
from tfamp.records import checks, record
from tfamp.trials.statistics import ERROR_RATE

# Measures that stand in large figures at the top, where they were measured.
_TILES = (
    *("examples_per_second", "training_bytes", "device_bytes", "latency_p50_batch_1"),
    *("energy_joules", "file_bytes"),
)
_MAX_TILES = 4


@dataclasses.dataclass(frozen=True)
class Tile:
    """A figure at the top, above a remark; of a policy what its cell says too."""

    label: str
    figure: str
    below: str
    cell: Cell | None = None


def to_html(evidence: Evidence, path: str | os.PathLike[str] | None = None) -> str:
    """Returns a comparison as one HTML file and writes it to `path`, if given.

    The file loads nothing, so it opens offline and from an e-mail; it follows the
    reader's choice of light or dark, fits a phone, and prints whole.
    """
    return page_of("comparison.html", _view(evidence), path)


def page_of(
    template: str, view: dict[str, Any], path: str | os.PathLike[str] | None
) -> str:
    """Returns a template of this folder with what it shows, written to `path` too."""
    jinja2 = checks.require("jinja2", extra="report", purpose="`to_html`")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(resource),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template)
    text: str = page.render(css=resource("style.css"), **view)
    if path is not None:
        record.write_text(path, text)
    return text


def policy_plots(evidence: Evidence) -> tuple[Plot, ...]:
    """Returns the plots that show the policies beside one another."""
    looks = drawing.looks(evidence)
    makers = (
        bars.speed_plot,
        bars.quality_plot,
        curves.metric_plot,
        curves.loss_plot,
        bars.latency_plot,
        bars.memory_plot,
        bars.step_plot,
        curves.scale_plot,
    )
    found = (make(evidence, looks) for make in makers)
    return (*(plot for plot in found if plot is not None),)


def _view(evidence: Evidence) -> dict[str, Any]:
    """Returns what the template shows, under the names that it uses."""
    top, found = sentences.best(evidence), rows(evidence)
    others = [policy for policy in evidence.candidates if policy != top]
    looks, layered = drawing.looks(evidence), tables.layer_policies(evidence)
    script = resource("report.js")
    return {
        "title": evidence.title,
        "script": script,
        # Only this very script runs, whatever name of a layer slips through.
        "script_hash": base64.b64encode(
            hashlib.sha256(script.encode()).digest()
        ).decode(),
        "badge": sentences.badge(evidence, top),
        "sentence": sentences.verdict_sentence(evidence),
        "advice": "" if top is None else sentences.advice(evidence, top),
        "reference": sentences.reference_sentence(evidence),
        "chosen": tables.chosen(evidence),
        "failures": sentences.failures(evidence),
        "others": [
            {
                "badge": sentences.badge(evidence, policy),
                "sentence": sentences.policy_sentence(evidence, policy),
                "advice": sentences.advice(evidence, policy),
            }
            for policy in others
        ],
        "tiles": () if top is None else _tiles(evidence, found, top),
        "looks": looks,
        "groups": [
            (name, list(group))
            for name, group in itertools.groupby(found, lambda row: row.group)
        ],
        "many": len(evidence.candidates) > 2,
        "plots": policy_plots(evidence),
        "plans": plan_sections(evidence),
        "plan_layer_columns": ("Layer", *plans.LAYER_COLUMNS),
        "plan_evaluation_columns": ("Evaluation", *plans.EVALUATION_COLUMNS),
        "layers": tables.layer_rows(evidence),
        "layer_looks": [look for look in looks if look.policy in layered],
        "run_columns": tables.RUN_COLUMNS,
        "runs": tables.run_rows(evidence),
        "metric": evidence.metric,
        "settings": tables.setting_rows(evidence),
        "command": evidence.context.command if evidence.context else "",
        "notes": evidence.notes,
        "error_percent": f"{100 * ERROR_RATE:.0f}",
        "tolerance": figures.metric_format(evidence.tolerance)(evidence.tolerance),
        "better": evidence.better,
        "reference_policy": evidence.label(evidence.reference),
    }


def _tiles(evidence: Evidence, found: tuple[Row, ...], policy: str) -> list[Tile]:
    """Returns the figures at the top: quality, then measures that there are."""
    words = {measure.name: measure.tile for measure in measures_of(evidence.runs)}
    named = {row.name: row for row in found if row.name}
    quality = [(row, row.label) for row in found if row.group == "Quality"][:1]
    measured = [(named[name], words[name]) for name in _TILES if name in named]
    tiles = []
    for row, label in (*measured[:1], *quality, *measured[1:]):
        cell = next(cell for cell in row.cells if cell.policy == policy)
        if cell.change:
            unit = f" {row.unit}" if row.unit else ""
            below = f"{row.reference} → {cell.value}{unit}"
            tiles.append(Tile(label, cell.change, below, cell))
    return tiles[:_MAX_TILES]


def resource(name: str) -> str:
    """Returns the text of a file beside this one."""
    folder = importlib.resources.files("tfamp.comparison.report")
    return folder.joinpath(name).read_text(encoding="utf-8")
