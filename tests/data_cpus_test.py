"""How many cores a process may use: its affinity, and the quotas of its cgroups."""

import os

import pytest

from tfamp.data import _cpus


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# What the kernel says, by file below the root, and the cores that leaves of 16.
MACHINES = {
    "no cgroups": ({}, 16),
    "v2, a container": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"},
        2,
    ),
    "v2, no limit": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        16,
    ),
    "v2, a group above is narrower": (
        {
            "proc/self/cgroup": "0::/system.slice/job.scope\n",
            "sys/fs/cgroup/system.slice/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/system.slice/job.scope/cpu.max": "800000 100000\n",
        },
        3,
    ),
    "v2, a part of a core": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "20000 100000\n"},
        1,
    ),
    "v2, two cores and a half": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"},
        3,
    ),
    "v2, more than there are": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"},
        16,
    ),
    "v1, a container": (
        {
            # The path is the host's, which a container does not see.
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/ab\n3:memory:/docker/ab\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        4,
    ),
    "v1, a group of its own": (
        {
            "proc/self/cgroup": "4:cpu:/batch/job\n",
            "sys/fs/cgroup/cpu/batch/job/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/batch/job/cpu.cfs_period_us": "10000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        5,
    ),
    "v1, no limit": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        16,
    ),
    "both, the quota in v1": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/\n0::/job\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "600000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        6,
    ),
    "a file that says something else": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "\n"},
        16,
    ),
}


@pytest.mark.parametrize("files, expected", MACHINES.values(), ids=MACHINES)
def test_quotas_of_cgroups_count(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    write(tmp_path, files)
    assert _cpus.num_usable_cpus(str(tmp_path)) == expected


def test_affinity_counts_where_it_is_narrower(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    write(tmp_path, MACHINES["v2, a container"][0])
    assert _cpus.num_usable_cpus(str(tmp_path)) == 1
