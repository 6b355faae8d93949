"""Cores and memory that this process may take, from files of described systems."""

import os
from pathlib import PurePosixPath

import pytest

from tfamp.machine import cpus, limits
from tfamp.machine.limits import MemoryLimit

MIB, GIB = 2**20, 2**30


def write(root, files):
    """Writes files below `root`: path -> text."""
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def system(root, files):
    meminfo = "MemTotal: 8388608 kB\nMemAvailable: 2097152 kB\nSwapTotal: 4 kB\n"
    return write(root, {"proc/meminfo": meminfo, **files})


def smallest(root):
    return min(limits.memory_limits(root), key=lambda limit: limit.bytes)


# Files, and the limit that decides. The machine has 8 GiB, 2 of them free.
SYSTEMS = {
    "no limit": ({}, MemoryLimit(8 * GIB, "physical memory", 6 * GIB)),
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
        MemoryLimit(8 * GIB, "physical memory", 6 * GIB),
    ),
}


@pytest.mark.parametrize("files, expected", SYSTEMS.values(), ids=SYSTEMS)
def test_the_smallest_limit_decides(tmp_path, files, expected):
    assert smallest(system(tmp_path, files)) == expected


def test_without_proc_the_system_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "system_bytes", lambda: 7)
    assert limits.memory_limits(tmp_path) == (MemoryLimit(7, "physical memory"),)


SELF, ROOT = "proc/self/cgroup", "sys/fs/cgroup"


def v2(*quotas, group="/"):
    """What the kernel says of groups of version 2, by file, from below to above."""
    above = [group, *map(str, PurePosixPath(group).parents)]
    files = {f"{ROOT}{path.rstrip('/')}/cpu.max": f"{quota}\n"
             for path, quota in zip(above, quotas, strict=False)}  # fmt: skip
    return {SELF: f"0::{group}\n", **files}


# Files below the root, and the cores that they leave of 16.
JOB = "/system.slice/job.scope"
MACHINES = {
    "no cgroups": ({}, 16),
    "v2, a container": (v2("200000 100000"), 2),
    "v2, no limit": (v2("max 100000"), 16),
    "v2, above is narrower": (v2("800000 100000", "300000 100000", group=JOB), 3),
    "v2, a part of a core": (v2("20000 100000"), 1),
    "a file that says something else": (v2(""), 16),
}


@pytest.mark.parametrize("files, expected", MACHINES.values(), ids=MACHINES)
def test_quotas_of_cgroups_count(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    write(tmp_path, files)
    assert cpus.num_usable_cpus(str(tmp_path)) == expected
