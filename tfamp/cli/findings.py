"""What the doctor finds wrong: with settings, CPUs, GPUs, memory and the cluster."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfamp.cli.diagnosis import ClusterReport, DoctorFinding
from tfamp.machine import cpus
from tfamp.machine.clusters import cluster_of
from tfamp.machine.speeds import Device
from tfamp.records import checks
from tfamp.records.formats import POLICIES

_error = functools.partial(DoctorFinding, "error")
_advice = functools.partial(DoctorFinding, "advice")

_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
_AMP = "TF_ENABLE_AUTO_MIXED_PRECISION"
_TF32_FROM = (8, 0)
_NETWORK = re.compile("NCCL_|GRPC_|UCX_|FI_")


def uses_onednn(environ: Mapping[str, str]) -> bool:
    """States whether TensorFlow computes with oneDNN on CPUs."""
    return environ.get(_ONEDNN, "1").lower() not in ("0", "false")


def of_policy(
    environ: Mapping[str, str], devices: tuple[Device, ...]
) -> Iterator[DoctorFinding]:
    """Judges TFAMP_POLICY."""
    policy = environ.get("TFAMP_POLICY", "")
    if policy.endswith(".json"):
        if not Path(policy).is_file():
            message = f"TFAMP_POLICY is {policy!r}, and no such file is there."
            yield _error(message, "Set the file of a plan, or unset it.")
        return
    if policy in ("", "measure"):
        return
    try:
        checks.choice("TFAMP_POLICY", policy, POLICIES)
    except ValueError as error:
        yield _error(str(error), "Set another name, or unset it.")
        return
    if devices:
        from tfamp.machine.devices import objection

        objected = objection(policy, devices, onednn=uses_onednn(environ))
        if objected is not None:
            remedy = "Set TFAMP_POLICY=auto, or unset it."
            yield _advice(f"TFAMP_POLICY: {objected}", remedy)


def of_cpu(
    environ: Mapping[str, str], devices: tuple[Device, ...]
) -> Iterator[DoctorFinding]:
    """Judges what keeps a CPU that trains from its bfloat16 instructions."""
    if any(device.kind != "cpu" for device in devices):
        return
    features = {feature for device in devices for feature in device.features}
    able = sorted(features & {"amx_bf16", "avx512_bf16"})
    cap = environ.get(cpus.ISA_VARIABLE, "ALL").upper()
    is_capped = cap not in ("ALL", "DEFAULT") and "AMX" not in cap
    xla_flags = environ.get("TF_XLA_FLAGS", "")
    if uses_onednn(environ) and cpus.BROKEN_AMX in features and not is_capped:
        yield _error(
            "AMX ends the process, so any bfloat16 product in TensorFlow does.",
            f"Set {cpus.ISA_VARIABLE}={cpus.ISA_WITHOUT_AMX}, or use another machine.",
        )
    elif able and not uses_onednn(environ):
        message = f"oneDNN is off, so {' and '.join(able)} of this CPU go unused."
        yield _advice(message, f"Unset {_ONEDNN}, or set it to 1.")
    elif able:
        if "amx_bf16" in able and is_capped:
            yield _advice(
                f"ONEDNN_MAX_CPU_ISA is {cap!r}, so amx_bf16 of this CPU goes unused "
                "and bfloat16 is slower than float32.",
                "Unset it.",
            )
        if re.search(r"--tf_xla_auto_jit=([12]|fusible)\b", xla_flags) and re.search(
            r"--tf_xla_cpu_global_jit\b(?!=false)", xla_flags
        ):
            yield _advice(
                "TF_XLA_FLAGS compile for the CPU, where bfloat16 then gains nothing.",
                "Drop --tf_xla_cpu_global_jit.",
            )


def of_gpus(
    environ: Mapping[str, str],
    devices: tuple[Device, ...],
    num_in_system: int,
    tf32: bool | None,
) -> Iterator[DoctorFinding]:
    """Judges GPUs that TensorFlow misses, and what slows those that it sees."""
    gpus = [device for device in devices if device.kind == "gpu"]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if devices and num_in_system and not gpus:
        found = f"The system has {num_in_system} NVIDIA GPU(s); TensorFlow sees none"
        if visible is not None and visible.strip() in ("", "-1"):
            why = f"{found}, since CUDA_VISIBLE_DEVICES is {visible!r}."
            yield _advice(why, "Unset it to use the GPU.")
        else:
            yield _error(
                f"{found}.",
                "Check the driver with `nvidia-smi`, then run "
                "`pip install 'tensorflow[and-cuda]'`.",
            )
    able = [gpu for gpu in gpus if (gpu.compute_capability or (0, 0)) >= _TF32_FROM]
    override = environ.get("NVIDIA_TF32_OVERRIDE") == "0"
    if able and (tf32 is False or override):
        how = "unset NVIDIA_TF32_OVERRIDE" if override else "leave it on"
        message = f"TF32 is off: what stays in float32 is slow on {able[0].name}."
        yield _advice(message, f"Unless the digits are needed, {how}.")
    if environ.get(_AMP) in ("1", "true"):
        message = f"{_AMP} has TensorFlow rewrite graphs that tfamp has set dtypes in."
        yield _advice(message, "Unset it.")


def of_kernels(
    devices: tuple[Device, ...], built_for: Sequence[str]
) -> Iterator[DoctorFinding]:
    """Yields the GPUs for which the installed TensorFlow has no kernels ready.

    `built_for` is what `tf.sysconfig.get_build_info` tells: "sm_80" is code for GPUs of
    8.0 to 8.9, "compute_90" a text that the driver compiles for 9.0 and all later
    ones; none is a build without CUDA.

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


def of_cluster(
    environ: Mapping[str, str],
) -> tuple[ClusterReport | None, list[DoctorFinding]]:
    """Returns the cluster, if there is one, and what is wrong with it."""
    try:
        cluster = cluster_of(environ)
    except ValueError as error:
        remedy = "Correct the variable: `tfamp.distribute.cluster` names all it reads."
        return None, [_error(str(error), remedy)]
    if not cluster.workers:
        return None, []
    variables = {k: v for k, v in environ.items() if _NETWORK.match(k)}
    return ClusterReport(cluster, dict(sorted(variables.items()))), []
