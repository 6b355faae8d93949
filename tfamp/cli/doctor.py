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
from typing import Any, TypeVar

from rich.console import Group

import tfamp
from tfamp.cli import _clusters as clusters
from tfamp.cli import _settings as settings_findings
from tfamp.cli._flags import Call, Command, Flag, Outcome
from tfamp.cli.diagnosis import (
    DeviceReport,
    Diagnosis,
    DoctorFinding,
    MeasurementCache,
    Setting,
    parts,
)
from tfamp.machine import network
from tfamp.machine.limits import MachineMemory
from tfamp.machine.speeds import Device
from tfamp.records import checks
from tfamp.records import versions as _versions
from tfamp.records.versions import VARIABLES

T = TypeVar("T")

_AMP = "TF_ENABLE_AUTO_MIXED_PRECISION"
_NVIDIA_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"
_TF32_FROM = (8, 0)


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
    return diagnose(Probes(), clusters.read(others))


def _hardware() -> Any:
    # Imports TensorFlow, so not before a probe asks for it.
    from tfamp.machine import devices as hardware

    return hardware


def _allocators() -> Any:
    from tfamp.machine import memory

    return memory


def _tensorfloat32() -> bool:
    import tensorflow as tf

    return bool(tf.config.experimental.tensor_float_32_execution_enabled())


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
    """The looks at the machine; tests pass their own.

    `devices`, `hardware` and `allocators` import TensorFlow, the last two as modules.
    """

    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    versions: Callable[[], Mapping[str, str | None]] = _versions.installed_versions
    problems: Callable[..., tuple[_versions.Problem, ...]] = _versions.find_problems
    devices: Callable[[], tuple[Device, ...]] = lambda: _hardware().devices()
    hardware: Callable[[], Any] = _hardware
    tensorfloat32: Callable[[], bool] = _tensorfloat32
    nvidia_gpus: Callable[[], int] = _nvidia_gpus
    memory: Callable[..., MachineMemory] = lambda **kwargs: (
        _allocators().machine_memory(**kwargs)
    )
    allocators: Callable[[], Any] = _allocators
    cache: Callable[[], MeasurementCache | None] = MeasurementCache.read
    answers: Callable[[Sequence[str]], dict[str, str]] = network.answers


def diagnose(
    probes: Probes, others: Mapping[str, Diagnosis] = MappingProxyType({})
) -> Diagnosis:
    """Returns what the probes tell, and what is wrong with it, beside other workers."""
    findings: list[DoctorFinding] = []
    versions = {"tfamp": tfamp.__version__, **probes.versions()}
    problems = probes.problems(environ=probes.environ, versions=versions)
    findings += [DoctorFinding("error", each.found, each.remedy) for each in problems]
    devices: tuple[Device, ...] = ()
    tf32: bool | None = None
    if versions.get("tensorflow") is not None:
        devices = _attempt(probes.devices, findings, ())
        tf32 = _attempt(probes.tensorfloat32, findings, None) if devices else None
    hardware = probes.hardware() if devices else None
    onednn = probes.environ.get(settings_findings.ONEDNN, "1").lower() not in (
        "0",
        "false",
    )
    settings = [Setting(k, probes.environ.get(k), v) for k, v in VARIABLES.items()]
    if tf32 is not None:
        meaning = "tf.config: float32 products may round to TF32 on a GPU"
        settings.append(Setting("TF32", "on" if tf32 else "off", meaning))
    findings += settings_findings.of_policy(probes.environ, hardware, devices, onednn)
    findings += _gpu_findings(probes, devices, tf32)
    findings += settings_findings.of_cpu(probes.environ, devices, onednn)
    memory = _memory(probes, devices, findings) if devices else None
    cluster = clusters.look(probes.environ, probes.answers, findings)
    settings += clusters.settings(probes.environ, cluster)
    found = Diagnosis(
        versions=versions,
        devices=tuple(
            DeviceReport(each, hardware.fast_dtypes(each, onednn=onednn))
            for each in devices
            if hardware
        ),
        settings=tuple(settings),
        recommendation=(
            hardware.recommend(devices, onednn=onednn) if hardware else None
        ),
        findings=(),
        memory=memory,
        cache=probes.cache() if devices else None,
        cluster=cluster,
    )
    findings += clusters.differences(found, others)
    # A stable sort: errors first, else in the order they were found.
    findings.sort(key=lambda each: each.severity != "error")
    return dataclasses.replace(found, findings=tuple(findings))


