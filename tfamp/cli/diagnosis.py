"""What `tfamp.doctor` found, as a record, and the tables that show it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from rich import box

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
    """The cluster that a launcher describes."""

    cluster: Cluster  # who takes part
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
        return text_of(self)


def text_of(found: Diagnosis, *, show_all: bool = False) -> str:
    """Returns a diagnosis as text, the problems last, where the eye ends up.

    `show_all` is for settings that are not set, too.
    """
    versions_ = [
        (package, version or "missing", versions.SUPPORTED.get(package, ""))
        for package, version in found.versions.items()
    ]
    parts = [_table("Versions", ("Package", "Found", "Supported"), versions_)]
    devices = [_device(each) for each in found.devices]
    devices = devices or [("none", "TensorFlow does not run here", "", "", "")]
    kinds = ("Kind", "Name", "Memory", "Can do", "Fast in")
    parts.append(_table("Devices", kinds, devices))
    if found.memory is not None:
        names = ("Of", "Size", "Free", "Held by")
        parts.append(_table("Memory", names, _memory(found.memory)))
    if found.cluster is not None:
        title = f"Workers, as {found.cluster.cluster.source} says"
        heads = ("Index", "Address", "Role")
        parts.append(_table(title, heads, _workers(found.cluster)))
        variables = found.cluster.variables.items()
        parts.append("\n".join(f"{k}={v}" for k, v in variables) or "")
    shown = [s for s in found.settings if show_all or s.value is not None]
    if shown:
        rows = [
            (s.name, "unset" if s.value is None else s.value or "''", s.meaning)
            for s in shown
        ]
        parts.append(_table("Settings", ("Name", "Value", "Effect"), rows))
    if unset := len(found.settings) - len(shown):
        parts.append(
            f"{unset} settings are not set; `tfamp doctor --all` lists them.\n"
        )
    if found.recommendation is not None:
        parts.append(f"Recommended policy: {found.recommendation.policy}")
        parts.append(f"  {found.recommendation.reason}\n")
    rows = [(each.severity, each.message, each.remedy) for each in found.findings]
    problems = _table("Problems", ("", "What", "Remedy"), rows)
    parts.append(problems if rows else "No problems found.")
    return console.text_of(*filter(None, parts))


def _table(title: str, names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Any:
    columns: dict[str, Any] = {name: console.FOLD for name in names}
    look = {"box": box.SIMPLE_HEAD, "pad_edge": False}
    return console.table(columns, rows, title=title, **look)


def _device(report: DeviceReport) -> tuple[str, ...]:
    device = report.device
    can = [feature for feature in _TELLING if feature in device.features]
    if device.compute_capability is not None:
        can.append("compute capability {}.{}".format(*device.compute_capability))
    if device.partition:
        can.append("MIG slice")
    fast = ", ".join(report.fast_dtypes) or "float32"
    memory = _size(device.memory_bytes or None)
    return device.kind.upper(), device.name, memory, ", ".join(can), fast


def _memory(memory: MachineMemory) -> Sequence[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for gpu in memory.gpus:
        mig = f" (MIG {gpu.mig_slice})" if gpu.mig_slice else ""
        sizes = (_size(gpu.total_bytes), _size(gpu.free_bytes))
        rows.append((f"GPU:{gpu.index}{mig}", *sizes, _holders(gpu)))
    for limit in memory.limits:
        first = "sets the limit" if limit == memory.limit else ""
        free = None if limit.used_bytes is None else limit.free_bytes
        rows.append((f"CPU, {limit.source}", _size(limit.bytes), _size(free), first))
    return rows


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else units.format_bytes(num_bytes)


def _holders(gpu: GpuMemory) -> str:
    """Returns who holds memory of a GPU."""
    found = []
    for holder in gpu.holders:
        name = "this process" if holder.is_own else holder.name or "a process"
        found.append(f"{name} (pid {holder.pid}) {_size(holder.bytes)}".strip())
    return ", ".join(found) or "nobody to be seen"


def _workers(report: ClusterReport) -> Sequence[tuple[str, ...]]:
    rows = []
    for i, address in enumerate(report.cluster.workers):
        role = ["chief"] * (i == 0) + ["this process"] * (i == report.cluster.index)
        rows.append((str(i), address, ", ".join(role)))
    return rows
