"""What `tfamp.doctor` found, as a record, and the tables that show it."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box

from tfamp.machine import cpus
from tfamp.machine.clusters import Cluster
from tfamp.machine.limits import MachineMemory
from tfamp.machine.speeds import Device, Recommendation
from tfamp.records import console, units, versions
from tfamp.records.findings import Finding
from tfamp.records.record import Record, TableRecord

# Of a CPU's hundred features, those that decide a policy.
_TELLING = (
    *("amx_bf16", "amx_fp16", cpus.BROKEN_AMX),
    *("avx512_bf16", "avx512_fp16", "bf16", "svebf16"),
)


@dataclasses.dataclass(frozen=True)
class DeviceReport(Record):
    """A device and the number formats that it multiplies faster than float32."""

    device: Device
    fast_dtypes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Diagnosis(TableRecord):
    """What `tfamp.doctor` finds; `print` shows it as tables, the problems last."""

    versions: dict[str, str | None]  # of packages, None if one is missing
    devices: tuple[DeviceReport, ...]  # none if TensorFlow does not run
    settings: dict[str, str | None]  # switches of TensorFlow, Keras and tfamp
    recommendation: Recommendation | None  # None if there are no devices
    findings: tuple[Finding, ...]  # an "error" breaks something; errors first
    memory: MachineMemory | None = None
    cluster: Cluster | None = None  # that a launcher describes

    @property
    def is_broken(self) -> bool:
        """Whether something does not work, as against could be better."""
        return any(finding.severity == "error" for finding in self.findings)

    def table(self) -> str:
        """Returns tables of at most 110 columns, the problems last, where one looks."""
        packages = [
            (package, version or "missing", versions.SUPPORTED.get(package, ""))
            for package, version in self.versions.items()
        ]
        devices = [_device(each) for each in self.devices]
        devices = devices or [("none", "TensorFlow does not run here", "", "", "")]
        parts = [
            _table("Versions", "Package,Found,Supported", packages),
            _table("Devices", "Kind,Name,Memory,Can do,Fast in", devices),
            _table("Memory", "Of,Size,Free,", [*_memory(self.memory)]),
        ]
        parts += [str(self.cluster)] if self.cluster else []
        settings = [
            (name, value or "''", versions.VARIABLES.get(name, ""))
            for name, value in self.settings.items()
            if value is not None
        ]
        parts.append(_table("Settings", "Name,Value,Effect", settings))
        if self.recommendation is not None:
            parts.append(f"Recommended policy: {self.recommendation.policy}")
            parts.append(f"  {self.recommendation.reason}\n")
        rows = [(each.severity, each.message, each.remedy) for each in self.findings]
        parts.append(_table("Problems", ",What,Remedy", rows) or "No problems found.")
        return console.text_of(*filter(None, parts))


def _table(title: str, names: str, rows: Sequence[tuple[str, ...]]) -> Any:
    if not rows:
        return ""
    columns: dict[str, Any] = {name: console.FOLD for name in names.split(",")}
    look = {"box": box.SIMPLE_HEAD, "pad_edge": False}
    return console.table(columns, rows, title=title, **look)


def _device(report: DeviceReport) -> tuple[str, ...]:
    device = report.device
    can = [feature for feature in _TELLING if feature in device.features]
    if device.compute_capability is not None:
        can.append("compute capability {}.{}".format(*device.compute_capability))
    can += ["MIG slice"] * (" MIG " in device.name)
    fast = ", ".join(report.fast_dtypes) or "float32"
    memory = _size(device.memory_bytes or None)
    return device.kind.upper(), device.name, memory, ", ".join(can), fast


def _memory(memory: MachineMemory | None) -> Iterator[tuple[str, ...]]:
    for gpu in memory.gpus if memory else ():
        mig = f" (MIG {gpu.mig_slice})" if gpu.mig_slice else ""
        sizes = (_size(gpu.memory_total_bytes), _size(gpu.memory_free_bytes))
        yield f"GPU:{gpu.index}{mig}", *sizes, ""
    for limit in memory.limits if memory else ():
        first = "sets the limit" if memory and limit == memory.limit else ""
        free = None if limit.used_bytes is None else limit.free_bytes
        yield f"CPU, {limit.source}", _size(limit.bytes), _size(free), first


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else units.format_bytes(num_bytes)
