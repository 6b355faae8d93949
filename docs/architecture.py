"""Draws the floors of the package and who imports whom, from its import statements.

Command: python -m docs.architecture
Time: a few seconds. Writes docs/architecture.svg; --png=FILE writes that too.
"""

import argparse
import collections
import textwrap
from pathlib import Path

import grimp
import tomllib

ROOT = Path(__file__).parents[1]
# From the lowest up, as import-linter holds them.
_SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
_LAYERS = _SETTINGS["tool"]["importlinter"]["contracts"][0]["layers"]
FLOORS = [layer.split(" | ") for layer in reversed(_LAYERS)]
SUBJECTS = {
    "records": "results, findings, formats, units, checks, files",
    "machine": "devices, speeds, memory, clusters, NVML, AMX",
    "keras_hooks": "every touch of Keras's private parts",
    "graph": "traced graphs: operations, products, memory",
    "loss_scale": "rule, optimizer, tape, replicas, saving",
    "data": "pipeline, sources, sampling, statistics, health",
    "dtypes": "one layer's dtype and why",
    "plan": "PrecisionPlan",
    "policy": "enable, disable, scope, status",
    "models": "apply, assignment, load_model",
    "stepping": "a step outside fit: data, taps, snapshots, bundles",
    "trials": "runs in fresh processes and in turns",
    "numerics": "lint, ranges, sensitivity, triage, proof",
    "memory": "estimate, batch search, remat",
    "training": "learning rates, schedules",
    "callbacks": "monitor, throughput, recovery, resume",
    "comparison": "compare, verdict, report",
    "tuning": "measured policies, the tuner",
    "serving": "freeze, export, int8, server, load tests",
    "distribute": "strategies of several devices",
    "cli": "one file a command",
}
_WIDTH, _HEIGHT, _GAP = 2.6, 0.92, 0.3


def top(module: str) -> str:
    """Returns the folder or file of the package that a module lies in."""
    return module.split(".")[1]


def edges() -> collections.Counter[tuple[str, str]]:
    """Returns how many files of one folder import from another, by both names."""
    graph = grimp.build_graph("tfamp", exclude_type_checking_imports=True)
    pairs = {
        (importer, top(imported))
        for importer in graph.modules - {"tfamp"}
        for imported in graph.find_modules_directly_imported_by(importer) - {"tfamp"}
    }
    return collections.Counter((top(file), folder) for file, folder in pairs)


def sizes() -> dict[str, tuple[int, int]]:
    """Returns the number of files and of lines of each folder."""
    found: dict[str, tuple[int, int]] = collections.defaultdict(lambda: (0, 0))
    package = ROOT / "tfamp"
    for path in package.rglob("*.py"):
        name = path.relative_to(package).parts[0].removesuffix(".py")
        files, lines = found[name]
        found[name] = files + 1, lines + len(path.read_text().splitlines())
    return found


def draw(paths: list[Path]) -> None:
    """Draws the floors into files, whose format follows from their names."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    widest = max(map(len, FLOORS))
    figure = Figure(figsize=(12.5, 12.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    places = {}
    for floor, names in enumerate(FLOORS):
        start = (widest - len(names)) * (_WIDTH + _GAP) / 2
        for number, name in enumerate(names):
            places[name] = (start + number * (_WIDTH + _GAP), floor * 1.7)
        axes.text(-0.35, floor * 1.7 + _HEIGHT / 2, str(floor), ha="right", size=15)
    for (importer, imported), count in sorted(edges().items()):
        if importer == imported or not {importer, imported} <= places.keys():
            continue
        (x, y), (to_x, to_y) = places[importer], places[imported]
        is_beside = y == to_y
        axes.add_patch(
            FancyArrowPatch(
                (x + (0 if is_beside else _WIDTH / 2), y + _HEIGHT * is_beside / 2),
                (
                    to_x + (_WIDTH if is_beside else _WIDTH / 2),
                    to_y + (_HEIGHT / 2 if is_beside else _HEIGHT),
                ),
                arrowstyle="-|>",
                mutation_scale=8,
                linewidth=min(0.4 + count / 8, 3.0),
                color="#3b6ea5",
                alpha=0.28,
                zorder=1,
            )
        )
    numbers = sizes()
    for name, (x, y) in places.items():
        box = FancyBboxPatch(
            (x, y),
            _WIDTH,
            _HEIGHT,
            boxstyle="round,pad=0.02,rounding_size=0.08",
            facecolor="#f5f7fa",
            edgecolor="#33475b",
            zorder=2,
        )
        axes.add_patch(box)
        files, lines = numbers[name]
        middle = x + _WIDTH / 2
        title = f"{name}   {files} files, {lines:,} lines"
        if files == 1:
            title = f"{name}   {lines:,} lines"
        axes.text(middle, y + 0.7, title, ha="center", weight="bold", size=8.5)
        subject = "\n".join(textwrap.wrap(SUBJECTS[name], 34))
        axes.text(middle, y + 0.31, subject, ha="center", va="center", size=8)
    axes.set_xlim(-0.8, widest * (_WIDTH + _GAP))
    axes.set_ylim(-0.2, len(FLOORS) * 1.7 - 0.6)
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        # The same imports give the same file.
        with rc_context({"svg.hashsalt": "architecture"}):
            figure.savefig(path, dpi=110, metadata=metadata)


def main() -> None:
    """Reads the command line and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", type=Path, help="A file for a copy in pixels.")
    arguments = parser.parse_args()
    missing = {name for names in FLOORS for name in names} - set(SUBJECTS)
    if missing:
        raise SystemExit(f"Say in SUBJECTS what {sorted(missing)} hold.")
    svg = Path(__file__).with_name("architecture.svg")
    draw([svg, *([arguments.png] if arguments.png else [])])
    print(f"Wrote {svg}")


if __name__ == "__main__":
    main()
