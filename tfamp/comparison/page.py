"""The report of a comparison: one HTML file that opens offline."""

import base64
import collections
import importlib.resources
import io
import math
import os
import re
from typing import Any, TypeAlias

import numpy as np

from tfamp.records import checks, record
from tfamp.records.units import format_bytes

# That of result.py, which imports this file.
Comparison: TypeAlias = Any

# Words of a verdict -> how the page shows them.
_KINDS = {"use it": "good", "slower": "bad", "less accurate": "bad"}
_COLORS = ("#5b6472", "#0072b2", "#d55e00", "#009e73", "#b5559a", "#a87d00")
# Of a CPU's hundred instruction sets, those that decide how fast half precision is.
_TELLING = re.compile("bf16|fp16|amx")


def to_html(found: Comparison, path: str | os.PathLike[str] | None = None) -> str:
    """Returns a comparison as one HTML file and writes it to `path`, if given."""
    jinja2 = checks.require("jinja2", extra="report", purpose="`to_html`")
    folder = importlib.resources.files("tfamp.comparison")
    source = folder.joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["thousands"] = "{:,}".format
    environment.tests["telling"] = _TELLING.search
    order = (found.reference, *found.candidates)
    colors = dict(zip(order, _COLORS * len(order), strict=False))
    text: str = environment.from_string(source).render(
        found=found,
        columns=found.columns(),
        colors=colors,
        kinds=collections.defaultdict(str, _KINDS),
        figures=_figures(found, colors),
        failed=[run for run in found.runs if not run.is_finished],
        format_bytes=format_bytes,
    )
    if path is not None:
        record.write_whole(path, text)
    return text


def _figures(found: Comparison, colors: dict[str, str]) -> list[dict[str, str]]:
    """Returns the plots, as sources of images with what they show in words."""
    where = "Validation" if found.on_validation else "Training"
    figures = []
    for title, draw in (
        ("Training loss by step", _draw_losses),
        (f"{where} {found.metric}, a dot a seed", _draw_metric),
    ):
        figure = checks.figure("`to_html`", 5.2, 3.4)
        axes = figure.subplots()
        if not draw(axes, found, colors):
            continue
        axes.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        source = base64.b64encode(file.getvalue()).decode()
        source = f"data:image/svg+xml;base64,{source}"
        figures.append({"title": title, "source": source})
    return figures


def _draw_losses(axes: Any, found: Comparison, colors: dict[str, str]) -> bool:
    for policy, color in colors.items():
        label = found.label(policy)
        for run in found.finished(policy):
            if run.losses:
                # What is not finite leaves a gap.
                steps, losses = np.array(run.losses, np.float64).T
                axes.plot(steps, losses, color=color, alpha=0.7, label=label)
                label = None
    values = [v for run in found.runs for _, v in run.losses if math.isfinite(v)]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    axes.set_xlabel("step")
    if axes.lines:
        axes.legend(frameon=False, fontsize="small")
    return bool(axes.lines)


def _draw_metric(axes: Any, found: Comparison, colors: dict[str, str]) -> bool:
    names, means = [], {}
    for place, (policy, color) in enumerate(colors.items()):
        runs = found.finished(policy)
        values = [run.final_metrics.get(found.metric, math.nan) for run in runs]
        values = [value for value in values if math.isfinite(value)]
        heights = place + np.linspace(-0.12, 0.12, len(values))
        axes.plot(values, heights, "o", color=color, alpha=0.8)
        means[policy] = np.mean(values) if values else math.nan
        name = found.label(policy)
        names.append(name if len(name) <= 24 else f"{name[:10]}...{name[-11:]}")
    sign = -1 if found.better == "max" else 1
    limit = means[found.reference] + sign * found.tolerance
    if math.isfinite(limit):
        axes.axvline(limit, color="#888888", linestyle=":", label="tolerance")
        axes.legend(frameon=False, fontsize="small")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(found.metric)
    axes.locator_params(axis="x", nbins=5)
    return any(map(math.isfinite, means.values()))
