"""What the doctor finds wrong: with settings, CPUs, GPUs, memory and the cluster."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tfamp.cli.diagnosis import ClusterReport, Diagnosis, DoctorFinding, Setting
from tfamp.machine import cpus, hosts
from tfamp.machine.clusters import alone_in_job, cluster_of
from tfamp.machine.speeds import Device
from tfamp.records import checks
from tfamp.records.formats import POLICIES

_error = functools.partial(DoctorFinding, "error")
_advice = functools.partial(DoctorFinding, "advice")

_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
_AMP = "TF_ENABLE_AUTO_MIXED_PRECISION"
_TF32_FROM = (8, 0)
_NETWORK = re.compile("NCCL_|GRPC_|UCX_|FI_")
# What to look at first where NCCL is slow, or waits without an end.
_NCCL = {
    "NCCL_DEBUG": "WARN has NCCL log its errors, INFO what it chooses too",
    "NCCL_SOCKET_IFNAME": "network devices of NCCL, as in eth0; unset, it chooses",
    "NCCL_IB_DISABLE": "1 leaves InfiniBand unused",
    "NCCL_P2P_DISABLE": "1 leaves copies from GPU to GPU unused",
    "NCCL_SHM_DISABLE": "1 leaves shared memory of one host unused",
}


def uses_onednn(environ: Mapping[str, str]) -> bool:
    """States whether TensorFlow computes with oneDNN on CPUs."""
    return environ.get(_ONEDNN, "1").lower() not in ("0", "false")


def of_policy(
    environ: Mapping[str, str], devices: tuple[Device, ...]
) -> list[DoctorFinding]:
    """Judges TFAMP_POLICY."""
    policy = environ.get("TFAMP_POLICY")
    if not policy or policy == "measure":
        return []
    if policy.endswith(".json"):
        if Path(policy).is_file():
            return []
        message = f"TFAMP_POLICY is {policy!r}, and no such file is there."
        return [_error(message, "Set the file of a plan, or unset it.")]
    try:
        checks.choice("TFAMP_POLICY", policy, POLICIES)
    except ValueError as error:
        return [_error(str(error), "Set another name, or unset it.")]
    if not devices:
        return []
    from tfamp.machine.devices import objection

    objected = objection(policy, devices, onednn=uses_onednn(environ))
    if objected is None:
        return []
    return [_advice(f"TFAMP_POLICY: {objected}", "Set TFAMP_POLICY=auto, or unset it.")]


def of_cpu(
    environ: Mapping[str, str], devices: tuple[Device, ...]
) -> list[DoctorFinding]:
    """Judges what keeps a CPU that trains from its bfloat16 instructions."""
    if any(device.kind != "cpu" for device in devices):
        return []
    features = {feature for device in devices for feature in device.features}
    able = sorted(features & {"amx_bf16", "avx512_bf16"})
    cap = environ.get(cpus.ISA_VARIABLE, "ALL").upper()
    is_capped = cap not in ("ALL", "DEFAULT") and "AMX" not in cap
    onednn = uses_onednn(environ)
    if onednn and cpus.BROKEN_AMX in features and not is_capped:
        message = "AMX ends the process, so any bfloat16 product in TensorFlow does."
        remedy = (
            f"Set {cpus.ISA_VARIABLE}={cpus.ISA_WITHOUT_AMX}, or use another machine."
        )
        return [_error(message, remedy)]
    if not able:
        return []
    if not onednn:
        message = f"oneDNN is off, so {' and '.join(able)} of this CPU go unused."
        return [_advice(message, f"Unset {_ONEDNN}, or set it to 1.")]
    findings = []
    if "amx_bf16" in able and is_capped:
        message = (
            f"ONEDNN_MAX_CPU_ISA is {cap!r}, so amx_bf16 of this CPU goes unused and "
            f"bfloat16 is slower than float32."
        )
        findings.append(_advice(message, "Unset it."))
    xla_flags = environ.get("TF_XLA_FLAGS", "")
    if re.search(r"--tf_xla_auto_jit=([12]|fusible)\b", xla_flags) and re.search(
        r"--tf_xla_cpu_global_jit\b(?!=false)", xla_flags
    ):
        message = "TF_XLA_FLAGS compile for the CPU, where bfloat16 then gains nothing."
        findings.append(_advice(message, "Drop --tf_xla_cpu_global_jit."))
    return findings


def of_gpus(
    environ: Mapping[str, str],
    devices: tuple[Device, ...],
    num_in_system: int,
    tf32: bool | None,
) -> list[DoctorFinding]:
    """Judges GPUs that TensorFlow misses, and what slows those that it sees."""
    gpus = [device for device in devices if device.kind == "gpu"]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    findings = []
    if devices and num_in_system and not gpus:
        found = f"The system has {num_in_system} NVIDIA GPU(s); TensorFlow sees none"
        if visible is not None and visible.strip() in ("", "-1"):
            why = f"{found}, since CUDA_VISIBLE_DEVICES is {visible!r}."
            findings.append(_advice(why, "Unset it to use the GPU."))
        else:
            remedy = (
                "Check the driver with `nvidia-smi`, then run "
                "`pip install 'tensorflow[and-cuda]'`."
            )
            findings.append(_error(f"{found}.", remedy))
    able = [gpu for gpu in gpus if (gpu.compute_capability or (0, 0)) >= _TF32_FROM]
    override = environ.get("NVIDIA_TF32_OVERRIDE") == "0"
    if able and (tf32 is False or override):
        how = "unset NVIDIA_TF32_OVERRIDE" if override else "leave it on"
        message = f"TF32 is off: what stays in float32 is slow on {able[0].name}."
        findings.append(_advice(message, f"Unless the digits are needed, {how}."))
    if environ.get(_AMP) in ("1", "true"):
        message = f"{_AMP} has TensorFlow rewrite graphs that tfamp has set dtypes in."
        findings.append(_advice(message, "Unset it."))
    return findings


def of_kernels(
    devices: tuple[Device, ...], built_for: Sequence[str]
) -> Iterator[DoctorFinding]:
    """Yields the GPUs for which the installed TensorFlow has no kernels ready.

    `built_for` is what `tf.sysconfig.get_build_info` calls
    "cuda_compute_capabilities": "sm_80" is code for GPUs of 8.0 to 8.9, "compute_90"
    a text that the driver compiles for 9.0 and all later ones; none is a build
    without CUDA.

    Source: NVIDIA, CUDA C++ Programming Guide, "Binary Compatibility" and "PTX
    Compatibility"; for RTX 50 tensorflow#89272.
    """
    targets = [
        (found[1], (int(found[2]), int(found[3])))
        for each in built_for
        if (found := re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", each))
    ]
    if not targets:
        return
    known = f"which this TensorFlow was not built for ({', '.join(built_for)})"
    for device in dict.fromkeys(devices):
        own = device.compute_capability
        if device.kind != "gpu" or own is None:
            continue
        has_code = any(
            target == own
            or (kind == "sm" and target[0] == own[0] and target[1] <= own[1])
            for kind, target in targets
        )
        if has_code:
            continue
        what = f"{device.name} has compute capability {own[0]}.{own[1]}, {known}"
        if any(kind == "compute" and target < own for kind, target in targets):
            yield _advice(
                f"{what}: the driver compiles every kernel at the first step, which "
                "takes up to half an hour, and XLA may fail.",
                "Set CUDA_CACHE_MAXSIZE=4294967296, so that it compiles once only, or "
                "take a build for this GPU, such as `pip install "
                "'tf-nightly[and-cuda]'`.",
            )
        else:
            yield _error(
                f"{what}, so no kernel runs on it.",
                "Install a TensorFlow that was built for it, or hide it by "
                "CUDA_VISIBLE_DEVICES.",
            )


def of_cluster(
    environ: Mapping[str, str], ask: Callable[[Sequence[str]], dict[str, str]]
) -> tuple[ClusterReport | None, list[DoctorFinding]]:
    """Returns the cluster, if there is one, and what is wrong with it.

    `ask` takes addresses, and gives for each what came of a connection to it.
    """
    try:
        cluster = cluster_of(environ)
    except ValueError as error:
        remedy = "Correct the variable: `tfamp.distribute.cluster` names all it reads."
        return None, [_error(str(error), remedy)]
    if not cluster.workers:
        alone = alone_in_job(environ)
        if alone is None:
            return None, []
        fact, _, remedy = alone.partition(". ")
        return None, [_advice(f"{fact}.", remedy)]
    others = [each for each in cluster.workers if each != cluster.address]
    answers = ask(others)
    findings = []
    for answer, remedy in hosts.REMEDIES.items():
        silent = [each for each in others if answers.get(each) == answer]
        if silent:
            more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
            message = f"Worker {silent[0]}{more} cannot be reached: {answer}."
            findings.append(_advice(message, remedy))
    variables = {k: v for k, v in environ.items() if _NETWORK.match(k)}
    return ClusterReport(cluster, answers, dict(sorted(variables.items()))), findings


def cluster_settings(environ: Mapping[str, str]) -> list[Setting]:
    """Returns the variables of NCCL that decide how workers exchange gradients."""
    return [Setting(name, environ.get(name), what) for name, what in _NCCL.items()]


def differences(
    own: Diagnosis, others: Mapping[str, Diagnosis]
) -> Iterator[DoctorFinding]:
    """Yields what differs between this worker and others, by file, and should not."""
    for path, other in others.items():
        for package in {**own.versions, **other.versions}:
            here, there = own.versions.get(package), other.versions.get(package)
            if here != there:
                yield _error(
                    f"{package} is {here or 'missing'} here and {there or 'missing'} "
                    f"in {path}.",
                    "Install one version on all: others round otherwise, or do not "
                    "understand each other's messages.",
                )
        yield from _differences_of_clusters(own.cluster, other.cluster, path)
        values = {each.name: each.value for each in other.settings}
        for setting in own.settings:
            value = values.get(setting.name)
            if setting.name in values and value != setting.value:
                yield _advice(
                    f"{setting.name} is {_setting_text(setting.value)} here and "
                    f"{_setting_text(value)} in {path}.",
                    "Set the same on all, where their machines are the same.",
                )
        kinds = [sorted({e.device.name for e in d.devices}) for d in (own, other)]
        if kinds[0] != kinds[1]:
            yield _advice(
                f"Devices are {', '.join(kinds[0])} here and {', '.join(kinds[1])} in "
                f"{path}.",
                "Each step takes as long as on the slowest: use machines alike.",
            )


def _differences_of_clusters(
    own: ClusterReport | None, other: ClusterReport | None, path: str
) -> Iterator[DoctorFinding]:
    """Yields where two workers know of other workers, or are the same one."""
    here = own.cluster.workers if own else ()
    there = other.cluster.workers if other else ()
    if here != there:
        yield _error(
            f"Workers are {', '.join(here) or 'none'} here and "
            f"{', '.join(there) or 'none'} in {path}.",
            "Give all the same list, in one order: else each waits for others.",
        )
    elif own and other and own.cluster.index == other.cluster.index:
        yield _error(
            f"This is worker {own.cluster.index}, and so is that of {path}.",
            "Give each worker its own index, and ask the doctor again on each.",
        )


def _setting_text(value: str | None) -> str:
    return "unset" if value is None else repr(value)
