"""Notebooks are what their scripts say, byte for byte, and run from top to bottom."""

import ast
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
SCRIPTS = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
IDS = [script.stem for script in SCRIPTS]
MAX_CODE_LINES = 15
MAX_CELL_SECONDS = 300

spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


def code_cells(script: Path) -> list[str]:
    """Returns the text of the code cells of a notebook."""
    content = json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))
    return [
        "".join(cell["source"])
        for cell in content["cells"]
        if cell["cell_type"] == "code"
    ]


def test_every_notebook_has_a_script():
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == IDS


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_notebook_is_what_build_makes_of_its_script(script, tmp_path, capsys):
    assert build.main(["build.py", str(tmp_path)]) == 0
    assert str(tmp_path / f"{script.stem}.ipynb") in capsys.readouterr().out
    built = (tmp_path / f"{script.stem}.ipynb").read_bytes()
    assert built == script.with_suffix(".ipynb").read_bytes(), "run `make notebooks`"


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_notebook_has_the_parts_that_readers_look_for(script):
    nbformat = pytest.importorskip("nbformat")
    content = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(content)
    first, *_, last = content.cells
    colab = f"/blob/main/notebooks/{script.stem}.ipynb"
    assert first.source.startswith("# ")
    assert "colab.research.google.com/assets/colab-badge.svg" in first.source
    assert colab in first.source
    assert "pip" in content.cells[1].source
    assert "Where to go next" in last.source
    assert not any(cell.get("outputs") for cell in content.cells)


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_code_cells_are_short_and_use_public_names(script):
    for code in code_cells(script):
        assert len(code.splitlines()) <= MAX_CODE_LINES, code
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                assert "keras.src" not in text
                assert not (text.startswith("tfamp.") and "._" in text), text


def test_same_text_twice_is_refused():
    with pytest.raises(ValueError, match="^Two cells have the same text"):
        build.cells("# %%\nx = 1\n# %%\nx = 1\n")


def test_id_of_a_cell_stays_when_a_cell_is_put_before_it():
    (alone,) = build.cells("# %%\nx = 1\n")
    _, second = build.cells("# %% [markdown]\n# Text\n\n# %%\nx = 1\n")
    assert second == alone


@pytest.mark.filterwarnings(
    "ignore:'mixed_(bfloat16|float16)' will be slow",
    "ignore:FigureCanvasAgg is non-interactive",
)
def test_cells_of_the_quickstart_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.setenv("TFAMP_SMOKE", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = {}
    for code in code_cells(FOLDER / "01_quickstart.py"):
        exec(code, names)
    pyplot.close("all")
    printed = capsys.readouterr().out
    assert "wrong by 9: float32 0.9999, stock 0.0000, tfamp 0.9999" in printed
    assert "same dtypes: True\nsame predictions, bit for bit: True" in printed


@pytest.mark.whole(
    "the quickstart's cells run above, and the claims have tests of theirs"
)
@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_notebook_runs_in_a_real_kernel(script, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    # A kernel of this very interpreter, whatever kernels the machine has.
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "Python 3", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    monkeypatch.setenv("TFAMP_SMOKE", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    search = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, search)))
    content = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    nbclient.NotebookClient(
        content,
        timeout=MAX_CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    assert all(
        cell.execution_count for cell in content.cells if cell.cell_type == "code"
    )
