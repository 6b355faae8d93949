"""What `tfamp.doctor` found, as a record, and the tables that show it."""

import dataclasses
from typing import Any, Literal

from rich import box
from rich.padding import Padding
from rich.text import Text

from tfamp.machine import cpus
from tfamp.machine.clusters import Cluster
from tfamp.machine.limits import GpuMemory, MachineMemory
from tfamp.machine.speeds import Device, Recommendation
from tfamp.records import console, units, versions
from tfamp.records.record import Record, TableRecord

# Of a CPU's hundred features, those that decide a policy.
_TELLING = (
    *("amx_bf16", "amx_fp16", cpus.BROKEN_AMX),
    *("avx512_bf16", "avx512_fp16", "bf16", "svebf16"),
)


@dataclasses.dataclass(frozen=True)
class Setting(Record):
    """A switch of TensorFlow, Keras or tfamp: its value, None if unset, its effect."""

    name: str
    value: str | None
    meaning: str


@dataclasses.dataclass(frozen=True)
class DeviceReport(Record):
    """A device and the number formats that it multiplies faster than float32."""

    device: Device
    fast_dtypes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DoctorFinding(Record):
    """A problem and what to do about it; only an "error" breaks something."""

    severity: Literal["error", "advice"]
    message: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class ClusterReport(Record):
    """The cluster that a launcher describes, and what can be seen of it from here."""

    cluster: Cluster  # who takes part
    answers: dict[str, str]  # address of a worker -> what came of a connection to it
    variables: dict[str, str]  # variables of NCCL and gRPC that are set


@dataclasses.dataclass(frozen=True)
class Diagnosis(TableRecord):
    """What `tfamp.doctor` finds; `print` shows it as tables, the problems last.

    Args:
        versions: Package -> version, None if it is missing.
        devices: The devices of TensorFlow; none if it does not run.
        settings: The environment variables and switches that matter.
        recommendation: The policy that suits; None if there are no devices.
        findings: Problems, errors first.
        memory: What there is, and who holds it; None if TensorFlow does not run.
        cluster: The workers that train together; None where there is no cluster, or a
            finding says what is wrong with it.
    """

    versions: dict[str, str | None]
    devices: tuple[DeviceReport, ...]
    settings: tuple[Setting, ...]
    recommendation: Recommendation | None
    findings: tuple[DoctorFinding, ...]
    memory: MachineMemory | None = None
    cluster: ClusterReport | None = None

    @property
    def is_broken(self) -> bool:
        """Whether something does not work, as against could be better."""
        return any(finding.severity == "error" for finding in self.findings)

    def table(self) -> str:
        """Returns tables of at most 110 columns, and which settings are set."""
        return console.text_of(*parts(self))


def parts(diagnosis: Diagnosis, *, show_all: bool = False) -> list[Any]:
    """Returns a diagnosis for rich, the problems last, where the eye ends up.

    `show_all` is for settings that are not set, too.
    """
    found = [_versions_table(diagnosis), _devices_table(diagnosis)]
    if diagnosis.memory is not None:
        found.append(_memory_table(diagnosis.memory))
    if diagnosis.cluster is not None:
        found += _cluster_table(diagnosis.cluster)
    found += _settings(diagnosis, show_all=show_all)
    if diagnosis.recommendation is not None:
        line = Text("Recommended policy: ", style="bold")
        line.append(diagnosis.recommendation.policy, style="bold green")
        reason = Text(diagnosis.recommendation.reason)
        found += [line, Padding(reason, (0, 0, 1, 2), expand=False)]
    if not diagnosis.findings:
        return [*found, Text("No problems found.", style="green")]
    rows = []
    for each in diagnosis.findings:
        style = "bold red" if each.severity == "error" else "yellow"
        rows.append((Text(each.severity, style=style), each.message, each.remedy))
    return [*found, _table("Problems", ("", "What", "Remedy"), rows)]


