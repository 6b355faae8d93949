"""The `tfamp` command: help, wrong calls, and what each command prints and leaves."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest

import tfamp
from tests import made_evidence
from tfamp.cli.main import main

ROOT = Path(__file__).parents[1]
COMMANDS = "doctor run check compare tune memory triage export serve".split()
SCRIPT = """
    import keras
    import numpy as np

    print("a script says something")
    keras.utils.set_random_seed(7)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 8)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    model = keras.Sequential(
        [keras.layers.Dense(16, "relu"), keras.layers.Dense(2, HEAD)], name="tiny"
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x[33, 2] = BAD
    if __name__ == "__main__":
        model.fit(x, y, batch_size=32, epochs=2, validation_split=0.25, verbose=0)
        open("trained", "w").close()
"""
MODULE = """
    import keras
    import numpy as np

    def model():
        found = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(16, "relu", name="hidden"),
             keras.layers.Dense(2, "softmax", name="head")], name="tiny")
        found.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return found

    def data():
        x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
        return x, (x[:, 0] > 0).astype("int32")

    def build(seed=0):
        keras.utils.set_random_seed(seed)
        return model(), data(), data()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Makes a folder with a script and a module the current one."""
    script = textwrap.dedent(SCRIPT)
    told = script.replace("HEAD", "'softmax'").replace("BAD", "0.0")
    (tmp_path / "train.py").write_text(told)
    (tmp_path / "broken.py").write_text(told.replace("= 0.0", "= np.nan"))
    (tmp_path / "small.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("small", None)


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_lists_nine_commands_and_an_example(capsys, flag):
    assert main([flag]) == 0
    out = capsys.readouterr().out
    listed = re.findall(r"^  (\w+) +\w", out, re.MULTILINE)
    assert sorted(set(listed) - {"tfamp"}) == sorted(COMMANDS)
    assert "tfamp run train.py --policy=auto" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(capsys, name):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: tfamp {name}")
    assert f"example:\n  tfamp {name}" in out


WRONG = {
    "nothing": ("", "usage: tfamp"),
    "command": ("docter", "Unknown command or argument 'docter'; did you mean 'doct"),
    "flag": ("check train.py --polcy=x", "Unknown flag '--polcy'; did you mean '--pol"),
    "no target": ("check", "the following arguments are required: TARGET"),
    "file": ("check trian.py", "There is no file 'trian.py'; expected 'script.py'"),
    "module": ("memory nowhere:build", "There is no module 'nowhere'"),
    "policy": ("check train.py --policy=fp16", "Did you mean 'mixed_float16'?"),
    "word": ("compare train.py --fail-on=wrose", "Did you mean 'worse'?"),
    "size": ("memory train.py --max_memory=much", "max_memory"),
    "program": ("run nowhere.py", "there is no file 'nowhere.py'"),
    "no program": ("run --policy=auto", "no program is named"),
}


@pytest.mark.parametrize("line, told", WRONG.values(), ids=WRONG)
def test_wrong_calls_are_told_in_a_line_with_status_2(capsys, line, told):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, told in err) == ("", True)


@pytest.mark.parametrize("line", ["--help", "compare --help", "check train.py --zzz"])
def test_help_and_typos_load_nothing_heavy(line):
    command = [sys.executable, "-X", "importtime", "-m", "tfamp", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == (0 if "help" in line else 2)
    names = re.findall(r"import time:.*\| +(\w+)", done.stderr)
    assert "tfamp" in names
    assert not {*names} & {"tensorflow", "keras", "numpy", "rich"}


@pytest.mark.parametrize("target", ["train.py", "small:build"])
def test_check_reads_scripts_and_functions(capsys, folder, target):
    assert main(["check", target, "--policy=mixed_bfloat16"]) == 0
    out, err = capsys.readouterr()
    assert "'tiny'" in out and "bfloat16" in out
    assert ("a script says something" in err) == (target == "train.py")
    assert not (folder / "trained").exists(), "the script went on"
    assert keras.config.dtype_policy().name == "float32"


def test_a_saved_model_is_checked_with_data_beside_it_and_exported(folder):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.save("m.keras")
    assert main(["check", "m.keras", "--data=small:data", "--json=found.json"]) == 0
    assert not tfamp.data.Findings.from_json(folder / "found.json").errors
    assert main(["export", "m.keras", "--format=saved_model", "--out=there"]) == 0
    x = np.ones((3, 8), "float32")
    found = tfamp.load_exported("there").predict(x)
    np.testing.assert_allclose(found, model(x), rtol=1e-5)


def test_what_is_wrong_ends_with_status_1_and_a_script_is_read_under_its_policy(
    capsys, folder
):
    assert main(["check", "train.py", "--policy=keras:mixed_bfloat16"]) == 1
    assert "head" in capsys.readouterr().out
    text = (folder / "train.py").read_text()
    line = "keras.config.set_dtype_policy('mixed_bfloat16')\n"
    (folder / "own.py").write_text(f"import keras\n{line}{text}")
    assert main(["check", "own.py"]) == 1
    assert "bfloat16" in capsys.readouterr().out
    assert main(["check", "own.py", "--policy=float32"]) == 0
    assert keras.config.dtype_policy().name == "float32"


def test_a_script_that_fails_shows_its_own_traceback(capsys, folder):
    (folder / "bad.py").write_text("def f():\n    raise KeyError('no')\nf()\n")
    assert main(["check", "bad.py"]) == 1
    err = capsys.readouterr().err
    assert "KeyError: 'no'" in err and 'bad.py", line 3' in err
    assert "runpy" not in err and "targets.py" not in err
    assert "tfamp check: 'bad.py' failed before its first `fit`" in err


def test_triage_takes_the_batch_that_is_named(capsys):
    causes = [main(["triage", "broken.py", f"--batch={number}"]) for number in (0, 1)]
    out = capsys.readouterr().out
    assert causes == [0, 0]
    assert out.index("cause is none") < out.index("cause is data")


def test_triage_asks_for_data_where_there_are_none(capsys):
    assert main(["triage", "small:model"]) == 1
    assert "Name the data by --data=module:function." in capsys.readouterr().err


def test_compare_quick_times_a_script(capsys):
    argv = ["compare", "train.py", "--quick", "--policies=float32,mixed_bfloat16"]
    assert main([*argv, "--json=found.json"]) == 0
    assert "float32" in capsys.readouterr().out
    found = tfamp.Measurement.from_json("found.json")
    assert {"float32", "mixed_bfloat16"} == {each.policy for each in found.times}


def test_memory_is_that_of_a_batch_of_the_data(capsys):
    assert main(["memory", "small:build", "--json=found.json"]) == 0
    assert main(["memory", "small:build", "--batch_size=64", "--json=other.json"]) == 0
    first, other = (Path(f"{x}.json").read_text() for x in ("found", "other"))
    assert json.loads(first)["batch_size"] == 32
    assert json.loads(other)["batch_size"] == 64


def test_what_a_report_lacks_is_said_before_anything_is_trained(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr(tfamp, "compare", lambda *args, **kwargs: 1 / 0)
    assert main(["compare", "train.py"]) == 1
    assert "jinja2" in capsys.readouterr().err


WORSE = {"float32": (1.0, 0.98), "mixed_bfloat16": (1.9, 0.5)}


@pytest.mark.parametrize(
    "policies, fail_on, status",
    [(None, "worse,slower", 0), (WORSE, "worse", 1), (WORSE, "slower,failed", 0)],
    ids=["faster", "worse", "worse, asked for others"],
)
def test_the_status_of_compare_tells_what_was_asked(
    policies, fail_on, status, capsys, monkeypatch
):
    pytest.importorskip("jinja2")
    found = made_evidence.evidence(policies)
    monkeypatch.setattr(tfamp, "compare", lambda *args, **kwargs: found)
    assert main(["compare", "train.py", f"--fail-on={fail_on}", "--out=."]) == status
    assert ("is worse: worse" in capsys.readouterr().err) == bool(status)


@pytest.mark.slow
def test_compare_trains_a_script_in_processes_of_its_own(capsys, folder):
    pytest.importorskip("jinja2")
    line = "compare train.py --policies=float32,mixed_bfloat16+xla --seeds=2"
    assert main([*line.split(), "--out=there", "--fail-on=failed"]) == 0
    out, err = capsys.readouterr()
    assert "Report: there/report.html" in out and "[4/4]" in err
    record = json.loads((folder / "there" / "report.json").read_text())
    seeds = [tuple(run["final_metrics"].values()) for run in record["runs"]]
    assert len(set(seeds)) > 2, "the seed that a script sets makes all runs the same"
    assert record["on_validation"]
    assert any("asks for epochs=2" in note for note in record["notes"])
    assert f"tfamp {line}" in record["context"]["command"]
    assert "<html" in (folder / "there" / "report.html").read_text()


@pytest.mark.slow
def test_tune_writes_a_plan_for_a_script(capsys, folder):
    argv = ["tune", "train.py", "--policy=mixed_bfloat16", "--tolerance=0.5"]
    assert main([*argv, "--max_evaluations=2", "--out=p.json"]) == 0
    assert "tfamp run --policy=p.json" in capsys.readouterr().out
    plan = tfamp.PrecisionPlan.from_json("p.json")
    assert plan.policy in ("mixed_bfloat16", "float32")


@pytest.mark.slow("it starts a process")
def test_tables_are_plain_on_a_terminal_of_ascii(folder):
    environ = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT), "PATH": ""}
    command = [sys.executable, "-m", "tfamp", "memory", "small:model"]
    done = subprocess.run(command, env=environ, capture_output=True, check=True)
    assert b"peak" in done.stdout and b"---" in done.stdout and b"?" not in done.stdout
    assert done.stderr == b"", "TensorFlow's notices"
