"""How many cores a process may use: its affinity, and the quotas of its cgroups."""

import os
from pathlib import PurePosixPath

import pytest

from tfamp.machine import cpus


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


SELF, ROOT = "proc/self/cgroup", "sys/fs/cgroup"


def v2(*quotas, group="/"):
    """What the kernel says of groups of version 2, by file, from below to above."""
    above = [group, *map(str, PurePosixPath(group).parents)]
    files = {f"{ROOT}{path.rstrip('/')}/cpu.max": f"{quota}\n"
             for path, quota in zip(above, quotas, strict=False)}  # fmt: skip
    return {SELF: f"0::{group}\n", **files}


def v1(quota, period=100_000, *, group="", controllers="cpu,cpuacct", **others):
    """The same of a group of version 1."""
    folder = f"{ROOT}/{controllers}{group}"
    return {
        SELF: f"4:{controllers}:{group or '/docker/ab'}\n3:memory:/docker/ab\n",
        f"{folder}/cpu.cfs_quota_us": f"{quota}\n",
        f"{folder}/cpu.cfs_period_us": f"{period}\n",
        **others,
    }


# Files below the root, and the cores that they leave of 16.
UNLIMITED = {
    f"{ROOT}/cpu/cpu.cfs_quota_us": "-1\n",
    f"{ROOT}/cpu/cpu.cfs_period_us": "100000\n",
}
JOB = "/system.slice/job.scope"
MACHINES = {
    "no cgroups": ({}, 16),
    "v2, a container": (v2("200000 100000"), 2),
    "v2, no limit": (v2("max 100000"), 16),
    "v2, above is narrower": (v2("800000 100000", "300000 100000", group=JOB), 3),
    "v2, a part of a core": (v2("20000 100000"), 1),
    "v2, two cores and a half": (v2("250000 100000"), 3),
    "v2, more than there are": (v2("9900000 100000"), 16),
    # The path is the host's, which a container does not see.
    "v1, a container": (v1(400_000), 4),
    "v1, a group of its own": (
        v1(50_000, 10_000, group="/batch/job", controllers="cpu", **UNLIMITED),
        5,
    ),
    "v1, no limit": (v1(-1), 16),
    "both, the quota in v1": (v1(600_000) | {SELF: "4:cpu,cpuacct:/\n0::/job\n"}, 6),
    "a file that says something else": (v2(""), 16),
}


@pytest.mark.parametrize("files, expected", MACHINES.values(), ids=MACHINES)
def test_quotas_of_cgroups_count(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    write(tmp_path, files)
    assert cpus.num_usable_cpus(str(tmp_path)) == expected


def test_affinity_counts_where_it_is_narrower(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    write(tmp_path, MACHINES["v2, a container"][0])
    assert cpus.num_usable_cpus(str(tmp_path)) == 1