def _memory(
    probes: Probes, devices: tuple[Device, ...], findings: list[DoctorFinding]
) -> MachineMemory | None:
    """Returns the machine's memory, and notes what could be better about it."""
    try:
        memory = probes.memory(environ=probes.environ)
    except Exception as error:  # a driver, or files of the kernel, that answer oddly
        message = f"Memory cannot be read: {checks.first_line(error)}"
        remedy = "The rest of this report is right without it."
        findings.append(DoctorFinding("advice", message, remedy))
        return None
    has_gpu = any(device.kind == "gpu" for device in devices)
    advice = probes.allocators().advice(memory, probes.environ, has_gpu=has_gpu)
    for each in advice:
        findings.append(DoctorFinding("advice", each.message, each.remedy))
    return memory


def _attempt(probe: Callable[[], T], findings: list[DoctorFinding], fallback: T) -> T:
    """Returns the probe's answer, or notes why there is none.

    A half-installed TensorFlow fails in many ways, and the doctor outlives them all.
    """
    try:
        return probe()
    except Exception as error:
        found = DoctorFinding(
            "error",
            "TensorFlow does not run: "
            f"{type(error).__name__}: {checks.first_line(error)}",
            "Install it anew: `pip install --force-reinstall tensorflow`.",
        )
        if found not in findings:
            findings.append(found)
        return fallback


def _gpu_findings(
    probes: Probes, devices: tuple[Device, ...], tf32: bool | None
) -> list[DoctorFinding]:
    """Judges GPUs that TensorFlow misses, and what slows those that it sees."""
    gpus = [device for device in devices if device.kind == "gpu"]
    in_system = probes.nvidia_gpus()
    visible = probes.environ.get("CUDA_VISIBLE_DEVICES")
    findings = []
    if devices and in_system and not gpus:
        found = f"The system has {in_system} NVIDIA GPU(s); TensorFlow sees none"
        if visible is not None and visible.strip() in ("", "-1"):
            why = f"{found}, since CUDA_VISIBLE_DEVICES is {visible!r}."
            findings.append(DoctorFinding("advice", why, "Unset it to use the GPU."))
        else:
            remedy = (
                "Check the driver with `nvidia-smi`, then run "
                "`pip install 'tensorflow[and-cuda]'`."
            )
            findings.append(DoctorFinding("error", f"{found}.", remedy))
    able = [gpu for gpu in gpus if (gpu.compute_capability or (0, 0)) >= _TF32_FROM]
    override = probes.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
    if able and (tf32 is False or override):
        how = "unset NVIDIA_TF32_OVERRIDE" if override else "leave it on"
        message = f"TF32 is off: what stays in float32 is slow on {able[0].name}."
        remedy = f"Unless the digits are needed, {how}."
        findings.append(DoctorFinding("advice", message, remedy))
    if probes.environ.get(_AMP) in ("1", "true"):
        message = f"{_AMP} has TensorFlow rewrite graphs that tfamp has set dtypes in."
        findings.append(DoctorFinding("advice", message, "Unset it."))
    return findings


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


def command(look: Callable[..., Diagnosis] = doctor) -> Command:
    """Returns the command, given what looks at the machine."""

    def work(call: Call) -> Outcome:
        # Whatever a package prints while it is imported must not reach the document.
        with contextlib.redirect_stdout(sys.stderr), _held_back() as log:
            diagnosis = look(others=call.values["others"])
        if diagnosis.is_broken and log:
            print("".join(log), file=sys.stderr)
        shown = Group(*parts(diagnosis, show_all=call.values["all"]))
        return Outcome(diagnosis, shown, is_bad=diagnosis.is_broken)

    return Command(
        "doctor",
        "Shows devices, memory, versions, settings and what was measured of policies, "
        "recommends a policy and says why, and names problems with their remedies. "
        "Ends with status 1 if something is broken.",
        work,
        (
            Flag("all", "bool", False, "Show unset settings and old measurements too."),
            Flag(
                *("others", "list", []),
                "Files of --json of other workers, with commas between: what differs "
                "from here is shown.",
            ),
        ),
    )


COMMANDS = {"doctor": command()}
