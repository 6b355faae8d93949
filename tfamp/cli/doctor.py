"""`tfamp doctor`: what is here and what is wrong with it, however broken it is.

Every look at the machine goes through a `Probes`, so that tests describe a machine
instead of having it, and each look may fail without taking the others along.
"""

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from rich.console import Group

import tfamp
from tfamp.cli import findings
from tfamp.cli.command import Call, Command, Flag, Outcome
from tfamp.cli.diagnosis import (
    DeviceReport,
    Diagnosis,
    DoctorFinding,
    Setting,
    parts,
)
from tfamp.machine import hosts
from tfamp.machine.limits import MachineMemory
from tfamp.machine.speeds import Device
from tfamp.records import checks
from tfamp.records import versions as _versions
from tfamp.records.versions import VARIABLES

T = TypeVar("T")

_NVIDIA_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"


def doctor(*, others: Sequence[str | os.PathLike[str]] = ()) -> Diagnosis:
    """Looks at this machine and this environment, and tells what is wrong with them.

    It runs where nothing else of tfamp does: without TensorFlow, with a Keras of
    another backend, with a broken driver. `tfamp doctor` does the same.

    Args:
        others: Files that `tfamp doctor --json=FILE` wrote on the other workers of a
            cluster. What differs from here is a finding: versions, the list of
            workers, settings, devices.

    Returns:
        The `Diagnosis`: `.devices`, `.memory`, `.versions`, `.settings`, the
        `.recommendation` of a policy, `.findings`, `.is_broken`, `.to_json(path)`;
        `print` it for tables.

    Raises:
        FileNotFoundError: One of `others` is missing.
        ValueError: It holds something else.

    Example:
        >>> doctor().devices[0].device.kind in ("cpu", "gpu")
        True
    """
    return diagnose(
        Probes(), {os.fspath(each): Diagnosis.from_json(each) for each in others}
    )


def _devices() -> tuple[Device, ...]:
    from tfamp.machine.devices import devices

    return devices()


def _tensorfloat32() -> bool:
    import tensorflow as tf

    return bool(tf.config.experimental.tensor_float_32_execution_enabled())


def _built_for() -> tuple[str, ...]:
    import tensorflow as tf

    return tuple(tf.sysconfig.get_build_info().get("cuda_compute_capabilities", ()))


def _memory(environ: Mapping[str, str]) -> MachineMemory:
    from tfamp.machine.memory import machine_memory

    return machine_memory(environ=environ)


def _nvidia_gpus(pci: Path = Path("/sys/bus/pci/devices")) -> int:
    """Returns how many NVIDIA GPUs the system has, by Linux's list of PCI devices."""
    count = 0
    for device in pci.glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == _NVIDIA_VENDOR and kind.startswith(_DISPLAY_CLASS)
    return count


@dataclasses.dataclass(frozen=True)
class Probes:
    """The looks at the machine; tests pass their own. Four import TensorFlow."""

    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    versions: Callable[[], Mapping[str, str | None]] = _versions.installed_versions
    problems: Callable[..., tuple[_versions.Problem, ...]] = _versions.find_problems
    devices: Callable[[], tuple[Device, ...]] = _devices
    tensorfloat32: Callable[[], bool] = _tensorfloat32
    nvidia_gpus: Callable[[], int] = _nvidia_gpus
    built_for: Callable[[], Sequence[str]] = _built_for
    memory: Callable[[Mapping[str, str]], MachineMemory] = _memory
    answers: Callable[[Sequence[str]], dict[str, str]] = hosts.answers


