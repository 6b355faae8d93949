"""What the doctor finds wrong: with settings, CPUs, GPUs and the cluster."""

import functools
from collections.abc import Iterator, Mapping

from tfamp.cli.diagnosis import DoctorFinding
from tfamp.machine import cpus
from tfamp.machine.speeds import Device

_error = functools.partial(DoctorFinding, "error")
_advice = functools.partial(DoctorFinding, "advice")

_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
_AMP = "TF_ENABLE_AUTO_MIXED_PRECISION"


def uses_onednn(environ: Mapping[str, str]) -> bool:
    """States whether TensorFlow computes with oneDNN on CPUs."""
    return environ.get(_ONEDNN, "1").lower() not in ("0", "false")


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
    if uses_onednn(environ) and cpus.BROKEN_AMX in features and not is_capped:
        yield _error(
            "AMX ends the process, so any bfloat16 product in TensorFlow does.",
            f"Set {cpus.ISA_VARIABLE}={cpus.ISA_WITHOUT_AMX}, or use another machine.",
        )
    elif able and not uses_onednn(environ):
        message = f"oneDNN is off, so {' and '.join(able)} of this CPU go unused."
        yield _advice(message, f"Unset {_ONEDNN}, or set it to 1.")
    elif "amx_bf16" in able and is_capped:
        message = (
            f"{cpus.ISA_VARIABLE} is {cap!r}, so amx_bf16 of this CPU goes unused "
        )
        yield _advice(f"{message}and bfloat16 is slower than float32.", "Unset it.")


def of_gpus(
    environ: Mapping[str, str], devices: tuple[Device, ...], num_in_system: int
) -> Iterator[DoctorFinding]:
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
