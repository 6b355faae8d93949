"""The report of a comparison: one HTML file that opens offline."""

import base64
import importlib.resources
import io
import math
import os
import re
from typing import Any, TypeAlias

import numpy as np

from tfamp.comparison import table
from tfamp.records import checks, record
from tfamp.records.units import format_bytes, join_words

# That of result.py, which imports this file.
Comparison: TypeAlias = Any

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
    columns, order = table.columns(found), (found.reference, *found.candidates)
    colors = dict(zip(order, _COLORS * len(order), strict=False))
    policies = [
        {
            "name": table.named(found, policy),
            "cells": [column.cells[policy] for column in columns],
            "word": (word := table.word_of(found, policy)),
            "kind": _KINDS.get(word, "neutral"),
            "color": colors[policy],
        }
        for policy in order
    ]
    text: str = environment.from_string(source).render(
        found=found,
        sentence=table.policy_sentence(found, found.best),
        advice=table.advice(found, found.best),
        reference=table.reference_sentence(found),
        legend=table.LEGEND.format(found.label(found.reference)),
        word=table.word_of(found, found.best),
        headings=[column.heading for column in columns],
        policies=policies,
        others=[
            f"{table.policy_sentence(found, policy)} {table.advice(found, policy)}"
            for policy in found.candidates
            if policy != found.best
        ],
        figures=_figures(found, colors),
        failed=[run for run in found.runs if not run.is_finished],
        settings=settings(found),
        command=found.context.command if found.context else "",
    )
    if path is not None:
        record.write_text(path, text)
    return text


def settings(found: Comparison) -> list[tuple[str, str]]:
    """Returns what was trained and where, as names and values."""
    runs = [run for run in found.runs if run.is_finished]

    def several(name: str) -> str:
        values = dict.fromkeys(getattr(run, name) for run in runs)
        return join_words([f"{value:,}" for value in values])

    better = "larger" if found.better == "max" else "smaller"
    rows = [
        ("Seeds", join_words([*map(str, found.seeds)])),
        ("Judged by", f"{found.metric} ({better} is better)"),
        ("Tolerance", f"{found.tolerance:,.3g}"),
        ("Batch", several("batch_size")),
        ("Steps", several("num_steps")),
        ("Epochs", several("num_epochs")),
        ("Parameters", several("num_parameters")),
    ]
    if found.context is not None:
        context = found.context
        rows.append(("Date", context.date))
        for device in context.devices:
            details = [
                device.kind.upper(),
                format_bytes(device.memory_bytes) if device.memory_bytes else "",
                "a slice of it (MIG)" if device.partition else "",
                ", ".join(filter(_TELLING.search, device.features)),
            ]
            what = f"{device.name} ({', '.join(filter(None, details))})"
            rows.append(("Device", what))
        versions = [f"{name} {v}" for name, v in context.versions.items() if v]
        rows += [
            ("System", f"{context.system}, {context.num_cores} cores"),
            ("Versions", ", ".join(versions)),
        ]
    return [(name, value) for name, value in rows if value]


def _figures(found: Comparison, colors: dict[str, str]) -> list[dict[str, str]]:
    """Returns the plots, as sources of images with what they show in words."""
    runs = [run for run in found.runs if run.is_finished]
    plots = []
    if any(run.losses for run in runs):
        plots.append(("Training loss by step", _draw_losses))
    if any(
        math.isfinite(run.final_metrics.get(found.metric, math.nan)) for run in runs
    ):
        where = "Validation" if found.on_validation else "Training"
        plots.append((f"{where} {found.metric}, a dot a seed", _draw_metric))
    figures = []
    for title, draw in plots:
        figure = checks.figure("`to_html`", 5.2, 3.4)
        axes = figure.subplots()
        draw(axes, found, colors)
        axes.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        source = base64.b64encode(file.getvalue()).decode()
        source = f"data:image/svg+xml;base64,{source}"
        figures.append({"title": title, "source": source})
    return figures


def _draw_losses(axes: Any, found: Comparison, colors: dict[str, str]) -> None:
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
    axes.legend(frameon=False, fontsize="small")


def _draw_metric(axes: Any, found: Comparison, colors: dict[str, str]) -> None:
    for place, (policy, color) in enumerate(colors.items()):
        runs = found.finished(policy)
        values = [run.final_metrics.get(found.metric, math.nan) for run in runs]
        heights = place + np.linspace(-0.12, 0.12, len(values))
        axes.plot(values, heights, "o", color=color, alpha=0.8)
    runs = found.finished(found.reference)
    before = [run.final_metrics.get(found.metric, math.nan) for run in runs]
    if before and np.isfinite(before).all():
        sign = -1 if found.better == "max" else 1
        allowed = float(np.mean(before)) + sign * found.tolerance
        axes.axvline(allowed, color="#888888", linestyle=":", label="tolerance")
        axes.legend(frameon=False, fontsize="small")
    names = [found.label(policy) for policy in colors]
    short = [n if len(n) <= 24 else f"{n[:10]}...{n[-11:]}" for n in names]
    axes.set_yticks(range(len(short)), short)
    axes.set_ylim(len(short) - 0.5, -0.5)
    axes.set_xlabel(found.metric)
    axes.locator_params(axis="x", nbins=5)
