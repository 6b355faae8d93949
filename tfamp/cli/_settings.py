"""What the doctor says of settings: of the policy, and of a CPU's instructions."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfamp.cli.diagnosis import DoctorFinding
from tfamp.machine import cpus
from tfamp.machine.speeds import Device
from tfamp.records import checks
from tfamp.records.formats import POLICIES

ONEDNN = "TF_ENABLE_ONEDNN_OPTS"


def of_policy(
    environ: Mapping[str, str],
    hardware: Any,
    devices: tuple[Device, ...],
    onednn: bool,
) -> list[DoctorFinding]:
    """Judges TFAMP_POLICY."""
    policy = environ.get("TFAMP_POLICY")
    if not policy or policy == "measure":
        return []
    if policy.endswith(".json"):
        if Path(policy).is_file():
            return []
        message = f"TFAMP_POLICY is {policy!r}, and no such file is there."
        return [DoctorFinding("error", message, "Set the file of a plan, or unset it.")]
    try:
        checks.choice("TFAMP_POLICY", policy, POLICIES)
    except ValueError as error:
        return [DoctorFinding("error", str(error), "Set another name, or unset it.")]
    if hardware is None:
        return []
    objection = hardware.objection(policy, devices, onednn=onednn)
    if objection is None:
        return []
    remedy = "Set TFAMP_POLICY=auto, or unset it."
    return [DoctorFinding("advice", f"TFAMP_POLICY: {objection}", remedy)]


def of_cpu(
    environ: Mapping[str, str], devices: tuple[Device, ...], onednn: bool
) -> list[DoctorFinding]:
    """Judges what keeps a CPU that trains from its bfloat16 instructions."""
    if any(device.kind != "cpu" for device in devices):
        return []
    features = {feature for device in devices for feature in device.features}
    able = sorted(features & {"amx_bf16", "avx512_bf16"})
    cap = environ.get(cpus.ISA_VARIABLE, "ALL").upper()
    is_capped = cap not in ("ALL", "DEFAULT") and "AMX" not in cap
    if onednn and cpus.BROKEN_AMX in features and not is_capped:
        message = "AMX ends the process, so any bfloat16 product in TensorFlow does."
        remedy = (
            f"Set {cpus.ISA_VARIABLE}={cpus.ISA_WITHOUT_AMX}, or use another machine."
        )
        return [DoctorFinding("error", message, remedy)]
    if not able:
        return []
    if not onednn:
        message = f"oneDNN is off, so {' and '.join(able)} of this CPU go unused."
        return [DoctorFinding("advice", message, f"Unset {ONEDNN}, or set it to 1.")]
    findings = []
    if "amx_bf16" in able and is_capped:
        message = (
            f"ONEDNN_MAX_CPU_ISA is {cap!r}, so amx_bf16 of this CPU goes unused and "
            f"bfloat16 is slower than float32."
        )
        findings.append(DoctorFinding("advice", message, "Unset it."))
    xla_flags = environ.get("TF_XLA_FLAGS", "")
    if re.search(r"--tf_xla_auto_jit=([12]|fusible)\b", xla_flags) and re.search(
        r"--tf_xla_cpu_global_jit\b(?!=false)", xla_flags
    ):
        message = "TF_XLA_FLAGS compile for the CPU, where bfloat16 then gains nothing."
        findings.append(
            DoctorFinding("advice", message, "Drop --tf_xla_cpu_global_jit.")
        )
    return findings
