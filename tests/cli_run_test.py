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
print(sys.argv[1:], __name__, os.path.basename(__file__), sys.path[0] == FOLDER)
print(sys.argv[0], neighbor.VALUE, sys.modules["__main__"].__dict__ is globals())
import keras
print(keras.layers.Dense(1).compute_dtype, os.environ.get("TFAMP_POLICY"))
"""


def ran(*words, cwd, tool=("-m", "tfamp", "run")):
    """Runs Python; a word of several lines is the program, first written to a file."""
    if "\n" in words[-1]:
        (cwd / "prog.py").write_text(words[-1])
        words = (*words[:-1], "prog.py")
    paths = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(
        [sys.executable, *tool, *words],
        cwd=cwd,
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
    )


# Words of the command, and the file that it runs.
WORDS = {
    "script": ("prog.py --policy=mixed_bfloat16 --policy=own", "prog.py"),
    "policy in front": ("--policy mixed_bfloat16 prog.py --policy=own", "prog.py"),
    "module": ("--policy=mixed_bfloat16 -m pack.inside --policy=own", "pack/inside.py"),
}


@pytest.mark.quick("script")
@pytest.mark.parametrize("words, file", WORDS.values(), ids=WORDS)
def test_a_program_sees_its_own_command_line_and_neighbors(tmp_path, words, file):
    (tmp_path / "neighbor.py").write_text("VALUE = 7\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / file).write_text(PROGRAM.replace("FOLDER", repr(str(tmp_path))))
    done = ran(*words.split(), cwd=tmp_path)
    shown = str(tmp_path / file) if "-m" in words else file
    assert done.stdout.splitlines() == [
        f"['--policy=own'] __main__ {Path(file).name} True",
        f"{shown} 7 True",
        "bfloat16 mixed_bfloat16",
    ]
    assert (done.returncode, "tfamp: mixed_bfloat16" in done.stderr) == (0, True)


ENDINGS = {
    "status": "import sys\nsys.exit(7)",
    "error": "def f():\n    raise KeyError('lost')\n\nf()",
    "at exit": "import atexit\natexit.register(print, 'over')\nprint('done')",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", ENDINGS.values(), ids=ENDINGS)
def test_a_program_ends_as_under_plain_python(tmp_path, text):
    plain = ran(text, cwd=tmp_path, tool=())
    ours = ran("--policy=float32", text, cwd=tmp_path)
    said = [line for line in ours.stderr.splitlines() if not line.startswith("tfamp: ")]
    paths = [line.replace(f"{tmp_path}/", "") for line in plain.stderr.splitlines()]
    assert said == paths
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)


STOPPED = """
import keras, numpy as np
model = keras.Sequential([keras.Input((2,)), *map(keras.layers.Dense, (4, 1))])
model.compile("sgd", "mse")

def main():
    model.fit(np.full((640, 2), np.inf), np.ones((640, 1)), batch_size=4, verbose=0)

main()
"""


@pytest.mark.slow
def test_a_stopped_training_shows_the_frames_of_the_program_alone(tmp_path):
    done = ran("--policy=mixed_float16", STOPPED, cwd=tmp_path)
    _, _, told = done.stderr.partition("Traceback (most recent call last):\n")
    lines = [line.split(", ")[1] for line in told.splitlines() if "File" in line]
    assert lines == ["line 9", "line 7"]
    assert told.count("Traceback") == 0 and "LossScaleError: " in told


@pytest.mark.slow
def test_ctrl_c_ends_it_as_plain_python(tmp_path):
    text = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\n"
    done = ran("--policy=float32", f"{text}time.sleep(60)\n", cwd=tmp_path)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow("the variable of the environment is in the program above")
def test_children_find_the_policy(tmp_path):
    child = "import tfamp; print(tfamp.enable().policy)"
    text = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    done = ran("--policy=mixed_bfloat16", text, cwd=tmp_path)
    assert done.stdout == "mixed_bfloat16\n"
