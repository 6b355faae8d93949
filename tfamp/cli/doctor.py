"""`tfamp doctor`: what is here and what is wrong with it, however broken it is.

Every look at the machine goes through a `Probes`, so that a test may describe one, and
each look may fail without taking the others along.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import tfamp
from tfamp.cli.diagnosis import DeviceReport, Diagnosis
from tfamp.cli.shown import held_back, show
from tfamp.machine import cpus
from tfamp.machine.clusters import Cluster, cluster_of
from tfamp.machine.limits import MachineMemory
from tfamp.machine.speeds import Device
from tfamp.records import checks
from tfamp.records import versions as _versions
from tfamp.records.findings import Finding

_error = functools.partial(Finding, "doctor", "error")
_advice = functools.partial(Finding, "doctor", "warning")

_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
_AMP = "TF_ENABLE_AUTO_MIXED_PRECISION"
_NVIDIA_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"


def doctor() -> Diagnosis:
    """Looks at this machine and this environment, and tells what is wrong with them.

    It runs where nothing else of tfamp does: without TensorFlow, with a Keras of
    another backend, with a broken driver. `tfamp doctor` prints the same tables.

    Example:
        >>> doctor().devices[0].device.kind in ("cpu", "gpu")
        True
    """
    return diagnose(Probes())


def _devices() -> tuple[Device, ...]:
    from tfamp.machine.devices import devices

    return devices()


def _memory(environ: Mapping[str, str]) -> MachineMemory:
    from tfamp.machine.memory import machine_memory

    return machine_memory(environ=environ)


def _nvidia_gpus(pci: Path = Path("/sys/bus/pci/devices")) -> int:
    """Returns how many NVIDIA GPUs the system has, by Linux's list of PCI devices."""
    count = 0
    for device in pci.glob("*"):
        with contextlib.suppress(OSError):
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
            count += vendor == _NVIDIA_VENDOR and kind.startswith(_DISPLAY_CLASS)
    return count


def _built_for() -> tuple[str, ...]:
    import tensorflow as tf

    return tuple(tf.sysconfig.get_build_info().get("cuda_compute_capabilities", ()))


@dataclasses.dataclass(frozen=True)
class Probes:
    """The looks at the machine; tests pass their own. Three import TensorFlow."""

    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    versions: Callable[[], Mapping[str, str | None]] = _versions.installed_versions
    problems: Callable[..., tuple[_versions.Problem, ...]] = _versions.find_problems
    devices: Callable[[], tuple[Device, ...]] = _devices
    nvidia_gpus: Callable[[], int] = _nvidia_gpus
    built_for: Callable[[], Sequence[str]] = _built_for
    memory: Callable[[Mapping[str, str]], MachineMemory] = _memory


def diagnose(probes: Probes) -> Diagnosis:
    """Returns what the probes tell, and what is wrong with it."""
    environ = probes.environ
    found: list[Finding] = []
    versions = {"tfamp": tfamp.__version__, **probes.versions()}
    problems = probes.problems(environ=environ, versions=versions)
    found += [_error(each.found, each.remedy) for each in problems]
    if fault := _versions.keras_fault(versions.get("keras")):
        found.append(_advice(*fault))

    devices: tuple[Device, ...] = ()
    if versions.get("tensorflow") is not None:
        try:
            devices = probes.devices()
        except Exception as error:  # a half-installed TensorFlow, a driver that fails
            text = f"TensorFlow does not run: {checks.kind_and_line(error)}"
            remedy = "Install it anew: `pip install --force-reinstall tensorflow`."
            found.append(_error(text, remedy))
    reports: tuple[DeviceReport, ...] = ()
    recommendation = memory = None
    if devices:
        # Imports TensorFlow, which is there, as it told of devices.
        from tfamp.machine.devices import fast_dtypes, recommend
        from tfamp.machine.memory import advice

        onednn = _uses_onednn(environ)
        reports = tuple(
            DeviceReport(each, fast_dtypes(each, onednn=onednn)) for each in devices
        )
        recommendation = recommend(devices, onednn=onednn)
        found += _of_gpus(environ, devices, probes.nvidia_gpus())
        found += _of_kernels(devices, probes.built_for())
        found += _of_cpu(environ, devices)
        try:
            memory = probes.memory(environ)
            found += [_advice(*each) for each in advice(memory)]
        except Exception as error:
            text = f"Memory cannot be read: {checks.first_line(error)}"
            found.append(_advice(text, "The rest of this report is right without it."))
    cluster: Cluster | None = None
    try:
        cluster = cluster_of(environ)
    except ValueError as error:
        remedy = "Correct the variable: `tfamp.distribute.cluster` names all it reads."
        found.append(_error(str(error), remedy))
    # A stable sort: errors first, else in the order they were found.
    found.sort(key=lambda each: each.severity != "error")
    return Diagnosis(
        versions=versions,
        devices=reports,
        settings={name: environ.get(name) for name in _versions.VARIABLES},
        recommendation=recommendation,
        findings=tuple(found),
        memory=memory,
        cluster=cluster if cluster and cluster.workers else None,
    )


