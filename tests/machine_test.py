"""Described machines: cores, limits, GPUs of a faked driver, the policy that suits."""

import os
import pathlib
import platform
import sys
import types
from pathlib import PurePosixPath

import numpy as np
import pytest
import tensorflow as tf

from tests.doctor_test import CPU as DOCTORS_CPU
from tests.doctor_test import machine
from tfamp.cli.doctor import diagnose
from tfamp.dtypes import hooks
from tfamp.dtypes import settings as settings_module
from tfamp.machine import cpus, limits, memory
from tfamp.machine import devices as hardware
from tfamp.machine.limits import GpuReading, MachineMemory, MemoryLimit
from tfamp.machine.memory import Nvml, advice, machine_memory
from tfamp.machine.speeds import Device

MIB, GIB = 2**20, 2**30


def write(root, files):
    """Writes files below `root`: path -> text."""
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


# Files, and the limit that decides. The machine has 8 GiB, 2 of them free.
MEMINFO = "MemTotal: 8388608 kB\nMemAvailable: 2097152 kB\nSwapTotal: 4 kB\n"
PHYSICAL = MemoryLimit(8 * GIB, "physical memory", 6 * GIB)
SYSTEMS = {
    "no limit": ({}, PHYSICAL),
    "container, version 2": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": f"{500 * MIB}\n",
            "sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {200 * MIB}\n",
        },
        MemoryLimit(GIB, "cgroup v2", 300 * MIB),
    ),
    "a limit above the machine's memory": (
        {"sys/fs/cgroup/memory.max": f"{64 * GIB}\n"},
        PHYSICAL,
    ),
}


@pytest.mark.parametrize("files, expected", SYSTEMS.values(), ids=SYSTEMS)
def test_the_smallest_limit_decides(tmp_path, files, expected):
    write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert MachineMemory(limits.memory_limits(tmp_path)).limit == expected


def test_without_proc_the_system_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "system_bytes", lambda: 7)
    assert limits.memory_limits(tmp_path) == (MemoryLimit(7, "physical memory"),)


def v2(*quotas, group="/"):
    """What the kernel says of groups of version 2, by file, from below to above."""
    above = [group, *map(str, PurePosixPath(group).parents)]
    quota_of = dict(zip(above, quotas, strict=False))
    files = {
        f"sys/fs/cgroup{path.rstrip('/')}/cpu.max": f"{quota}\n"
        for path, quota in quota_of.items()
    }
    return {"proc/self/cgroup": f"0::{group}\n", **files}


# Files below the root, and the cores that they leave of 16.
QUOTAS = {
    "no cgroups": ({}, 16),
    "a container": (v2("200000 100000"), 2),
    "no limit": (v2("max 100000"), 16),
    "above is narrower": (v2("800000 100000", "300000 100000", group="/a/b"), 3),
    "a part of a core": (v2("20000 100000"), 1),
    "a file that says something else": (v2(""), 16),
}


@pytest.mark.parametrize("files, expected", QUOTAS.values(), ids=QUOTAS)
def test_quotas_of_cgroups_count(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    write(tmp_path, files)
    assert cpus.num_usable_cpus(str(tmp_path)) == expected


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="AMX is x86's"
)
def test_amx_is_broken_where_the_cpu_lays_out_no_tiles(monkeypatch):
    flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    if "amx_tile" in flags:
        pytest.skip("this CPU has AMX, or names it")
    # A CPU without AMX lays out none, so to name it is to name it wrongly.
    monkeypatch.setattr(cpus, "text_of", lambda path: "flags: amx_bf16")
    assert cpus.is_amx_broken.__wrapped__() is True


@pytest.mark.parametrize(
    "is_broken, decided, expected",
    [(False, None, None), (True, None, "AVX512_CORE_FP16"), (True, "ALL", "ALL")],
)
def test_onednn_is_capped_only_where_it_has_to_be(
    monkeypatch, is_broken, decided, expected
):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if decided:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", decided)
    monkeypatch.setattr(cpus, "is_amx_broken", lambda: is_broken)
    cpus.avoid_broken_amx()
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == expected


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "float32"])
def test_broken_amx_is_avoided_where_settings_come_into_force(monkeypatch, policy):
    calls = []
    monkeypatch.setattr(cpus, "avoid_broken_amx", lambda: calls.append(1))
    settings = settings_module.make_settings(policy)
    assert calls == []
    hooks.install(settings)
    assert bool(calls) is (policy != "float32")


