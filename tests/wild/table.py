"""Writes docs/wild.md: what the corpus does under stock Keras and under tfamp.

`python -m tests.wild.table`; with `--only vae` that row anew, with `--missing` those
that are not there yet.
"""

import argparse
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
from rich import progress  # noqa: E402

import tfamp  # noqa: E402
from tests.wild import corpus, programs  # noqa: E402
from tests.wild.programs.registry import PROGRAMS, TOLERANCE, Program  # noqa: E402

OUT = corpus.ROOT / "docs" / "wild.md"
COMMAND = "make wild"
EXTRA = ("tests.wild.programs_of_hub", "tests.wild.programs_of_applications")
SEEDS = 3
# TensorFlow lets go of little of what it traced: 75 programs came to 17 GB.
PER_PROCESS = 10
COLUMNS = (
    "program",
    "field",
    "manner",
    "float32",
    "stock mixed_float16",
    "tfamp mixed_float16",
    "tfamp mixed_bfloat16",
    "by apply",
    "heads, softmax, loss in float32",
    "saved, loaded to the bit",
)


def words(error: Exception) -> str:
    """Returns the kind of an error and the words that tell it."""
    text = str(error).replace("\x1b[1m", "").replace("\x1b[0m", "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "does not match" in line or "expected" in line]
    telling += [line for line in lines if not line.startswith("Exception encount")]
    first = (telling or lines or [""])[0]
    short = first if len(first) <= 90 else first[:87] + "..."
    kind = type(error).__name__
    return f"{kind}: {short.removeprefix(f'{kind}: ')}".replace("|", "/").replace(
        "`", ""
    )


class Row:
    """One program in all ways; a failure is told in its cell and ends nothing."""

    def __init__(self, program: Program, loader: corpus.Loader, folder: Path) -> None:
        self.program, self.loader, self.folder = program, loader, folder
        self.seeds = range(SEEDS if program.tolerance == TOLERANCE else 1)
        self.references: list[float] = []
        self.in_half: set[str] = set()
        self.differences: list[str] = []

    def cells(self) -> tuple[str, ...]:
        """Runs everything and returns the row."""
        program = self.program
        losses = [self.loss("float32", "float32")]
        losses.append(self.loss("stock", "mixed_float16"))
        losses += [self.loss("enable", policy) for policy in corpus.POLICIES]
        if program.is_built:
            said = [self.applied(policy) for policy in corpus.POLICIES]
            apply = ", ".join(dict.fromkeys(filter(None, said))) or "yes"
        else:
            apply = "no weights before `fit`"
        kept = ", ".join(sorted(self.in_half)) or "yes"
        loaded = ", ".join(dict.fromkeys(self.differences)) or "yes"
        loaded = program.unsaved or loaded
        return (program.name, program.field, program.manner, *losses, apply) + (
            kept,
            loaded,
        )

    def loss(self, way: str, policy: str) -> str:
        """Returns the median of the last losses, or the error."""
        try:
            outcomes = [corpus.run(self.program, way, policy, s) for s in self.seeds]
            if way == "enable":
                self.look_at(outcomes[0], f"{way}-{policy}")
        except Exception as error:
            return words(error)
        finally:
            keras.utils.clear_session()
        losses = [outcome.last_loss for outcome in outcomes]
        if way == "float32":
            self.references = losses
        return f"{statistics.median(losses):.4g}{self.far(losses, self.references)}"

    def applied(self, policy: str) -> str:
        """Returns what `tfamp.apply` makes wrong with one seed, "" for nothing."""
        try:
            outcome = corpus.run(self.program, "apply", policy)
            self.look_at(outcome, f"apply-{policy}")
        except Exception as error:
            return words(error)
        finally:
            keras.utils.clear_session()
        return self.far([outcome.last_loss], self.references[:1]).strip(" ()")

    def far(self, losses: list[float], references: list[float]) -> str:
        """Returns how far losses are from float32's, "" within the tolerance."""
        reference = statistics.median(references)
        distance = corpus.distance(statistics.median(losses), reference)
        return (
            f" ({distance:.0%} off)" if not distance <= self.tolerance(losses) else ""
        )

    def tolerance(self, losses: list[float]) -> float:
        """Returns the program's tolerance; one seed tells half as much as three."""
        return self.program.tolerance * (1 if len(losses) == SEEDS else 2)

    def look_at(self, outcome: corpus.Outcome, name: str) -> None:
        """Notes what was computed in half, and whether loading changes anything."""
        self.in_half |= outcome.in_half()
        if not self.program.unsaved:
            path = corpus.save(outcome, f"{self.program.name}-{name}", self.folder)
            said = self.loader.difference(path)
            self.differences += [said[:60].replace("|", "/")] if said else []


def heading() -> str:
    """Returns what stands above the table."""
    versions = (
        f"tfamp {tfamp.__version__}, Keras {keras.__version__}, TensorFlow "
        f"{tf.__version__} and Python {platform.python_version()}"
    )
    return f"""# Programs in the wild

Programs that know nothing of precision, in the manner of Keras's examples, on synthetic
data (`tests/wild/`). Each runs unchanged: in float32, under `keras.mixed_precision`,
under `tfamp.enable` and with `tfamp.apply` before it trains.

Written by `{COMMAND}` with {versions}, on {processor()}.

- A loss is the last epoch's, the median over {SEEDS} seeds. It is marked where it is
  farther from float32's than {TOLERANCE:.0%}. Programs too short or unsteady for that
  run with one seed and are marked beyond a distance that their file states, as all of
  `keras.applications` and the adversarial ones.
- "in float32" tells of heads, softmax and losses what the operations that ran say, not
  what was assigned: "yes", or which were in half precision.
- "saved, loaded" tells whether `tfamp.load_model` in a fresh process brings the same
  predictions, bit by bit, for both ways and both policies.

"""


def processor() -> str:
    """Returns the processor's name, or the machine's kind where it is not told."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line for line in lines if line.startswith("model name"))
        return f"{name.partition(':')[2].strip()}, {os.cpu_count()} cores"
    except (OSError, StopIteration):
        return f"{platform.machine()}, {os.cpu_count()} cores"


def rendered(rows: dict[str, tuple[str, ...]]) -> str:
    """Returns a Markdown table."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows.values()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def rows_of(text: str) -> dict[str, tuple[str, ...]]:
    """Returns the rows of the written table by their program's name."""
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    rows = [tuple(line.removeprefix("| ")[:-2].split(" | ")) for line in lines]
    return {row[0]: row for row in rows}


def written(path: Path) -> dict[str, tuple[str, ...]]:
    """Returns the rows of a file, none if it is of other versions or columns."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return rows_of(text) if text.startswith(heading()) else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="PROGRAM")
    parser.add_argument("--missing", action="store_true", help="rows not there yet")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    absl.logging.set_verbosity(absl.logging.ERROR)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    modules = (programs.__name__, *EXTRA)
    for module in modules:
        importlib.import_module(module)
    unknown = sorted(set(options.only or ()) - set(PROGRAMS))
    if unknown:
        parser.error(f"unknown programs {unknown}; expected some of {list(PROGRAMS)}")
    known = written(OUT) if options.only or options.missing else {}
    chosen = [
        program
        for name, program in PROGRAMS.items()
        if not (options.only and name not in options.only)
        and not (options.missing and name in known)
    ]
    if len(chosen) > PER_PROCESS:
        for start in range(0, len(chosen), PER_PROCESS):
            group = chosen[start : start + PER_PROCESS]
            names = [f"--only={program.name}" for program in group]
            command = (sys.executable, "-W", "ignore", "-m", "tests.wild.table", *names)
            subprocess.run(command, cwd=corpus.ROOT, check=True)
        return
    bar = progress.Progress(
        progress.MofNCompleteColumn(),
        progress.BarColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.description}"),
    )
    with bar, corpus.Loader(*modules) as loader, tempfile.TemporaryDirectory() as out:
        task = bar.add_task("", total=len(chosen))
        for program in chosen:
            bar.update(task, description=program.name)
            known[program.name] = Row(program, loader, Path(out)).cells()
            bar.advance(task)
            # Each row as it comes: a run that is cut short goes on with --missing.
            rows = {name: known[name] for name in PROGRAMS if name in known}
            OUT.write_text(heading() + rendered(rows), encoding="utf-8")
    print(f"Wrote {OUT}.")


if __name__ == "__main__":
    main()
