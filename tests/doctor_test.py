"""`tfamp doctor`: what it finds on described machines, and how it shows it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfamp.cli import doctor
from tfamp.cli.diagnosis import Diagnosis
from tfamp.cli.doctor import Probes, diagnose
from tfamp.cli.main import main
from tfamp.machine.limits import MachineMemory, MemoryLimit
from tfamp.machine.speeds import Device, Recommendation
from tfamp.records import versions as _versions

ROOT = Path(__file__).parents[1]
VERSIONS = dict(python="3.12.1", tensorflow="2.20.0", keras="3.12.0", numpy="2.1.0")
CPU = Device("cpu", "Old Xeon", memory_bytes=2**34, features=("avx2",))
AMX_CPU = Device("cpu", "Xeon", features=("amx_bf16", "avx512_bf16"))
BROKEN_AMX_CPU = Device("cpu", "Xeon", features=("amx_broken", "avx512_bf16"))
T4 = Device("gpu", "Tesla T4", (7, 5), 15 * 2**30)
MEMORY = MachineMemory((MemoryLimit(2**34, "physical memory", 2**33),))
A100 = Device("gpu", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0))


def machine(
    *devices, versions=None, nvidia_gpus=0, memory=MEMORY, built_for=(), **environ
):
    """Describes a machine; nothing of the real one is looked at."""
    return Probes(
        environ={"HOME": "/nowhere", **environ},
        versions=lambda: {**VERSIONS, **(versions or {})},
        problems=lambda **_: (),
        devices=lambda: devices,
        nvidia_gpus=lambda: nvidia_gpus,
        built_for=lambda: built_for,
        memory=lambda environ: memory,
    )


def test_a_sound_machine_has_no_findings():
    diagnosis = diagnose(machine(T4, CPU, nvidia_gpus=1))
    assert diagnosis.findings == ()
    assert not diagnosis.is_broken
    assert diagnosis.recommendation.policy == "mixed_float16"
    assert [report.device for report in diagnosis.devices] == [T4, CPU]
    assert [report.fast_dtypes for report in diagnosis.devices] == [("float16",), ()]
    assert diagnosis.versions["tensorflow"] == "2.20.0"
    assert "tfamp" in diagnosis.versions
    assert diagnosis.table().endswith("No problems found.")


AMX_ENDS = (
    "AMX ends the process, so any bfloat16 product in TensorFlow does.",
    "Set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, or use another machine.",
)
# Machine, message, remedy; severity where it is no advice.
MACHINES = {
    "GPU that TensorFlow misses": (
        machine(CPU, nvidia_gpus=2),
        "The system has 2 NVIDIA GPU(s); TensorFlow sees none.",
        "Check the driver with `nvidia-smi`, then run "
        "`pip install 'tensorflow[and-cuda]'`.",
        "error",
    ),
    "Keras with a known fault": (
        machine(CPU, versions={"keras": "3.16.0.dev2026102704"}),
        "Keras 3.16.0.dev2026102704 brings arrays in one order in all epochs, runs and "
        "seeds (keras#23046); `fit` is mended while tfamp is enabled.",
        "Install a version without it: `pip install 'keras==3.15.1'`.",
    ),
    "oneDNN off": (
        machine(AMX_CPU, TF_ENABLE_ONEDNN_OPTS="0"),
        "oneDNN is off, so amx_bf16 and avx512_bf16 of this CPU go unused.",
        "Unset TF_ENABLE_ONEDNN_OPTS, or set it to 1.",
    ),
    "oneDNN capped": (
        machine(AMX_CPU, ONEDNN_MAX_CPU_ISA="avx512_core_bf16"),
        "ONEDNN_MAX_CPU_ISA is 'AVX512_CORE_BF16', so amx_bf16 of this CPU goes unused "
        "and bfloat16 is slower than float32.",
        "Unset it.",
    ),
    "AMX that ends the process": (machine(BROKEN_AMX_CPU), *AMX_ENDS, "error"),
    "TensorFlow's own rewrite": (
        machine(T4, TF_ENABLE_AUTO_MIXED_PRECISION="1"),
        "TF_ENABLE_AUTO_MIXED_PRECISION has TensorFlow rewrite graphs that tfamp has "
        "set dtypes in.",
        "Unset it.",
    ),
}


@pytest.mark.parametrize("case", MACHINES.values(), ids=MACHINES)
def test_each_problem_is_found_with_its_remedy(case):
    probes, message, remedy, severity = (*case, "warning")[:4]
    diagnosis = diagnose(probes)
    (found,) = diagnosis.findings
    assert (found.severity, found.message, found.remedy) == (severity, message, remedy)
    assert diagnosis.is_broken == (severity == "error")


BROKEN = {
    "another backend": ({"KERAS_BACKEND": "jax"}, {}, "KERAS_BACKEND is 'jax'"),
    "Keras 2": ({}, {"keras": "2.15.0"}, "Found Keras 2.15.0"),
    "old TensorFlow": ({}, {"tensorflow": "2.15.0"}, "Found TensorFlow 2.15.0"),
}


@pytest.mark.parametrize("environ, versions, start", BROKEN.values(), ids=BROKEN)
def test_a_broken_environment_is_an_error_and_the_rest_is_still_told(
    environ, versions, start
):
    probes = machine(CPU, versions=versions, **environ)
    diagnosis = diagnose(dataclasses.replace(probes, problems=found_problems))
    (finding,) = diagnosis.findings
    assert finding.severity == "error"
    assert finding.message.startswith(start)
    assert finding.remedy.startswith(("Set ", "Unset ", "Run "))
    assert diagnosis.recommendation.policy == "float32"


def found_problems(**arguments):
    return _versions.find_problems(**arguments, modules={})


def test_the_tables_fit_and_say_it_all():
    environ = {"TFAMP_POLICY": "mixed_bfloat16", "CUDA_VISIBLE_DEVICES": ""}
    environ["XLA_FLAGS"] = "[red]x[/red]"  # no markup
    environ["TF_ENABLE_AUTO_MIXED_PRECISION"] = "1"
    text = diagnose(machine(A100, T4, CPU, **environ)).table()
    assert max(len(line) for line in text.splitlines()) <= 110
    assert "\x1b" not in text
    words = " ".join(text.split())
    for expected in (
        *("Recommended policy: mixed_float16", "tensor cores for float16", "MIG"),
        *("capability 7.5", "15.0 GiB", "2.19 to 2.21", "CUDA_VISIBLE_DEVICES"),
        *("warning", "[red]x[/red]"),
    ):
        assert expected in words
    assert "''" in text, "a variable that is set to nothing is not unset"


def test_what_tensorflow_prints_stays_out_of_the_document(capfd, monkeypatch):
    def devices():
        print("a package prints to the output")
        os.write(2, b"C++ writes to the error stream\n")
        return (CPU,)

    sound = dataclasses.replace(machine(), devices=devices)
    # Where something is broken, the notices may say why.
    broken = dataclasses.replace(sound, nvidia_gpus=lambda: 1)
    for status, probes in enumerate((sound, broken)):
        monkeypatch.setattr(doctor, "Probes", lambda found=probes: found)
        assert main(["doctor", "--json=-"]) == status
        out, err = capfd.readouterr()
        json.loads(out)
        assert ("C++ writes to the error stream" in err) == bool(status)


@pytest.mark.slow
def test_the_real_machine_is_told_in_a_broken_environment(tmp_path):
    environ = {**os.environ, "KERAS_BACKEND": "jax", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tfamp", "doctor", "--json=-"]
    how = {"cwd": ROOT, "env": environ, "capture_output": True, "text": True}
    completed = subprocess.run(command, **how)
    assert completed.returncode == 1, completed.stderr
    diagnosis = Diagnosis.from_dict(json.loads(completed.stdout))
    assert "KERAS_BACKEND is 'jax'" in diagnosis.findings[0].message
    assert "cpu" in {report.device.kind for report in diagnosis.devices}
    assert isinstance(diagnosis.recommendation, Recommendation)


def test_the_diagnosis_survives_json():
    alone = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    rewrite = {"TF_ENABLE_AUTO_MIXED_PRECISION": "1"}
    probes = machine(CPU, nvidia_gpus=1, TF_CONFIG=alone, **rewrite)
    diagnosis = diagnose(probes)
    assert [each.severity for each in diagnosis.findings] == ["error", "warning"]
    for field in dataclasses.fields(diagnosis):
        assert getattr(diagnosis, field.name), field.name
    assert Diagnosis.from_json(diagnosis.to_json()) == diagnosis


def test_without_tensorflow_no_device_is_looked_for():
    def refuse():
        raise AssertionError("TensorFlow is not there to be asked")

    probes = machine(versions={"tensorflow": None}, nvidia_gpus=1)
    given = {"problems": found_problems, "devices": refuse}
    diagnosis = diagnose(dataclasses.replace(probes, **given))
    assert [finding.message for finding in diagnosis.findings] == [
        "TensorFlow is not installed; tfamp supports TensorFlow 2.19 to 2.21."
    ]
    assert (diagnosis.devices, diagnosis.recommendation) == ((), None)
    text = diagnosis.table()
    assert "missing" in text and "TensorFlow does not run here" in text


# What `tf.sysconfig.get_build_info` tells of the wheels of TensorFlow 2.21 and of
# others; a card, its capability, and what the doctor has to say of its kernels.
WHEEL = ("sm_60", "sm_70", "sm_80", "sm_89", "compute_90")
OLD_WHEEL = ("sm_35", "sm_50", "sm_60", "sm_70", "sm_75", "compute_80")
CARDS = [
    ("Tesla P100", (6, 0), WHEEL, None),
    ("GTX 1080", (6, 1), WHEEL, None),  # code for 6.0 runs on all of 6.x
    ("Tesla T4", (7, 5), WHEEL, None),
    ("RTX 3090", (8, 6), WHEEL, None),
    ("H100", (9, 0), WHEEL, None),
    ("RTX 5090", (12, 0), WHEEL, "compiles every kernel at the first step"),
    ("B200", (10, 0), WHEEL, "compiles every kernel at the first step"),
    ("GTX 980", (5, 2), WHEEL, "no kernel runs on it"),
    ("A100", (8, 0), OLD_WHEEL, None),
    ("RTX 4090", (8, 9), OLD_WHEEL, "compiles every kernel at the first step"),
    ("Tesla T4", (7, 5), ("sm_80", "sm_90"), "no kernel runs on it"),
    ("RTX 5090", (12, 0), ("sm_90", "sm_120a"), None),
]


@pytest.mark.parametrize("name, capability, built_for, told", CARDS)
def test_a_gpu_without_kernels_in_the_wheel_is_told(name, capability, built_for, told):
    card = Device("gpu", name, capability, 2**34)
    found = diagnose(machine(card, CPU, nvidia_gpus=1, built_for=built_for)).findings
    named = [each for each in found if "compute capability" in each.message]
    assert len(named) == (told is not None)
    for each in named:
        assert told in each.message and name in each.message
        assert each.severity == ("error" if "no kernel" in told else "warning")
        assert "tf-nightly" in each.remedy or "was built for it" in each.remedy
