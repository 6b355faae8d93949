"""The report of a comparison: one HTML file that opens offline, and Markdown."""

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
from tfamp.trials.run_records import Run

# That of result.py, which imports this file.
Comparison: TypeAlias = Any

# Columns of the table beside the policy and the verdict, where they were measured.
_COLUMNS = (table.SPEED, "metric", "training_bytes", "device_bytes", "energy_joules")
_COUNTS = ("skipped_steps", "nonfinite")
_KINDS = {"use it": "good", "slower": "bad", "less accurate": "bad"}
_COLORS = ("#5b6472", "#0072b2", "#d55e00", "#009e73", "#b5559a", "#a87d00")
# Of a CPU's hundred instruction sets, those that decide how fast half precision is.
_TELLING = re.compile("bf16|fp16|amx")
_SPECIAL = re.compile(r"([\\`*_\[\]|~#<>&])")


def to_html(found: Comparison, path: str | os.PathLike[str] | None = None) -> str:
    """Returns a comparison as one HTML file and writes it to `path`, if given."""
    jinja2 = checks.require("jinja2", extra="report", purpose="`to_html`")
    folder = importlib.resources.files("tfamp.comparison")
    source = folder.joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    columns, order = _columns(found), (found.reference, *found.candidates)
    text: str = environment.from_string(source).render(
        found=found,
        sentence=table.verdict_sentence(found),
        advice=table.advice(found, found.best),
        reference=table.reference_sentence(found),
        word=word_of(found, found.best),
        headings=[row.heading for row in columns],
        policies=[_line(found, policy, columns) for policy in order],
        others=[
            f"{table.policy_sentence(found, policy)} {table.advice(found, policy)}"
            for policy in found.candidates
            if policy != found.best
        ],
        rest=[row for row in table.rows(found) if row not in columns],
        labels=[found.label(policy) for policy in found.policies],
        figures=_figures(found),
        failed=[run for run in found.runs if not run.is_finished],
        settings=settings(found),
        command=found.context.command if found.context else "",
    )
    if path is not None:
        record.write_text(path, text)
    return text


def to_markdown(found: Comparison, path: str | os.PathLike[str] | None = None) -> str:
    """Returns a summary for a comment on a pull request, and writes it to `path`."""
    columns = _columns(found)
    lines = [
        f"## {_escaped(found.title)}",
        "",
        f"**{word_of(found, found.best).capitalize()}.** "
        f"{_escaped(table.verdict_sentence(found))}",
        "",
        f"| | {' | '.join(_escaped(row.heading) for row in columns)} | |",
        f"|:--|{'--:|' * len(columns)}:--|",
    ]
    for policy in found.policies:
        cells = [row.cells[policy] for row in columns]
        texts = [_escaped(" ".join(filter(None, (c.value, c.change)))) for c in cells]
        name, word = _escaped(table.named(found, policy)), word_of(found, policy)
        lines.append(f"| {name} | {' | '.join(texts)} | {word} |")
    notes = filter(None, (table.failures(found), *found.notes))
    lines += ["", *(f"- {_escaped(note)}" for note in notes)]
    if found.context is not None and found.context.command:
        lines += ["", f"`{found.context.command.replace('`', chr(39))}`"]
    text = "\n".join(lines) + "\n"
    if path is not None:
        record.write_text(path, text)
    return text


def word_of(found: Comparison, policy: str) -> str:
    """Returns the verdict on a policy in the words of the table."""
    if policy == found.reference:
        return "reference"
    return table.WORDS[found.verdicts[policy].answer]


