"""`tfamp doctor`: devices, memory, versions, settings, the policy, problems."""

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tfamp.cli import _flags
from tfamp.cli._diagnosis import Diagnosis, Probes, Setting, diagnose
from tfamp.machine import amx
from tfamp.machine.memory_records import GpuMemory, MachineMemory
from tfamp.records import units

_PURPOSE = (
    "Shows devices, memory, versions and settings, recommends a policy and says why,\n"
    "and names problems with their remedies. Ends with status 1 if something is broken."
)
_SUPPORTED = {
    "python": "3.10 to 3.13",
    "tensorflow": "2.19 to 2.21",
    "keras": "3.10 and later",
}
# Of a CPU's hundred features, those that decide a policy.
_TELLING = (
    *("amx_bf16", "amx_fp16", amx.BROKEN),
    *("avx512_bf16", "avx512_fp16", "bf16", "svebf16"),
)


def main(argv: Sequence[str], *, probes: Probes | None = None) -> int:
    """Runs the command.

    Args:
        argv: The arguments after "doctor".
        probes: The looks at the machine, by default the real ones.

    Returns:
        0, or 1 if something is broken, or 2 for flags that cannot be understood.
    """
    values = _flags.new_flags()
    add = functools.partial(_flags.define, values)
    add("string", "json", None, _flags.JSON)
    add("bool", "all", False, "Show settings that are not set too.")
    status = _flags.parse(values, argv, command="tfamp doctor", purpose=_PURPOSE)
    if isinstance(status, int):
        return status
    # TensorFlow reads it when it is imported; its notices are of no help here.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Whatever a package prints while it is imported must not reach the document.
    with contextlib.redirect_stdout(sys.stderr), _held_back() as log:
        diagnosis = diagnose(probes or Probes())
    if diagnosis.is_broken and log:
        print("".join(log), file=sys.stderr)
    _flags.write(values, diagnosis)
    if values.json != "-":
        render(diagnosis, Console(), all_settings=bool(values["all"].value))
    return 1 if diagnosis.is_broken else 0


def render(
    diagnosis: Diagnosis, console: Console, *, all_settings: bool = False
) -> None:
    """Prints a diagnosis as tables, the problems last, where the eye ends up.

    Args:
        diagnosis: What was found.
        console: Where it goes.
        all_settings: Whether settings are shown that are not set.
    """
    console.print(_versions_table(diagnosis))
    console.print(_devices_table(diagnosis))
    if diagnosis.memory is not None:
        console.print(_memory_table(diagnosis.memory))
    _print_settings(diagnosis, console, all_settings=all_settings)
    if diagnosis.recommendation is not None:
        line = Text("Recommended policy: ", style="bold")
        line.append(diagnosis.recommendation.policy, style="bold green")
        console.print(line)
        reason = Text(diagnosis.recommendation.reason)
        console.print(Padding(reason, (0, 0, 1, 2), expand=False))
    if not diagnosis.findings:
        console.print(Text("No problems found.", style="green"))
        return
    table = _table("Problems", "", "What", "Remedy")
    for finding in diagnosis.findings:
        style = "bold red" if finding.severity == "error" else "yellow"
        severity = Text(finding.severity, style=style)
        table.add_row(severity, Text(finding.message), Text(finding.remedy))
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    """Returns an empty table in the doctor's style."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    table.columns[0].no_wrap = len(columns) > 2 and title != "Settings"
    return table


def _versions_table(diagnosis: Diagnosis) -> Table:
    table = _table("Versions", "Package", "Found", "Supported")
    for package, version in diagnosis.versions.items():
        found = Text(version) if version else Text("missing", style="bold red")
        table.add_row(package, found, _SUPPORTED.get(package, ""))
    return table


def _devices_table(diagnosis: Diagnosis) -> Table:
    table = _table("Devices", "Kind", "Name", "Memory", "Can do", "Fast in")
    for report in diagnosis.devices:
        device = report.device
        can = [feature for feature in _TELLING if feature in device.features]
        if device.compute_capability is not None:
            major, minor = device.compute_capability
            can.append(f"compute capability {major}.{minor}")
        if device.partition:
            can.append("MIG slice")
        memory = device.memory_bytes
        table.add_row(
            device.kind.upper(),
            Text(device.name),
            units.format_bytes(memory) if memory else "",
            ", ".join(can),
            ", ".join(report.fast_dtypes) or "float32",
        )
    if not diagnosis.devices:
        table.add_row("none", "TensorFlow does not run here")
    return table


def _memory_table(memory: MachineMemory) -> Table:
    table = _table("Memory", "Of", "Size", "Free", "Held by")
    for gpu in memory.gpus:
        place = f"GPU:{gpu.index}"
        if gpu.mig_slice:
            place += f" (MIG {gpu.mig_slice})"
        table.add_row(
            place, _size(gpu.total_bytes), _size(gpu.free_bytes), Text(_holders(gpu))
        )
    for limit in memory.limits:
        first = "sets the limit" if limit == memory.limit else ""
        free = None if limit.used_bytes is None else limit.free_bytes
        table.add_row(f"CPU, {limit.source}", _size(limit.bytes), _size(free), first)
    if memory.swap_bytes:
        free = memory.swap_free_bytes
        table.add_row("swap", _size(memory.swap_bytes), _size(free), "")
    return table


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else units.format_bytes(num_bytes)


def _holders(gpu: GpuMemory) -> str:
    """Returns who holds memory of a GPU, and how this process takes it."""
    parts = []
    for holder in gpu.holders:
        name = "this process" if holder.is_own else holder.name or "a process"
        parts.append(f"{name} (pid {holder.pid}) {_size(holder.bytes)}".strip())
    if gpu.limit_bytes is not None:
        parts.append(f"at most {_size(gpu.limit_bytes)} for this process")
    if gpu.growth:
        parts.append("taken as needed (memory growth)")
    return ", ".join(parts) or "nobody to be seen"


def _print_settings(
    diagnosis: Diagnosis, console: Console, *, all_settings: bool
) -> None:
    shown = [s for s in diagnosis.settings if all_settings or s.value is not None]
    if shown:
        console.print(_settings_table(shown))
    num_unset = len(diagnosis.settings) - len(shown)
    if num_unset:
        more = "more are" if shown else "settings that matter are"
        line = f"{num_unset} {more} not set; `tfamp doctor --all` lists them."
        console.print(Padding(Text(line), (0, 0, 1, 0), expand=False))


def _settings_table(settings: Sequence[Setting]) -> Table:
    table = _table("Settings", "Name", "Value", "Effect")
    for setting in settings:
        value = Text("unset", style="dim")
        if setting.value is not None:
            value = Text(setting.value or "''", style="cyan")
        table.add_row(setting.name, value, Text(setting.meaning))
    return table


@contextlib.contextmanager
def _held_back() -> Iterator[list[str]]:
    """Keeps what is written to the error stream, also by C++, out of the tables.

    TensorFlow's first notices heed no log level. On leaving, the list holds the text.
    """
    log: list[str] = []
    try:
        saved = os.dup(2)
    except OSError:
        # There is no error stream.
        yield log
        return
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            if text := file.read().decode(errors="replace").strip():
                log.append(text)