def diagnose(
    probes: Probes, others: Mapping[str, Diagnosis] = MappingProxyType({})
) -> Diagnosis:
    """Returns what the probes tell, and what is wrong with it, beside other workers."""
    environ = probes.environ
    found: list[DoctorFinding] = []
    versions = {"tfamp": tfamp.__version__, **probes.versions()}
    problems = probes.problems(environ=environ, versions=versions)
    found += [DoctorFinding("error", each.found, each.remedy) for each in problems]
    if fault := _versions.keras_fault(versions.get("keras")):
        found.append(DoctorFinding("advice", *fault))
    devices: tuple[Device, ...] = ()
    tf32: bool | None = None
    if versions.get("tensorflow") is not None:
        devices = _attempt(probes.devices, found, ())
        tf32 = _attempt(probes.tensorfloat32, found, None) if devices else None
    settings = [Setting(k, environ.get(k), v) for k, v in VARIABLES.items()]
    if tf32 is not None:
        meaning = "tf.config: float32 products may round to TF32 on a GPU"
        settings.append(Setting("TF32", "on" if tf32 else "off", meaning))
    found += findings.of_policy(environ, devices)
    found += findings.of_gpus(environ, devices, probes.nvidia_gpus(), tf32)
    if any(device.kind == "gpu" for device in devices):
        found += findings.of_kernels(devices, _attempt(probes.built_for, found, ()))
    found += findings.of_cpu(environ, devices)
    reports: tuple[DeviceReport, ...] = ()
    recommendation = memory = None
    if devices:
        # Imports TensorFlow, which is there, as it told of devices.
        from tfamp.machine.devices import fast_dtypes, recommend

        onednn = findings.uses_onednn(environ)
        reports = tuple(
            DeviceReport(each, fast_dtypes(each, onednn=onednn)) for each in devices
        )
        recommendation = recommend(devices, onednn=onednn)
        memory = _judged_memory(probes, devices, found)
    cluster, of_cluster = findings.of_cluster(environ, probes.answers)
    found += of_cluster
    settings += findings.cluster_settings(environ) if cluster is not None else []
    diagnosis = Diagnosis(
        versions=versions,
        devices=reports,
        settings=tuple(settings),
        recommendation=recommendation,
        findings=(),
        memory=memory,
        cluster=cluster,
    )
    found += findings.differences(diagnosis, others)
    # A stable sort: errors first, else in the order they were found.
    found.sort(key=lambda each: each.severity != "error")
    return dataclasses.replace(diagnosis, findings=tuple(found))


def _judged_memory(
    probes: Probes, devices: tuple[Device, ...], found: list[DoctorFinding]
) -> MachineMemory | None:
    """Returns the machine's memory, and notes what could be better about it."""
    from tfamp.machine.memory import advice

    try:
        memory = probes.memory(probes.environ)
    except Exception as error:  # a driver, or files of the kernel, that answer oddly
        message = f"Memory cannot be read: {checks.first_line(error)}"
        remedy = "The rest of this report is right without it."
        found.append(DoctorFinding("advice", message, remedy))
        return None
    has_gpu = any(device.kind == "gpu" for device in devices)
    for each in advice(memory, probes.environ, has_gpu=has_gpu):
        found.append(DoctorFinding("advice", each.message, each.remedy))
    return memory


def _attempt(probe: Callable[[], T], found: list[DoctorFinding], fallback: T) -> T:
    """Returns the probe's answer, or notes why there is none.

    A half-installed TensorFlow fails in many ways, and the doctor outlives them all.
    """
    try:
        return probe()
    except Exception as error:
        finding = DoctorFinding(
            "error",
            "TensorFlow does not run: "
            f"{type(error).__name__}: {checks.first_line(error)}",
            "Install it anew: `pip install --force-reinstall tensorflow`.",
        )
        if finding not in found:
            found.append(finding)
        return fallback


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


def _doctor(call: Call) -> Outcome:
    # Whatever a package prints while it is imported must not reach the document.
    with contextlib.redirect_stdout(sys.stderr), _held_back() as log:
        diagnosis = doctor(others=call.values["others"])
    if diagnosis.is_broken and log:
        print("".join(log), file=sys.stderr)
    shown = Group(*parts(diagnosis, show_all=call.values["all"]))
    return Outcome(diagnosis, shown, is_bad=diagnosis.is_broken)


COMMANDS = {
    "doctor": Command(
        "doctor",
        "tfamp.doctor",
        _doctor,
        (
            Flag("all", "bool", False, "Show unset settings and old measurements too."),
            Flag(
                *("others", "list", []),
                "Files of --json of other workers, with commas between: what differs "
                "from here is shown.",
            ),
        ),
        purpose="Shows devices, memory, versions, settings and what was measured of "
        "policies, recommends a policy and says why, and names problems with their "
        "remedies.",
        more="Ends with status 1 if something is broken.",
    )
}
