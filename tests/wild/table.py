"""Writes docs/wild.md: what the corpus does under stock Keras and under tfamp.

`python -m tests.wild.table`; with `--only=vae` that row anew.
"""

import argparse
import functools
import importlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import absl.logging  # noqa: E402 - the environment is set first
import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfamp  # noqa: E402
from tests.wild import corpus, programs  # noqa: E402
from tests.wild.programs.registry import PROGRAMS, Program  # noqa: E402

OUT = corpus.ROOT / "docs" / "wild.md"
EXTRA = ("tests.wild.programs_of_hub", "tests.wild.programs_of_applications")
# TensorFlow lets go of little of what it traced.
PER_PROCESS = 10
SPREAD = "spread of float32"
AHEAD = "Programs that are still to be run here:"
LOSSES = ("stock mixed_float16", "tfamp mixed_float16", "tfamp mixed_bfloat16")
COLUMNS = (
    *("program", "field", "manner", "float32", SPREAD, *LOSSES, "by apply"),
    *("heads, softmax, loss in float32", "saved, loaded to the bit"),
)


def words(error: Exception) -> str:
    """Returns the kind of an error and the words that tell it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "does not match" in line or "expected" in line]
    first = (telling or lines or [""])[0]
    short = first if len(first) <= 90 else first[:87] + "..."
    return f"{type(error).__name__}: {short}".replace("|", "/").replace("`", "")


def far(losses: list[float], references: list[float], program: Program) -> str:
    """Returns how far losses are from float32's, "" within its own spread."""
    reference = statistics.median(references[: len(losses)])
    distance = corpus.distance(statistics.median(losses), reference)
    is_near = distance <= corpus.spread(references) or program.unsteady
    return "" if is_near else f"({distance:.1%} off)"


def row_of(program: Program, loader: corpus.Loader, folder: Path) -> tuple[str, ...]:
    """Runs a program in all ways; a failure is told in its cell and ends nothing."""
    exact: list[float] = []
    in_half: set[str] = set()
    differences: list[str] = []

    def cell(way: str, policy: str, seeds: int) -> str:
        try:
            outcomes = [corpus.run(program, way, policy, s) for s in range(seeds)]
            if way in corpus.WAYS:
                in_half.update(outcomes[0].in_half())
            if way in corpus.WAYS and not program.unsaved:
                name = f"{program.name}-{way}-{policy}"
                said = loader.difference(corpus.save(outcomes[0], name, folder))
                differences.extend([said[:60].replace("|", "/")] if said else [])
        except Exception as error:
            return words(error)
        finally:
            keras.utils.clear_session()
        losses = [outcome.last_loss for outcome in outcomes]
        exact[:] = exact or losses
        told = far(losses, exact, program)
        if way == "apply":
            return told.strip("()")
        return f"{statistics.median(losses):.4g} {told}".strip()

    losses = [cell("float32", "float32", corpus.SEEDS)]
    spread = f"{corpus.spread(exact):.1%}"
    if program.unsteady:
        spread += f", not judged: {program.unsteady}"
    losses += [spread, cell("stock", "mixed_float16", corpus.SEEDS)]
    losses += [cell("enable", policy, corpus.SEEDS) for policy in corpus.POLICIES]
    applied = ["no weights before `fit`"]
    if program.is_built:
        applied = [cell("apply", policy, 1) for policy in corpus.POLICIES]
    said = applied, sorted(in_half), differences or [program.unsaved]
    told = (", ".join(dict.fromkeys(filter(None, each))) or "yes" for each in said)
    return (program.name, program.field, program.manner, *losses, *told)


def heading() -> str:
    """Returns what stands above the table."""
    versions = (
        f"tfamp {tfamp.__version__}, Keras {keras.__version__}, TensorFlow "
        f"{tf.__version__} and Python {platform.python_version()}"
    )
    device = f"{tfamp.status().devices[0].name}, {os.cpu_count()} cores"
    return f"""# Programs in the wild

Programs that know nothing of precision, in the manner of Keras's examples, on synthetic
data (`tests/wild/`). Each runs unchanged: in float32, under `keras.mixed_precision`,
under `tfamp.enable` and with `tfamp.apply` before it trains.

Written by `make wild` with {versions}, on {device}.

- A loss is the last epoch's, the median over {corpus.SEEDS} seeds. It is marked where
  it is farther from float32's than float32's own losses with these seeds are from each
  other. A program that is too unsteady to judge is not, and says why.
- "in float32" tells of heads, softmax and losses what the operations that ran say, not
  what was assigned: "yes", or which were in half precision.
- "saved, loaded" tells whether `tfamp.load_model` in a fresh process brings the same
  predictions, bit by bit, for both ways and both policies.

"""


def rendered(rows: dict[str, tuple[str, ...]]) -> str:
    """Returns a Markdown table."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows.values()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def without_row(rows: dict[str, tuple[str, ...]]) -> str:
    """Returns what the page says of programs that have no row as yet."""
    names = [name for name in PROGRAMS if name not in rows]
    return f"\n{AHEAD} {', '.join(names)}.\n" if names else ""


def rows_of(text: str) -> dict[str, tuple[str, ...]]:
    """Returns the rows of the written table by their program's name."""
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    rows = [tuple(line.removeprefix("| ")[:-2].split(" | ")) for line in lines]
    return {row[0]: row for row in rows}


@functools.cache
def spreads() -> dict[str, float]:
    """Returns the spread of float32 of each program that has a row."""
    rows = rows_of(OUT.read_text(encoding="utf-8"))
    place = COLUMNS.index(SPREAD)
    return {n: float(row[place].partition("%")[0]) / 100 for n, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="PROGRAM")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    absl.logging.set_verbosity(absl.logging.ERROR)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    modules = (programs.__name__, *EXTRA)
    for module in modules:
        importlib.import_module(module)
    chosen = options.only or list(PROGRAMS)
    if unknown := sorted(set(chosen) - set(PROGRAMS)):
        parser.error(f"unknown programs {unknown}; expected some of {list(PROGRAMS)}")
    for start in range(PER_PROCESS, len(chosen), PER_PROCESS):
        names = [f"--only={name}" for name in chosen[start : start + PER_PROCESS]]
        command = (sys.executable, "-W", "ignore", "-m", "tests.wild.table", *names)
        subprocess.run(command, cwd=corpus.ROOT, check=True)
    with corpus.Loader(*modules) as loader, tempfile.TemporaryDirectory() as out:
        for name in chosen[:PER_PROCESS]:
            print(name, flush=True)
            row = row_of(PROGRAMS[name], loader, Path(out))
            known = rows_of(OUT.read_text(encoding="utf-8")) | {name: row}
            # Each row as it comes: a run that is cut short goes on with --only.
            rows = {name: known[name] for name in PROGRAMS if name in known}
            page = heading() + rendered(rows) + without_row(rows)
            OUT.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