def _uses_onednn(environ: Mapping[str, str]) -> bool:
    """States whether TensorFlow computes with oneDNN on CPUs."""
    return environ.get(_ONEDNN, "1").lower() not in ("0", "false")


def _of_cpu(
    environ: Mapping[str, str], devices: tuple[Device, ...]
) -> Iterator[Finding]:
    """Judges what keeps a CPU that trains from its bfloat16 instructions."""
    if any(device.kind != "cpu" for device in devices):
        return
    features = {feature for device in devices for feature in device.features}
    able = sorted(features & {"amx_bf16", "avx512_bf16"})
    cap = environ.get(cpus.ISA_VARIABLE, "ALL").upper()
    is_capped = cap not in ("ALL", "DEFAULT") and "AMX" not in cap
    if _uses_onednn(environ) and cpus.BROKEN_AMX in features and not is_capped:
        yield _error(
            "AMX ends the process, so any bfloat16 product in TensorFlow does.",
            f"Set {cpus.ISA_VARIABLE}={cpus.ISA_WITHOUT_AMX}, or use another machine.",
        )
    elif able and not _uses_onednn(environ):
        message = f"oneDNN is off, so {' and '.join(able)} of this CPU go unused."
        yield _advice(message, f"Unset {_ONEDNN}, or set it to 1.")
    elif "amx_bf16" in able and is_capped:
        message = (
            f"{cpus.ISA_VARIABLE} is {cap!r}, so amx_bf16 of this CPU goes unused "
        )
        yield _advice(f"{message}and bfloat16 is slower than float32.", "Unset it.")


def _of_gpus(
    environ: Mapping[str, str], devices: tuple[Device, ...], num_in_system: int
) -> Iterator[Finding]:
    """Judges GPUs that TensorFlow misses, and what slows those that it sees."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if num_in_system and not any(device.kind == "gpu" for device in devices):
        found = f"The system has {num_in_system} NVIDIA GPU(s); TensorFlow sees none"
        remedy = "Check the driver with `nvidia-smi`, then run "
        remedy += "`pip install 'tensorflow[and-cuda]'`."
        if visible is not None and visible.strip() in ("", "-1"):
            why = f"{found}, since CUDA_VISIBLE_DEVICES is {visible!r}."
            yield _advice(why, "Unset it to use the GPU.")
        else:
            yield _error(f"{found}.", remedy)
    if environ.get(_AMP) in ("1", "true"):
        message = f"{_AMP} has TensorFlow rewrite graphs that tfamp has set dtypes in."
        yield _advice(message, "Unset it.")


def _of_kernels(
    devices: tuple[Device, ...], built_for: Sequence[str]
) -> Iterator[Finding]:
    """Yields the GPUs for which the installed TensorFlow has no kernels ready.

    `built_for` is what `tf.sysconfig.get_build_info` tells: "sm_80" is code for GPUs of
    8.0 to 8.9, "compute_90" a text that the driver compiles for 9.0 and all later ones.

    Source: NVIDIA, CUDA C++ Programming Guide, "Binary Compatibility" and "PTX
    Compatibility"; for RTX 50 tensorflow#89272.
    """
    targets = [
        (found[1], (int(found[2]), int(found[3])))
        for each in built_for
        if (found := re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", each))
    ]
    for device in dict.fromkeys(devices):
        own = device.compute_capability
        if not targets or device.kind != "gpu" or own is None:
            continue
        if any(
            target == own
            or (kind == "sm" and target[0] == own[0] and target[1] <= own[1])
            for kind, target in targets
        ):
            continue
        what = (
            f"{device.name} has compute capability {own[0]}.{own[1]}, which this "
            f"TensorFlow was not built for ({', '.join(built_for)})"
        )
        if any(kind == "compute" and target < own for kind, target in targets):
            yield _advice(
                f"{what}: the driver compiles every kernel at the first step, which "
                "takes up to half an hour, and XLA may fail.",
                "Set CUDA_CACHE_MAXSIZE=4294967296, so that it compiles once only, or "
                "take a build for this GPU: `pip install 'tf-nightly[and-cuda]'`.",
            )
        else:
            yield _error(
                f"{what}, so no kernel runs on it.",
                "Install a TensorFlow that was built for it, or hide it by "
                "CUDA_VISIBLE_DEVICES.",
            )


def main(read: argparse.Namespace) -> int:
    """Prints the diagnosis; 1 if something is broken."""
    # Whatever a package prints while it is imported must not reach the document.
    with contextlib.redirect_stdout(sys.stderr), held_back() as log:
        diagnosis = doctor()
    if diagnosis.is_broken and log:
        print("".join(log), file=sys.stderr)
    show(read, diagnosis)
    return int(diagnosis.is_broken)
