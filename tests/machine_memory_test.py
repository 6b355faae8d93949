"""Memory of a machine and its GPUs, who holds it, and what to change about it."""

import os
import types

import pytest

from tests.doctor_test import CPU, T4, machine
from tests.probes_test import Driver, Gpu, NVMLError
from tfamp.cli.doctor import diagnose
from tfamp.machine.limits import GpuMemory, Holder, MachineMemory, MemoryLimit
from tfamp.machine.memory import advice, machine_memory

MIB, GIB = 2**20, 2**30
OWN = 42


class Occupied(Driver):
    """A driver that tells processes: of a GPU's figures `compute` and `graphics`."""

    names = {7: b"/usr/bin/python3 train.py", OWN: "/opt/python"}

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return self.processes(gpu, "compute")

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu):
        return self.processes(gpu, "graphics")

    def nvmlSystemGetProcessName(self, pid):
        if pid not in self.names:
            raise NVMLError("Not Found")
        return self.names[pid]

    def processes(self, gpu, kind):
        rows = self.figure(gpu, kind)
        return [types.SimpleNamespace(pid=p, usedGpuMemory=b) for p, b in rows]


@pytest.fixture
def gpus_of(monkeypatch, tmp_path):
    """GPUs of a described machine, as this process with number `OWN` sees them."""

    def told(driver, *, seen=((0, ""),), **environ):
        monkeypatch.setattr(os, "getpid", lambda: OWN)
        memory = machine_memory(driver, gpus=seen, environ=environ, root=tmp_path)
        assert driver.open == 0
        return memory.gpus

    return told


def test_a_gpu_is_told_with_all_who_hold_its_memory(tmp_path, gpus_of):
    (tmp_path / "proc/8").mkdir(parents=True)
    (tmp_path / "proc/8/comm").write_text("Xorg\n")
    gpu = Gpu(
        "Tesla T4",
        "GPU-t",
        memory=(9 * GIB, 15 * GIB),
        compute=((OWN, 2 * GIB), (7, 6 * GIB), (9, None)),
        graphics=((8, GIB), (7, 6 * GIB)),
    )
    (told,) = gpus_of(Occupied(gpu))
    assert told == GpuMemory(
        0,
        "Tesla T4",
        15 * GIB,
        9 * GIB,
        holders=(
            Holder(7, "python3", 6 * GIB),
            Holder(OWN, "python", 2 * GIB, is_own=True),
            Holder(8, "Xorg", GIB),
            Holder(9, "", None),
        ),
    )
    assert told.free_bytes == 6 * GIB
    assert [holder.pid for holder in told.others] == [7, 8, 9]
    assert GpuMemory.from_json(told.to_json()) == told


def gpu(used=0, *, total=16 * GIB, **facts):
    return MachineMemory(gpus=(GpuMemory(0, "GPU", total, used, **facts),))


def cpu(*limits):
    physical = MemoryLimit(16 * GIB, "physical memory", 2 * GIB)
    return MachineMemory((physical, *limits))


GPU = gpu()
# Memory, message, remedy.
PROBLEMS = {
    "another process": (
        gpu(
            15 * GIB,
            holders=(Holder(123, "python", 14 * GIB), Holder(OWN, "x", GIB, True)),
        ),
        "Another process (pid 123, python) holds 14.0 GiB of 16.0 GiB on GPU:0.",
        "End it, or choose another GPU by CUDA_VISIBLE_DEVICES; where both are to "
        "share it, set TF_FORCE_GPU_ALLOW_GROWTH=true for both.",
    ),
    "a container that is full": (
        cpu(MemoryLimit(4 * GIB, "cgroup v2", 4 * GIB - 100 * MIB)),
        "100 MiB of 4.0 GiB (cgroup v2) is free.",
        "End other processes, or raise the container's limit.",
    ),
}


@pytest.mark.parametrize("memory, message, remedy", PROBLEMS.values(), ids=PROBLEMS)
def test_each_problem_is_told_with_its_remedy(memory, message, remedy):
    assert advice(memory) == ((message, remedy),)


HARMLESS = {
    "an idle GPU": GPU,
    "this process": gpu(15 * GIB, holders=(Holder(1, "x", 15 * GIB, True),)),
    "a small process": gpu(GIB, holders=(Holder(1, "Xorg", 100 * MIB),)),
    "a process of unknown size": gpu(15 * GIB, holders=(Holder(1, "x"),)),
    "a container with room": cpu(MemoryLimit(4 * GIB, "cgroup v2", GIB)),
}


@pytest.mark.parametrize("memory", HARMLESS.values(), ids=HARMLESS)
def test_what_does_no_harm_is_not_told(memory):
    assert advice(memory) == ()


def test_the_doctor_shows_memory_and_judges_it():
    holders = (Holder(123, "python", 14 * GIB), Holder(OWN, "x", GIB, is_own=True))
    row = GpuMemory(
        0,
        "T4",
        16 * GIB,
        15 * GIB,
        mig_slice="1g.5gb",
        holders=holders,
    )
    limits = (
        MemoryLimit(16 * GIB, "physical memory", 4 * GIB),
        MemoryLimit(3 * GIB, "cgroup v2", GIB),
    )
    memory = MachineMemory(limits, (row,))
    diagnosis = diagnose(machine(T4, CPU, memory=memory))
    assert diagnosis.memory == memory
    assert [finding.severity for finding in diagnosis.findings] == ["advice"]
    assert "pid 123, python" in diagnosis.findings[0].message
    text = " ".join(diagnosis.table().split())
    for expected in (
        *("GPU:0 (MIG 1g.5gb) 16.0 GiB 1.0 GiB", "(pid 123)", "14.0 GiB"),
        "CPU, physical memory 16.0 GiB 12.0 GiB",
        "CPU, cgroup v2 3.0 GiB 2.0 GiB sets the limit",
    ):
        assert expected in text
