"""AMX that some virtual machines name and cannot run: found out, and avoided."""

import os
import pathlib
import platform
import sys

import pytest

from tfamp.dtypes import hooks
from tfamp.dtypes import settings as settings_module
from tfamp.machine import cpus


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


@pytest.mark.parametrize(
    "policy, avoids",
    [("mixed_bfloat16", True), ("bfloat16", True), ("float32", False)],
)
def test_broken_amx_is_avoided_where_settings_come_into_force(
    monkeypatch, policy, avoids
):
    calls = []
    monkeypatch.setattr(cpus, "avoid_broken_amx", lambda: calls.append(1))
    settings = settings_module.make_settings(policy)
    assert calls == []
    hooks.install(settings)
    assert bool(calls) is avoids