def _table(title: str, names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Any:
    columns: dict[str, Any] = {name: console.FOLD for name in names}
    # Names of variables are long, and may break.
    columns[names[0]] = console.FOLD | {"no_wrap": title != "Settings"}
    look = {"box": box.SIMPLE_HEAD, "pad_edge": False, "title_style": "bold"}
    return console.table(columns, rows, title=title, **look)


def _versions_table(diagnosis: Diagnosis) -> Any:
    missing = Text("missing", style="bold red")
    rows = [
        (package, version or missing, versions.SUPPORTED.get(package, ""))
        for package, version in diagnosis.versions.items()
    ]
    return _table("Versions", ("Package", "Found", "Supported"), rows)


def _devices_table(diagnosis: Diagnosis) -> Any:
    rows: list[tuple[str, ...]] = []
    for report in diagnosis.devices:
        device = report.device
        can = [feature for feature in _TELLING if feature in device.features]
        if device.compute_capability is not None:
            major, minor = device.compute_capability
            can.append(f"compute capability {major}.{minor}")
        if device.partition:
            can.append("MIG slice")
        memory = device.memory_bytes
        fast = ", ".join(report.fast_dtypes) or "float32"
        row = (device.kind.upper(), device.name, _size(memory or None))
        rows.append((*row, ", ".join(can), fast))
    if not rows:
        rows.append(("none", "TensorFlow does not run here"))
    return _table("Devices", ("Kind", "Name", "Memory", "Can do", "Fast in"), rows)


def _memory_table(memory: MachineMemory) -> Any:
    rows = []
    for gpu in memory.gpus:
        mig = f" (MIG {gpu.mig_slice})" if gpu.mig_slice else ""
        sizes = (_size(gpu.total_bytes), _size(gpu.free_bytes))
        rows.append((f"GPU:{gpu.index}{mig}", *sizes, _holders(gpu)))
    for limit in memory.limits:
        first = "sets the limit" if limit == memory.limit else ""
        free = None if limit.used_bytes is None else limit.free_bytes
        rows.append((f"CPU, {limit.source}", _size(limit.bytes), _size(free), first))
    return _table("Memory", ("Of", "Size", "Free", "Held by"), rows)


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else units.format_bytes(num_bytes)


def _holders(gpu: GpuMemory) -> str:
    """Returns who holds memory of a GPU."""
    found = []
    for holder in gpu.holders:
        name = "this process" if holder.is_own else holder.name or "a process"
        found.append(f"{name} (pid {holder.pid}) {_size(holder.bytes)}".strip())
    return ", ".join(found) or "nobody to be seen"


def _cluster_table(report: ClusterReport) -> list[Any]:
    """Returns the table of workers, and a line on what is set for them."""
    cluster = report.cluster
    rows = []
    for i, address in enumerate(cluster.workers):
        role = ["chief"] * (i == 0) + ["this process"] * (i == cluster.index)
        answer = report.answers.get(address, "not asked")
        rows.append((str(i), address, ", ".join(role), answer))
    title = f"Workers, as {cluster.source} says"
    table = _table(title, ("Index", "Address", "Role", "Port"), rows)
    shown = ", ".join(f"{k}={v}" for k, v in report.variables.items())
    line = shown or "No variables of NCCL or gRPC are set."
    line += " `tfamp doctor --all` lists those of NCCL to look at first."
    return [table, Padding(Text(line), (0, 0, 1, 0), expand=False)]


def _settings(diagnosis: Diagnosis, *, show_all: bool) -> list[Any]:
    """Returns the table of what is set, and a line on what is not."""
    found: list[Any] = []
    shown = [s for s in diagnosis.settings if show_all or s.value is not None]
    if shown:
        rows = []
        for setting in shown:
            value = Text("unset", style="dim")
            if setting.value is not None:
                value = Text(setting.value or "''", style="cyan")
            rows.append((setting.name, value, setting.meaning))
        found.append(_table("Settings", ("Name", "Value", "Effect"), rows))
    num_unset = len(diagnosis.settings) - len(shown)
    if num_unset:
        more = "more are" if shown else "settings that matter are"
        line = f"{num_unset} {more} not set; `tfamp doctor --all` lists them."
        found.append(Padding(Text(line), (0, 0, 1, 0), expand=False))
    return found