P100 = Device("gpu", "Tesla P100-PCIE-16GB", (6, 0))
V100 = Device("gpu", "Tesla V100-SXM2-16GB", (7, 0))
T4 = Device("gpu", "Tesla T4", (7, 5))
GTX1660 = Device("gpu", "NVIDIA GeForce GTX 1660 Ti", (7, 5))
A100 = Device("gpu", "NVIDIA A100-SXM4-40GB", (8, 0))
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
        *([V100, A100], "mixed_float16", "suit all 2 devices"),
        *("V100-SXM2-16GB emulates bfloat16", None),
    ),
    "GPU beside a CPU": ([T4, AMX_CPU], "mixed_float16", "Tesla T4", "T4", None),
    "TPU": ([TPU, OLD_CPU], "mixed_bfloat16", "TPU v4 multi", None, "no units"),
    "old CPU": ([OLD_CPU], "float32", "no bfloat16 instr", "no bfloat16", "slower"),
    "avx512_bf16": ([BF16_CPU], "mixed_bfloat16", "avx512_bf16", None, "slower"),
    "amx_bf16": ([AMX_CPU], "mixed_bfloat16", "amx_bf16", None, "slower"),
    "AMX hidden": (
        *([HIDDEN_AMX_CPU], "float32", "no amx_bf16"),
        *("slower than float32", "slower than float32"),
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
    found = hardware.recommend(devices, onednn=True)
    assert found.policy == policy
    assert phrase in found.reason and found.reason.endswith(".")
    objections = {"mixed_bfloat16": bfloat16, "mixed_float16": float16}
    for explicit, expected in objections.items():
        objection = hardware.objection(explicit, devices, onednn=True)
        if expected is None:
            assert objection is None
        else:
            start = f"{explicit!r} will be slow or gain nothing here: "
            assert objection.startswith(start) and expected in objection
            assert objection.endswith(f"; use {policy!r}.")
    for onednn in (True, False):
        policy = hardware.recommend(devices, onednn=onednn).policy
        assert hardware.objection(policy, devices, onednn=onednn) is None


@pytest.mark.parametrize(
    "value, policy", [("1", "mixed_bfloat16"), ("0", "float32")], ids=["on", "off"]
)
def test_onednn_is_asked_of_the_environment(monkeypatch, value, policy):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", value)
    assert hardware.recommend([AMX_CPU]).policy == policy
    assert ("bfloat16" in hardware.fast_dtypes(AMX_CPU)) is (value == "1")


class NVMLError(Exception):
    """What the fake driver raises."""


class Gpu:
    """A GPU of the fake driver; what is not given is refused."""

    def __init__(self, name, uuid, *, slices=(), **figures):
        self.name, self.uuid, self.slices, self.figures = name, uuid, slices, figures

    def ask(self, name):
        if name not in self.figures:
            raise NVMLError("Not Supported")
        value = self.figures[name]
        return value.pop(0) if isinstance(value, list) else value


def entry(found, index):
    if index >= len(found):
        raise NVMLError("Not Found")
    return found[index]


class Driver:
    """Stands for the module `pynvml`."""

    NVMLError = NVMLError

    def __init__(self, *gpus):
        self.gpus, self.num_open = gpus, 0
        every = [each for gpu in gpus for each in (gpu, *gpu.slices)]
        of_slice = {id(part): [gpu] for gpu in gpus for part in gpu.slices}
        device = {
            "HandleByIndex": lambda index: entry(gpus, index),
            "HandleByUUID": lambda uuid: entry(
                [each for each in every if each.uuid == uuid], 0
            ),
            "MaxMigDeviceCount": lambda gpu: 7 if gpu.slices else 0,
            "MigDeviceHandleByIndex": lambda gpu, index: entry(gpu.slices, index),
            "DeviceHandleFromMigDeviceHandle": lambda part: entry(
                of_slice.get(id(part), []), 0
            ),
            "Name": lambda gpu: gpu.name,
            "MemoryInfo": lambda gpu: types.SimpleNamespace(
                **dict(zip(("used", "total"), gpu.ask("memory"), strict=True))
            ),
            "UtilizationRates": lambda gpu: types.SimpleNamespace(gpu=gpu.ask("load")),
            "Temperature": lambda gpu, sensor: gpu.ask("temperature"),
            "PowerUsage": lambda gpu: gpu.ask("power"),
            "TotalEnergyConsumption": lambda gpu: gpu.ask("energy"),
        }
        for name, answer in device.items():
            setattr(self, f"nvmlDeviceGet{name}", answer)

    def nvmlInit(self):
        self.num_open += 1

    def nvmlShutdown(self):
        self.num_open -= 1


def test_a_gpu_is_read_in_the_units_of_the_names():
    figures = {"load": 25, "temperature": 61, "power": 150_500, "energy": 7_250}
    driver = Driver(Gpu("A100", "GPU-a", memory=(3 * MIB, 8 * MIB), **figures))
    with Nvml(driver, gpus=[(0, "A100")], environ={}) as nvml:
        assert driver.num_open == 1
        (reading,) = nvml.read()
    assert driver.num_open == 0
    sizes = {"memory_used_bytes": 3 * MIB, "memory_total_bytes": 8 * MIB}
    told = {"temperature_celsius": 61.0, "power_watts": 150.5, "energy_joules": 7.25}
    assert reading == GpuReading(0, "A100", utilisation=0.25, **sizes, **told)
    assert reading.memory_free_bytes == 5 * MIB


def test_memory_is_the_slices_and_power_the_whole_gpus_under_mig():
    part = Gpu("NVIDIA A100 MIG 1g.5gb", "MIG-1", memory=(MIB, 5 * MIB), power=1)
    other = Gpu("NVIDIA A100 MIG 3g.20gb", "MIG-2", memory=(0, 20 * MIB))
    whole = Gpu("A100", "GPU-a", slices=(part, other), power=90_000, memory=(9, 9))
    with Nvml(Driver(whole), gpus=[(0, part.name)], environ={}) as nvml:
        (reading,) = nvml.read()
    assert reading.mig_slice == "1g.5gb"
    assert (reading.memory_used_bytes, reading.memory_total_bytes) == (MIB, 5 * MIB)
    assert (reading.power_watts, reading.utilisation) == (90.0, None)
    listed = {"CUDA_VISIBLE_DEVICES": "MIG-2"}
    with Nvml(Driver(whole), gpus=[(0, other.name)], environ=listed) as nvml:
        (reading,) = nvml.read()
    assert (reading.mig_slice, reading.power_watts) == ("3g.20gb", 90.0)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")
def test_the_peak_follows_an_allocation_and_begins_anew():
    size = 96 * MIB
    can_reset = memory.reset_peak()
    before, now = memory.peak_process_bytes(), memory.process_bytes()
    block = np.ones(size, np.uint8)
    assert memory.process_bytes() - now > size / 2
    del block
    peak = memory.peak_process_bytes()
    assert peak >= memory.process_bytes()
    if not can_reset:
        pytest.skip("the kernel keeps the peak of the whole process")
    assert peak - before > size / 2
    assert memory.reset_peak()
    assert peak - memory.peak_process_bytes() > size / 2


def test_the_peak_of_the_fullest_gpu_counts_and_begins_anew(monkeypatch):
    peaks = {"GPU:0": 3 * MIB, "GPU:1": 5 * MIB}
    config = tf.config.experimental
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [*peaks])
    monkeypatch.setattr(config, "get_memory_info", lambda name: {"peak": peaks[name]})
    monkeypatch.setattr(
        config, "reset_memory_stats", lambda name: peaks.update({name: 1})
    )
    assert memory.device_peak_bytes() == 5 * MIB
    assert memory.reset_device_peak()
    assert {*peaks.values()} == {1}


