"""The policy for a table of described machines, and how devices are found."""

import pytest

from tfamp.machine import devices as hardware
from tfamp.machine.speeds import Device

P100 = Device("gpu", "Tesla P100-PCIE-16GB", (6, 0))
V100 = Device("gpu", "Tesla V100-SXM2-16GB", (7, 0))
T4 = Device("gpu", "Tesla T4", (7, 5))
GTX1660 = Device("gpu", "NVIDIA GeForce GTX 1660 Ti", (7, 5))
A100 = Device("gpu", "NVIDIA A100-SXM4-40GB", (8, 0))
MIG = Device("gpu", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), partition=True)
L4 = Device("gpu", "NVIDIA L4", (8, 9))
H100 = Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0))
TPU = Device("tpu", "TPU v4")
OLD_CPU = Device("cpu", "Old Xeon", features=("avx2", "fma"))
BF16_CPU = Device("cpu", "Zen 4", features=("avx2", "avx512_bf16"))
AMX_CPU = Device("cpu", "Xeon", features=("amx_bf16", "avx512_bf16", "avx512_fp16"))
BROKEN_AMX_CPU = Device(
    "cpu", "Cloud Xeon", features=("amx_broken", "avx512_bf16", "avx512_fp16")
)
HIDDEN_AMX_CPU = Device("cpu", "Guest Xeon", features=("avx512_bf16", "avx512_fp16"))
ARM_CPU = Device("cpu", "Neoverse V1", features=("asimd", "asimdhp", "bf16"))

# Devices, policy, a phrase of the reason, phrases of the objections to
# mixed_bfloat16 and mixed_float16 (None: no objection).
MACHINES = {
    "P100": ([P100], "float32", "no tensor cores", "emulates", "no tensor cores"),
    "V100": ([V100], "mixed_float16", "emulates bfloat16", "needs 8.0", None),
    "T4": ([T4], "mixed_float16", "tensor cores for float16", "emulates", None),
    "GTX 1660": ([GTX1660], "float32", "no tensor cores", "emulates", "no tensor"),
    "A100": ([A100], "mixed_bfloat16", "needs no loss scale", None, None),
    "V100 and A100": (
        [V100, A100],
        "mixed_float16",
        "suit all 2 devices",
        "V100-SXM2-16GB emulates bfloat16",
        None,
    ),
    "GPU beside a CPU": ([T4, AMX_CPU], "mixed_float16", "Tesla T4", "T4", None),
    "TPU": ([TPU, OLD_CPU], "mixed_bfloat16", "TPU v4 multi", None, "no units"),
    "old CPU": ([OLD_CPU], "float32", "no bfloat16 instr", "no bfloat16", "slower"),
    "avx512_bf16": ([BF16_CPU], "mixed_bfloat16", "avx512_bf16", None, "slower"),
    "amx_bf16": ([AMX_CPU], "mixed_bfloat16", "amx_bf16", None, "slower"),
    "AMX hidden": (
        [HIDDEN_AMX_CPU],
        "float32",
        "not amx_bf16",
        "slower than float32",
        "slower than float32",
    ),
    "AMX that ends the process": (
        *([BROKEN_AMX_CPU], "float32", "as on some virtual machines"),
        *("names AMX, but its instructions end the process", "slower than float32"),
    ),
    "ARM": ([ARM_CPU], "float32", "bf16", "no gain is known", "slower"),
}


@pytest.mark.parametrize(
    "devices, policy, phrase, bfloat16, float16", MACHINES.values(), ids=MACHINES
)
def test_policy_and_objections_suit_the_machine(
    devices, policy, phrase, bfloat16, float16
):
    advice = hardware.recommend(devices, onednn=True)
    assert advice.policy == policy
    assert phrase in advice.reason
    assert advice.reason.endswith(".")
    for explicit, expected in (
        ("mixed_bfloat16", bfloat16),
        ("mixed_float16", float16),
    ):
        objection = hardware.objection(explicit, devices, onednn=True)
        if expected is None:
            assert objection is None
        else:
            start = f"{explicit!r} will be slow or gain nothing here: "
            assert objection.startswith(start)
            assert expected in objection
            assert objection.endswith(f"; use {policy!r}.")


@pytest.mark.parametrize("devices", [row[0] for row in MACHINES.values()], ids=MACHINES)
def test_the_recommended_policy_is_never_objected_to(devices):
    for onednn in (True, False):
        policy = hardware.recommend(devices, onednn=onednn).policy
        assert hardware.objection(policy, devices, onednn=onednn) is None


@pytest.mark.parametrize(
    "value, policy",
    [(None, "mixed_bfloat16"), ("1", "mixed_bfloat16"), ("0", "float32")],
)
def test_onednn_is_asked_of_the_environment(monkeypatch, value, policy):
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    if value is not None:
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", value)
    assert hardware.recommend([AMX_CPU]).policy == policy
    slow = policy == "float32"
    assert (hardware.objection("mixed_bfloat16", [AMX_CPU]) is not None) is slow
    assert ("bfloat16" in hardware.fast_dtypes(AMX_CPU)) is not slow
