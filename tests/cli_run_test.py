"""`tfamp run`: an unchanged program behaves as under plain Python, but for dtypes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import os, sys, neighbor
print(sys.argv, __name__, os.path.basename(__file__), sys.path[0] == FOLDER)
print(neighbor.VALUE, sys.modules["__main__"].__dict__ is globals())
import keras
print(keras.layers.Dense(1).compute_dtype, os.environ.get("TFAMP_POLICY"))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "neighbor.py").write_text("VALUE = 7\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    text = PROGRAM.replace("FOLDER", repr(str(tmp_path)))
    (tmp_path / "prog.py").write_text(text)
    (tmp_path / "package" / "inside.py").write_text(text)
    return tmp_path


def ran(*words, cwd, tool=("-m", "tfamp", "run"), **environ):
    """Runs Python, and returns status, output and the end of its errors."""
    paths = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(
        [sys.executable, *tool, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **paths, **environ},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("prog.py", "--policy=mixed_bfloat16", "--lr", "3", "--policy=own"),
        pytest.param(
            ("--policy", "mixed_bfloat16", "prog.py", "--lr", "3", "--policy=own"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["policy behind", "two words"],
)
def test_a_script_sees_its_own_command_line_and_neighbors(folder, words):
    done = ran(*words, cwd=folder)
    arguments = ["prog.py", "--lr", "3", "--policy=own"]
    assert done.stdout.splitlines() == [
        f"{arguments} __main__ prog.py True",
        "7 True",
        "bfloat16 mixed_bfloat16",
    ]
    assert (done.returncode, "tfamp: mixed_bfloat16" in done.stderr) == (0, True)


def test_a_module_runs_as_python_dash_m_does(folder):
    done = ran("--policy=mixed_bfloat16", "-m", "package.inside", "-v", cwd=folder)
    first, *rest = done.stdout.splitlines()
    path = str(folder / "package" / "inside.py")
    assert first == f"{[path, '-v']} __main__ inside.py True"
    assert rest == ["7 True", "bfloat16 mixed_bfloat16"]


ENDINGS = {
    "status": "import sys; sys.exit(7)",
    "error": "def f():\n    raise KeyError('lost')\n\nf()",
    "at exit": "import atexit\natexit.register(print, 'over')\nprint('done')",
}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, marks=[] if name == "error" else pytest.mark.slow, id=name)
        for name, text in ENDINGS.items()
    ],
)
def test_a_program_ends_as_under_plain_python(tmp_path, text):
    (tmp_path / "prog.py").write_text(text)
    plain = ran("prog.py", cwd=tmp_path, tool=())
    ours = ran("--policy=float32", "prog.py", cwd=tmp_path)
    said = [line for line in ours.stderr.splitlines() if not line.startswith("tfamp: ")]
    paths = [line.replace(f"{tmp_path}/", "") for line in plain.stderr.splitlines()]
    assert said == paths
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)


STOPPED = """
import keras, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")

def main():
    model.fit(np.full((640, 2), np.inf), np.ones((640, 1)), batch_size=4, verbose=0)

main()
"""


@pytest.mark.slow
def test_a_stopped_training_shows_the_frames_of_the_program_alone(tmp_path):
    (tmp_path / "prog.py").write_text(STOPPED)
    done = ran("--policy=mixed_float16", "prog.py", cwd=tmp_path)
    _, _, told = done.stderr.partition("Traceback (most recent call last):\n")
    assert [line.split(", ")[1] for line in told.splitlines() if "File" in line] == [
        "line 9",
        "line 7",
    ]
    assert told.count("Traceback") == 0 and "LossScaleError: " in told


@pytest.mark.slow
def test_ctrl_c_ends_it_as_plain_python(tmp_path):
    text = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\n"
    (tmp_path / "prog.py").write_text(f"{text}time.sleep(60)\n")
    done = ran("--policy=float32", "prog.py", cwd=tmp_path)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_children_find_the_policy(tmp_path):
    child = "import tfamp; print(tfamp.enable().policy)"
    text = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    (tmp_path / "prog.py").write_text(text)
    done = ran("--policy=mixed_bfloat16", "prog.py", cwd=tmp_path)
    assert done.stdout == "mixed_bfloat16\n"