def test_a_machine_is_told_with_the_memory_of_its_gpus(tmp_path):
    driver = Driver(Gpu("Tesla T4", "GPU-t", memory=(9 * GIB, 15 * GIB)))
    found = machine_memory(driver, gpus=((0, ""),), environ={}, root=tmp_path)
    assert driver.num_open == 0
    assert [(g.name, g.memory_free_bytes) for g in found.gpus] == [
        ("Tesla T4", 6 * GIB)
    ]
    assert MachineMemory.from_json(found.to_json()) == found


def gpu(used, **facts):
    sizes = {"memory_used_bytes": used, "memory_total_bytes": 16 * GIB}
    return GpuReading(0, "T4", **sizes, **facts)


CONTAINER = MemoryLimit(4 * GIB, "cgroup v2", 4 * GIB - 100 * MIB)
# Memory, messages.
PROBLEMS = {
    "other processes": (
        MachineMemory(gpus=(gpu(14 * GIB),)),
        ["Other processes hold 14.0 GiB of 16.0 GiB on GPU:0."],
    ),
    "a container that is full": (
        MachineMemory((MemoryLimit(16 * GIB, "physical memory"), CONTAINER)),
        ["100 MiB of 4.0 GiB (cgroup v2) is free."],
    ),
    "what does no harm": (
        MachineMemory((MemoryLimit(4 * GIB, "x", GIB),), (gpu(100 * MIB), gpu(None))),
        [],
    ),
}


@pytest.mark.parametrize("found, messages", PROBLEMS.values(), ids=PROBLEMS)
def test_each_problem_is_told(found, messages):
    assert [message for message, _ in advice(found)] == messages


def test_the_doctor_shows_memory_and_judges_it():
    both = (
        MemoryLimit(16 * GIB, "physical memory", 4 * GIB),
        MemoryLimit(3 * GIB, "cgroup v2", GIB),
    )
    found = MachineMemory(both, (gpu(15 * GIB, mig_slice="1g.5gb"),))
    diagnosis = diagnose(machine(T4, DOCTORS_CPU, memory=found))
    assert [finding.severity for finding in diagnosis.findings] == ["warning"]
    text = " ".join(diagnosis.table().split())
    for expected in (
        "GPU:0 (MIG 1g.5gb) 16.0 GiB 1.0 GiB",
        "CPU, physical memory 16.0 GiB 12.0 GiB",
        "CPU, cgroup v2 3.0 GiB 2.0 GiB sets the limit",
    ):
        assert expected in text
