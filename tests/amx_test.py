"""AMX that some virtual machines name and cannot run: found out, and avoided."""

import subprocess
import sys

import pytest

from tfamp.dtypes import hooks
from tfamp.dtypes import settings as settings_module
from tfamp.machine import cpus

NAMED = "flags\t\t: avx512_bf16 amx_bf16 amx_tile\n"


def never(command):
    raise AssertionError("a child was started")


def failing(error):
    def run(command):
        raise error

    return run


@pytest.mark.parametrize(
    "cpuinfo, run, is_broken",
    [
        (NAMED, lambda command: -4, True),
        (NAMED, lambda command: 0, False),
        (NAMED, lambda command: 1, False),
        (NAMED, failing(OSError("no child")), False),
        (NAMED, failing(subprocess.TimeoutExpired("python", 20)), False),
        ("flags\t\t: avx512_bf16\n", never, False),
        ("", never, False),
    ],
    ids=["dies", "runs", "fails", "no child", "hangs", "no AMX", "not Linux"],
)
def test_only_a_child_that_dies_speaks_against_amx(cpuinfo, run, is_broken):
    assert cpus.probe_amx(lambda: cpuinfo, run) is is_broken


def test_the_child_compiles_and_gets_whole_bytes():
    commands = []
    cpus.probe_amx(lambda: NAMED, lambda command: commands.append(command) or 0)
    ((python, *options, program, code),) = commands
    assert (python, options) == (sys.executable, ["-I", "-S", "-c"])
    compile(program, "child", "exec")
    # Entry and end of the function: push rbx, ret.
    assert bytes.fromhex(code)[:1] + bytes.fromhex(code)[-1:] == b"\x53\xc3"


def test_a_command_ended_by_a_signal_has_a_status_below_0():
    program = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    assert cpus._run([sys.executable, "-I", "-S", "-c", program]) == -4
    assert cpus._run([sys.executable, "-I", "-S", "-c", "raise SystemExit(3)"]) == 3


def test_onednn_is_capped_only_where_it_has_to_be():
    environ = {}
    cpus.avoid_broken_amx(environ, lambda: False)
    assert environ == {}
    cpus.avoid_broken_amx(environ, lambda: True)
    assert environ == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    decided = {"ONEDNN_MAX_CPU_ISA": "ALL"}
    cpus.avoid_broken_amx(decided, lambda: True)
    assert decided == {"ONEDNN_MAX_CPU_ISA": "ALL"}


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


# What the recorded machine code would do is only known by a product itself.
PRODUCT = """
import tfamp
tfamp.enable("mixed_bfloat16", keep_float32="none")
import keras, numpy as np
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
print(model(np.ones((64, 64), "float32")).dtype)
"""


@pytest.mark.slow("every test in bfloat16 would end its process just so")
def test_a_product_in_bfloat16_survives_on_this_machine(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "bfloat16" in done.stdout
