"""Memory of a machine and its GPUs, and what to change about it."""

import pytest

from tests.doctor_test import CPU, T4, machine
from tests.probes_test import Driver, Gpu
from tfamp.cli.doctor import diagnose
from tfamp.machine.limits import GpuReading, MachineMemory, MemoryLimit
from tfamp.machine.memory import advice, machine_memory

MIB, GIB = 2**20, 2**30


def test_a_gpu_is_told_with_its_memory(tmp_path):
    driver = Driver(Gpu("Tesla T4", "GPU-t", memory=(9 * GIB, 15 * GIB)))
    found = machine_memory(driver, gpus=((0, ""),), environ={}, root=tmp_path)
    assert driver.open == 0
    (gpu,) = found.gpus
    assert (gpu.name, gpu.memory_free_bytes) == ("Tesla T4", 6 * GIB)
    assert MachineMemory.from_json(found.to_json()) == found


def gpu(used, **facts):
    sizes = {"memory_used_bytes": used, "memory_total_bytes": 16 * GIB}
    return GpuReading(0, "T4", **sizes, **facts)


CONTAINER = MemoryLimit(4 * GIB, "cgroup v2", 4 * GIB - 100 * MIB)
# Memory, message, words of the remedy.
PROBLEMS = {
    "other processes": (
        MachineMemory(gpus=(gpu(14 * GIB),)),
        "Other processes hold 14.0 GiB of 16.0 GiB on GPU:0.",
        "`nvidia-smi` lists them",
    ),
    "a container that is full": (
        MachineMemory((MemoryLimit(16 * GIB, "physical memory"), CONTAINER)),
        "100 MiB of 4.0 GiB (cgroup v2) is free.",
        "raise the container's limit",
    ),
}


@pytest.mark.parametrize("memory, message, remedy", PROBLEMS.values(), ids=PROBLEMS)
def test_each_problem_is_told_with_its_remedy(memory, message, remedy):
    (found,) = advice(memory)
    assert found.message == message and remedy in found.remedy


def test_what_does_no_harm_is_not_told():
    room = MemoryLimit(4 * GIB, "cgroup v2", GIB)
    assert advice(MachineMemory((room,), (gpu(100 * MIB), gpu(None)))) == ()


def test_the_doctor_shows_memory_and_judges_it():
    limits = (
        MemoryLimit(16 * GIB, "physical memory", 4 * GIB),
        MemoryLimit(3 * GIB, "cgroup v2", GIB),
    )
    memory = MachineMemory(limits, (gpu(15 * GIB, mig_slice="1g.5gb"),))
    diagnosis = diagnose(machine(T4, CPU, memory=memory))
    assert diagnosis.memory == memory
    assert [finding.severity for finding in diagnosis.findings] == ["warning"]
    text = " ".join(diagnosis.table().split())
    for expected in (
        "GPU:0 (MIG 1g.5gb) 16.0 GiB 1.0 GiB",
        "CPU, physical memory 16.0 GiB 12.0 GiB",
        "CPU, cgroup v2 3.0 GiB 2.0 GiB sets the limit",
    ):
        assert expected in text
