"""The devices here, what each computes fast, and the policy that suits them."""

import functools
from collections.abc import Sequence
from typing import Any

import archspec.cpu
import tensorflow as tf

from tfamp.machine.cpus import BROKEN_AMX, instruction_sets, is_amx_broken
from tfamp.machine.limits import system_bytes
from tfamp.machine.memory import details_of
from tfamp.machine.speeds import Device, Recommendation, Speed, speed
from tfamp.records import formats

# Best first: bfloat16 has float32's range and needs no loss scale.
MIXED_POLICIES = ("mixed_bfloat16", "mixed_float16")


def recommend(
    devices: Sequence[Device], *, onednn: bool | None = None
) -> Recommendation:
    """Returns the policy that trains fastest on all these devices."""
    computing = computing_of(devices)
    if not computing:
        return Recommendation("float32", "TensorFlow sees no device.")
    bfloat16, float16 = (_slowest(p, computing, onednn) for p in MIXED_POLICIES)
    if bfloat16.is_fast:
        policy, told = MIXED_POLICIES[0], bfloat16
    elif float16.is_fast:
        # Told by the device that stands against the better policy.
        others = [d for d in computing if not speed("bfloat16", d, onednn=onednn)[0]]
        policy, told = MIXED_POLICIES[1], speed("float16", others[0], onednn=onednn)
    else:
        # Float16 comes with the first tensor cores; a CPU can only do bfloat16.
        policy, told = "float32", bfloat16 if computing[0].kind == "cpu" else float16
    reason = told.why
    if len({device.name for device in computing}) > 1:
        reason += f", and the policy has to suit all {len(computing)} devices"
    return Recommendation(policy, f"{reason}.")


def objection(
    policy: str, devices: Sequence[Device], *, onednn: bool | None = None
) -> str | None:
    """Returns why a policy is a bad choice on these devices, or None."""
    better = recommend(devices, onednn=onednn).policy
    if policy in formats.HALF:
        # Below 1.0 numbers lie twice as close, so this is the smaller step.
        step = formats.FORMATS[policy].epsilon / 4
        use = f"mixed_{policy}" if better == "float32" else better
        also = ", and 'float32' is the fast one here" if better == "float32" else ""
        return (
            f"{policy!r} stores the weights in {policy}, where a weight of 1.0 does "
            f"not move by updates under {step:.1g}; use {use!r}, which keeps them in "
            f"float32{also}."
        )
    if policy not in MIXED_POLICIES:
        return None
    told = _slowest(policy, computing_of(devices), onednn)
    if told.is_fast:
        return None
    return f"{policy!r} will be slow or gain nothing here: {told.why}; use {better!r}."


def fast_dtypes(device: Device, *, onednn: bool | None = None) -> tuple[str, ...]:
    """Returns the half precisions that a device multiplies faster than float32."""
    halves = ("bfloat16", "float16")
    return tuple(x for x in halves if speed(x, device, onednn=onednn).is_fast)


def devices() -> tuple[Device, ...]:
    """Returns the devices that TensorFlow may use here: TPUs, GPUs, the CPU."""
    tpus = tf.config.list_physical_devices("TPU")
    gpus = tf.config.get_visible_devices("GPU")
    return (
        *(Device("tpu", details_of(tpu).get("device_name", "TPU")) for tpu in tpus),
        *map(_gpu, gpus),
        _cpu(),
    )


def _gpu(gpu: Any) -> Device:
    details = details_of(gpu)
    capability = tuple(details.get("compute_capability") or ()) or None
    return Device("gpu", details.get("device_name", "GPU"), capability)


@functools.cache
def _cpu() -> Device:
    """Returns this machine's CPU; AMX that ends the process is called `BROKEN_AMX`."""
    features = {*instruction_sets()}
    amx = {feature for feature in features if feature.startswith("amx")}
    if amx and is_amx_broken():
        features = features - amx | {BROKEN_AMX}
    name = archspec.cpu.brand_string() or archspec.cpu.host().name
    return Device("cpu", name, None, system_bytes(), tuple(sorted(features)))


def computing_of(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Returns the devices that models run on: the CPU only when it is alone."""
    return tuple(d for d in devices if d.kind != "cpu") or tuple(devices)


def _slowest(policy: str, devices: Sequence[Device], onednn: bool | None) -> Speed:
    """Returns the word on the first device that gains nothing from a policy, if any."""
    dtype = policy.removeprefix("mixed_")
    told = [speed(dtype, device, onednn=onednn) for device in devices]
    return min(told, key=lambda each: each.is_fast, default=Speed(True, ""))
