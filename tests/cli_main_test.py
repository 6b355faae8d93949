"""The `tfamp` command: help, version, commands that do not exist, handing over."""

import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

import tfamp
from tfamp.cli import main as cli

ROOT = Path(__file__).parents[1]


def run(*arguments):
    """Runs `python -m tfamp` in a fresh interpreter."""
    command = [sys.executable, "-X", "importtime", "-m", "tfamp", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_lists_every_command(capsys, flag):
    assert cli.main([flag]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: tfamp [--help] [--version] <command> [flags]\n")
    for name, command in cli._COMMANDS.items():
        assert f"  {name}" in out
        assert command.purpose in out
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version_is_the_packages(capsys, flag):
    assert cli.main([flag]) == 0
    assert capsys.readouterr().out == f"tfamp {tfamp.__version__}\n"


def test_no_command_is_answered_with_the_help_as_an_error(capsys):
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: tfamp")


WRONG = {
    "misspelt command": (
        "docter",
        "tfamp: Unknown command 'docter'; expected 'doctor'. Did you mean 'doctor'? "
        "See `tfamp --help`.\n",
    ),
    "another word": (
        "zzz",
        "tfamp: Unknown command 'zzz'; expected 'doctor'. See `tfamp --help`.\n",
    ),
    "misspelt flag": (
        "--verison",
        "tfamp: Unknown flag '--verison'; expected '--help', '--version'. Did you mean "
        "'--version'? See `tfamp --help`.\n",
    ),
}


@pytest.mark.parametrize("argument, message", WRONG.values(), ids=WRONG)
def test_what_is_unknown_is_an_error(capsys, monkeypatch, argument, message):
    # The list of commands grows; the messages here are about one.
    monkeypatch.setattr(cli, "_COMMANDS", {"doctor": cli._COMMANDS["doctor"]})
    assert cli.main([argument]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == message


def test_a_command_gets_the_rest_of_the_arguments_and_gives_the_status(monkeypatch):
    calls = []

    def command(argv):
        calls.append(argv)
        return 7

    module = types.SimpleNamespace(main=command)
    monkeypatch.setitem(sys.modules, "tfamp.cli.fake", module)
    monkeypatch.setitem(cli._COMMANDS, "fake", cli._Command("tfamp.cli.fake", "Fake."))
    assert cli.main(["fake", "--json", "x"]) == 7
    monkeypatch.setattr(sys, "argv", ["tfamp", "fake"])
    assert cli.main() == 7
    assert calls == [["--json", "x"], []]


def test_every_listed_command_exists():
    for command in cli._COMMANDS.values():
        module = __import__(command.module, fromlist=["main"])
        assert callable(module.main)


# What takes a model -> some of its flags.
ON_MODELS = {
    "lint": ("policy", "json", "fail_on", "silence"),
    "memory": (
        "batch_size",
        "policy",
        "training",
        "max_memory",
        "find",
        "json",
        "plot",
    ),
    "prove": ("policy", "json", "seconds", "training"),
}
FAILURES = {
    "no module": (["nowhere:build"], 1, "There is no module 'nowhere'"),
    "no function": (["buildable:bild"], 1, "Did you mean 'build'?"),
    "no folder": (["buildable:build", "--json=no/x"], 1, "No such file or directory"),
    "nothing": ([], 2, "Nothing is named; expected one 'module:build' and flags"),
    "two": (["a:b", "c:d"], 2, "Unexpected argument 'c:d'"),
    "policy": (["a:b", "--policy=fp16"], 2, "Unknown `--policy` 'fp16'; expected"),
}
MODULE = """
import keras, numpy

def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model, (numpy.zeros((8, 2)), numpy.zeros((8, 1)))
"""


@pytest.mark.parametrize("name", ON_MODELS)
@pytest.mark.parametrize("argv, status, message", FAILURES.values(), ids=FAILURES)
def test_commands_on_a_model_fail_alike(
    tmp_path, monkeypatch, capsys, name, argv, status, message
):
    (tmp_path / "buildable.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    main = importlib.import_module(f"tfamp.cli.{name}").main
    assert main(["--policy=float32", *argv]) == status
    sys.modules.pop("buildable", None)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"tfamp {name}: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("name, flags", ON_MODELS.items(), ids=ON_MODELS)
def test_help_of_a_command_names_its_flags(capsys, name, flags):
    assert importlib.import_module(f"tfamp.cli.{name}").main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: tfamp {name} module:build [flags]")
    assert [flag for flag in flags if f"--{flag}" not in text] == []


@pytest.mark.parametrize("argument", ["--help", "--version", "docter"])
def test_python_m_tfamp_is_the_command_and_loads_nothing_heavy(argument):
    completed = run(argument)
    assert completed.returncode == (2 if argument == "docter" else 0)
    loaded = {
        line.rsplit("|", 1)[1].strip().split(".")[0]
        for line in completed.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "tfamp" in loaded
    assert not loaded & {"tensorflow", "keras", "numpy", "rich", "absl"}
