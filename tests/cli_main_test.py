"""The `tfamp` command: help, version, commands that do not exist, handing over."""

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