def settings(found: Comparison) -> list[tuple[str, str]]:
    """Returns what was trained and where, as names and values."""
    runs = [run for run in found.runs if run.is_finished]

    def several(name: str, form: str = "{:,}") -> str:
        values = dict.fromkeys(getattr(run, name) for run in runs)
        return join_words([form.format(value) for value in values])

    better = "larger" if found.better == "max" else "smaller"
    decimals = table.metric_decimals(found.tolerance)
    rows = [
        ("Seeds", join_words([*map(str, found.seeds)])),
        ("Judged by", f"{found.metric} ({better} is better)"),
        ("Tolerance", f"{found.tolerance:,.{decimals}f}"),
        ("Batch", several("batch_size")),
        ("Steps", several("num_steps")),
        ("Epochs", several("num_epochs")),
        ("Warm-up left out", several("warmup_steps", "{:,} steps")),
        ("Parameters", several("num_parameters")),
    ]
    if found.context is not None:
        context = found.context
        rows.append(("Date", context.date))
        for device in context.devices:
            memory = device.memory_bytes
            details = [
                device.kind.upper(),
                format_bytes(memory) if memory else "",
                "a slice of it (MIG)" if device.partition else "",
                ", ".join(filter(_TELLING.search, device.features)),
            ]
            rows.append(
                ("Device", f"{device.name} ({', '.join(filter(None, details))})")
            )
        has_gpu = any(device.kind == "gpu" for device in context.devices)
        versions = [f"{name} {v}" for name, v in context.versions.items() if v]
        threads = context.intra_op_threads, context.inter_op_threads
        rows += [
            ("Driver", context.driver),
            ("System", f"{context.system}, {context.num_cores} cores"),
            ("Threads", " and ".join(map(str, threads)) if any(threads) else ""),
            # Nothing else rounds to TF32.
            ("TF32", ("on" if context.tf32 else "off") if has_gpu else ""),
            ("oneDNN", "on" if context.onednn else "off"),
            ("Versions", ", ".join(versions)),
            ("Environment", " ".join(f"{k}={v}" for k, v in context.variables.items())),
        ]
    return [(name, value) for name, value in rows if value]


def _columns(found: Comparison) -> list[table.Row]:
    """Returns the rows that stand as columns of the table with a row a policy."""
    by_name = {row.name: row for row in table.rows(found)}
    latency = [name for name in by_name if name.startswith("latency_p50")][:1]
    names = (*_COLUMNS, *latency, *_COUNTS)
    return [by_name[name] for name in names if name in by_name]


def _line(found: Comparison, policy: str, columns: list[table.Row]) -> dict[str, Any]:
    word = word_of(found, policy)
    return {
        "name": table.named(found, policy),
        "cells": [row.cells[policy] for row in columns],
        "word": word,
        "kind": _KINDS.get(word, "neutral"),
        "color": _color(found, policy),
    }


def _color(found: Comparison, policy: str) -> str:
    order = (found.reference, *found.candidates)
    return _COLORS[order.index(policy) % len(_COLORS)]


def _figures(found: Comparison) -> list[dict[str, str]]:
    """Returns the plots, as sources of images with what they show in words."""
    runs = [run for run in found.runs if run.is_finished]
    plots = []
    if any(run.losses for run in runs):
        plots.append(("Training loss by step", _draw_losses))
    if any(math.isfinite(_metric(found, run)) for run in runs):
        where = "Validation" if found.on_validation else "Training"
        plots.append((f"{where} {found.metric}, a dot a seed", _draw_metric))
    figures = []
    for title, draw in plots:
        figure = checks.figure("`to_html`", 5.2, 3.4)
        axes = figure.subplots()
        draw(axes, found)
        axes.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        source = base64.b64encode(file.getvalue()).decode()
        figures.append(
            {"title": title, "source": f"data:image/svg+xml;base64,{source}"}
        )
    return figures


def _draw_losses(axes: Any, found: Comparison) -> None:
    for policy in (found.reference, *found.candidates):
        label, color = found.label(policy), _color(found, policy)
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


def _draw_metric(axes: Any, found: Comparison) -> None:
    order = (found.reference, *found.candidates)
    for place, policy in enumerate(order):
        values = np.array([_metric(found, run) for run in found.finished(policy)])
        offsets = np.linspace(-0.12, 0.12, len(values)) if len(values) > 1 else [0.0]
        heights = place + np.array(offsets[: len(values)])
        axes.plot(values, heights, "o", color=_color(found, policy), alpha=0.8)
    before = [_metric(found, run) for run in found.finished(found.reference)]
    if before and np.isfinite(before).all():
        sign = -1 if found.better == "max" else 1
        allowed = float(np.mean(before)) + sign * found.tolerance
        axes.axvline(allowed, color="#888888", linestyle=":", label="tolerance")
        axes.legend(frameon=False, fontsize="small")
    axes.set_yticks(range(len(order)), [_short(found.label(each)) for each in order])
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlabel(found.metric)
    axes.locator_params(axis="x", nbins=5)


def _metric(found: Comparison, run: Run) -> float:
    return run.final_metrics.get(found.metric, math.nan)


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:10]}...{name[-11:]}"


def _escaped(text: str) -> str:
    """Returns a text that Markdown shows as it is, in one line."""
    one_line = _SPECIAL.sub(r"\\\1", " ".join(text.split()))
    # An "@name" in a comment calls a person; with this between it does not.
    return one_line.replace("@", "@\u200b")
