"""What benchmarks share: flags, what a result states of itself, tables, processes."""

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import _tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# glibc gives blocks of at least so many bytes back when they are freed, and so a peak
# of the resident memory is one of what is in use, as with a GPU's allocator. The one
# that TensorFlow has for oneDNN gives nothing back, so it is left out.
FREED_AT_ONCE = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
}
Flag = tuple[Any, ...]


def define_flags(own: Sequence[Flag] = ()) -> flags.FlagValues:
    """Returns the flags of a benchmark with their defaults.

    Args:
        own: Those beside `--json`, `--record`, `--smoke`: the end of the name of
            absl's `DEFINE_...`, and what it takes.
    """
    values = flags.FlagValues()
    for kind, *rest in (
        ("string", "json", "", "File to write the figures to."),
        ("bool", "record", False, "Keep the figures for RESULTS.md."),
        ("bool", "smoke", False, "As little as can be; the figures mean nothing."),
        *own,
    ):
        getattr(flags, f"DEFINE_{kind}")(*rest, flag_values=values)
    return values


def run(argv: Sequence[str], benchmark: Any) -> int:
    """Runs a benchmark: prints tables and a last line of JSON.

    A benchmark is a module with a function `measure`, which gets the flags' values and
    returns figures; here the device, the versions, the command and the date are added.
    It may have `FLAGS` of its own, a `measure_side` for one side in a process of its
    own, and a `record_name` for figures that `--record` keeps under another name.

    Args:
        argv: The benchmark's name and its flags.
        benchmark: The module.
    """
    own = getattr(benchmark, "FLAGS", ())
    has_sides = hasattr(benchmark, "measure_side")
    if has_sides:
        own = (*own, ("string", "side", None, "JSON of a side, measured here."))
    settings = define_flags(own)
    settings(argv)
    if has_sides and settings.side:
        print(json.dumps(benchmark.measure_side(**json.loads(settings.side))))
        return 0
    found = benchmark.measure(settings)
    name = argv[0]
    if hasattr(benchmark, "record_name"):
        name = benchmark.record_name(settings)
    result = {"benchmark": argv[0], **about(argv), **found}
    for title, columns, rows in _tables.of(name, result):
        _show(title, columns, rows)
    if settings.record:
        record(name, result)
    if settings.json:
        Path(settings.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))
    return 0


def about(argv: Sequence[str]) -> dict[str, Any]:
    """Returns the command, the date, the device and the versions of this run."""
    import keras
    import tensorflow as tf

    import tfamp

    words = [word for word in argv if not word.startswith(("--record", "--json"))]
    device = tfamp.status().devices[0]
    return {
        "command": " ".join(["python -m benchmarks", *words]),
        "date": datetime.date.today().isoformat(),
        "device": f"{device.name}, {len(os.sched_getaffinity(0))} cores",
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "tfamp": tfamp.__version__,
        },
    }


def record(name: str, result: dict[str, Any]) -> None:
    """Keeps a result for RESULTS.md; of a list of results that of the same device."""
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text()) if path.is_file() else {}
    kept: Any = result
    if isinstance(before, list):
        others = [each for each in before if each["device"] != result["device"]]
        kept = [*others, result]
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def in_a_process(name: str, side: dict[str, Any], **environment: str) -> Any:
    """Returns what a benchmark measures of one side in a fresh process.

    Args:
        name: The benchmark.
        side: What its function for a side takes.
        **environment: Variables beside those that are set.
    """
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, f"--side={json.dumps(side)}"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if completed.returncode:
        raise RuntimeError(completed.stderr)
    return json.loads(completed.stdout.splitlines()[-1])


def _show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from tfamp.records import console

    shown = dict.fromkeys(columns, console.FOLD)
    print(console.text_of(console.table(shown, rows, title=title), width=140))
