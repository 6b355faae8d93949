"""The `tfamp` command: help, version, wrong calls, one API and one command a tool."""

import inspect
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

import tfamp
from tfamp.cli import main as cli
from tfamp.serving.server.main import serve

ROOT = Path(__file__).parents[1]


def command(name):
    """Returns a command by its name."""
    return import_module(f"tfamp.cli.{cli._MODULES[name]}").COMMANDS[name]


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_lists_every_command_by_when_it_is_of_use(capsys, flag):
    assert cli.main([flag]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: tfamp [--help] [--version] <command> [flags]\n")
    groups = [line for line in out.splitlines() if line.endswith(":")]
    assert groups == [
        *("check a machine:", "before training:", "comparing:", "after trouble:"),
        *("leaving:", "serving:"),
    ]
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    of_functions = {"estimate_memory", "measure_policies"}
    assert {*listed, *of_functions} == set(cli._MODULES)
    assert (err, max(map(len, out.splitlines())) <= 80) == ("", True)


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version_is_the_packages(capsys, flag):
    assert cli.main([flag]) == 0
    assert capsys.readouterr().out == f"tfamp {tfamp.__version__}\n"


def test_no_command_is_answered_with_the_help_as_an_error(capsys):
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith("usage: tfamp")) == ("", True)


WRONG = {
    "docter": "Unknown command 'docter'; expected 'doctor'. Did you mean 'doctor'? ",
    "zzz": "Unknown command 'zzz'; expected 'doctor'. ",
    "--verison": "Unknown flag '--verison'; expected '--help', '--version'. Did you "
    "mean '--version'? ",
}


@pytest.mark.parametrize("argument", WRONG)
def test_what_is_unknown_is_an_error(capsys, monkeypatch, argument):
    # The list of commands grows; the messages here are about one.
    monkeypatch.setattr(cli, "_MODULES", {"doctor": "doctor"})
    assert cli.main([argument]) == 2
    message = f"tfamp: {WRONG[argument]}See `tfamp --help`.\n"
    assert capsys.readouterr() == ("", message)


def test_a_command_gets_the_rest_of_the_arguments_and_gives_the_status(monkeypatch):
    calls = []
    fake = types.SimpleNamespace(main=lambda argv: calls.append(argv) or 7)
    module = types.SimpleNamespace(COMMANDS={"a_fake": fake})
    monkeypatch.setitem(sys.modules, "tfamp.cli.fake", module)
    monkeypatch.setitem(cli._MODULES, "a_fake", "fake")
    assert cli.main(["a-fake", "--json", "x"]) == 7
    monkeypatch.setattr(sys, "argv", ["tfamp", "a_fake"])
    assert cli.main() == 7
    assert calls == [["--json", "x"], []]


# Command -> its function, and the arguments that no flag can be, or another one is.
IN_PYTHON = {
    *("model", "data", "dataset", "train", "validation", "clock"),
    *("build_model", "build_model_or_model", "model_or_build"),
}
FUNCTIONS = {
    "doctor": (tfamp.doctor, set()),
    "check": (tfamp.data.check, set()),
    "lint": (tfamp.lint, {"loss", "optimizer"}),
    "assignment": (tfamp.assignment, set()),
    # `--policy=float32+xla`, and `devices` and `tf32` of other machines.
    "prove": (tfamp.prove, {"devices", "tf32"}),
    "ranges": (tfamp.ranges, set()),
    "sensitivity": (tfamp.sensitivity, set()),
    "measure": (tfamp.measure_policies, set()),
    "measure_policies": (tfamp.measure_policies, set()),
    "tune": (tfamp.tune, set()),
    "memory": (tfamp.estimate_memory, set()),
    "estimate_memory": (tfamp.estimate_memory, set()),
    "find_batch_size": (tfamp.find_batch_size, {"verbose", "on_trial"}),
    "bottleneck": (tfamp.data.bottleneck, set()),
    "lr_find": (tfamp.training.lr_find, set()),
    # `--out`, and what the command tells the report.
    "compare": (tfamp.compare, {"batch_size", "directory", "command", "on_run"}),
    "triage": (tfamp.triage, {"batch_or_bundle"}),
    "freeze": (tfamp.freeze, {"sample", "in_place"}),
    # A folder is `--out`; a metric may be a function.
    "export": (tfamp.export, {"path", "metric"}),
    # Typed without a flag, and a file in the place of what it holds.
    "serve": (serve, {"paths", "load", "on_start"}),
}


@pytest.mark.parametrize("name", cli._MODULES)
def test_a_command_has_the_arguments_of_its_function(name, capsys):
    function, absent = FUNCTIONS[name]
    arguments = set(inspect.signature(function).parameters) - IN_PYTHON - absent
    arguments = {"max_memory" if a == "max_memory_bytes" else a for a in arguments}
    assert arguments <= {flag.name for flag in command(name).flags}
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    place = "" if command(name).argument is None else f" {command(name).argument}"
    assert text.startswith(f"usage: tfamp {name}{place} [flags]\n")
    assert all(f"--{each}\n" in text for each in (*arguments, "json"))
    assert "--nojson" not in text and text.count("-h, ") == 1


ON_MODELS = [name for name in cli._MODULES if command(name).argument == "module:build"]
# Their flag is `--policies`.
OF_POLICIES = ("compare", "measure", "measure_policies")
FAILURES = {
    "no module": (["nowhere:build"], 1, "There is no module 'nowhere'"),
    "no function": (["tests.cli_main_test:bild"], 1, "has no function 'bild'."),
    "nothing": ([], 2, "Nothing is named; expected one 'module:build' and flags"),
    "two": (["a:b", "c:d"], 2, "Unexpected argument 'c:d'"),
    "flag": (["a:b", "--zzz"], 2, "Unknown command line flag 'zzz'. See"),
    "policy": (["a:b", "--policy=fp16"], 2, "Unknown `--policy` 'fp16'; expected"),
}


@pytest.mark.quick(
    "no module-estimate_memory",
    "no function-check",
    "nothing-lint",
    "two-assignment",
    "flag-prove",
)
@pytest.mark.parametrize("name", [n for n in ON_MODELS if n not in OF_POLICIES])
@pytest.mark.parametrize("argv, status, message", FAILURES.values(), ids=FAILURES)
def test_commands_on_a_model_fail_alike(capsys, name, argv, status, message):
    if name == "find_batch_size" and status == 1:
        pytest.skip("its trials load the module")
    assert cli.main([name, *argv]) == status
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"tfamp {name}: ") and message in err


@pytest.mark.parametrize("argument", ["--help", "--version", "docter"])
def test_python_m_tfamp_is_the_command_and_loads_nothing_heavy(argument):
    command = [sys.executable, "-X", "importtime", "-m", "tfamp", argument]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (2 if argument == "docter" else 0)
    loaded = {
        line.rsplit("|", 1)[1].strip().split(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "tfamp" in loaded
    assert not loaded & {"tensorflow", "keras", "numpy", "rich", "absl"}
