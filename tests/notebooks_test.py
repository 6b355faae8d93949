"""Notebooks are what their scripts say, byte for byte, and run from top to bottom."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
SCRIPTS = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
IDS = [script.stem for script in SCRIPTS]
MAX_NOTEBOOK_BYTES = 300_000
# Values that make each notebook short, by the names in its cell tagged `parameters`.
SMALL = {
    "01_quickstart": {"EPOCHS": 2},
    "02_loss_scale": {"EPOCHS": 5, "BROKEN_EPOCHS": 2},
    "03_data": {"NUM_CUTS": 40, "SECONDS": 1},
    "04_is_it_worth_it": {
        "EPOCHS": 1,
        "NUM_SEEDS": 1,
        "MAX_MORE": 1,
        "WATCHED_EPOCHS": 2,
        "SECONDS": 1,
    },
    "05_why_nan": {"EPOCHS": 2},
    "06_fit_it_in_memory": {
        "MAX_BATCH_SIZE": 8,
        "START": 16,
        "TARGET": 32,
        "MAX_PART": 16,
    },
    "07_tune": {"EPOCHS": 2, "SECONDS": 2, "NUM_SEEDS": 1},
    "08_scale_out": {"EPOCHS": 20},
    "09_inference": {
        "EPOCHS": 2,
        "SHADED_EPOCHS": 2,
        "BUDGET_SECONDS": 10,
        "NUM_CALLS": 20,
    },
}

spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


def stored(script: Path) -> dict:
    """Returns the notebook beside a script."""
    return json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))


def test_every_notebook_has_a_script():
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == IDS


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_notebook_is_what_build_makes_of_its_script(script, tmp_path, capsys):
    assert build.main(["build.py", f"--to={tmp_path}", script.stem]) == 0
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
    assert content.cells[1].source.startswith('%pip install -q "tfamp')
    assert content.metadata.accelerator == "GPU"
    assert content.metadata.colab.gpuType == "T4"
    tagged = [c for c in content.cells if "parameters" in c.metadata.get("tags", [])]
    assert [cell.cell_type for cell in tagged] == ["code"]
    assert "Where to go next" in last.source


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_outputs_are_small_and_tell_nothing_of_the_machine_but_its_kind(script):
    text = script.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert len(text) < MAX_NOTEBOOK_BYTES
    content = json.loads(text)
    is_run = "outputs_from" in content["metadata"]
    for cell in build.code_cells(content):
        assert bool(cell["execution_count"]) == is_run
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            said = output.get("text", output.get("data", {}).get("text/plain", []))
            said = "".join(said)
            assert not re.search(r"(?<![\w.:/])/(tmp|home|root|usr|work)/", said), said
            assert not build.NOTICE.search(said), said


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_small_parameters_leave_a_program_of_public_names(script):
    content = build.small(stored(script), SMALL[script.stem])
    for cell in build.code_cells(content):
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                assert "keras.src" not in text
                assert not (text.startswith("tfamp.") and "._" in text), text


@pytest.mark.slow("the claims have tests of theirs")
@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_notebook_runs_in_a_real_kernel(script, tmp_path):
    pytest.importorskip("nbclient")
    if script.stem == "09_inference":
        pytest.importorskip("onnxruntime", reason="needs tfamp[onnx]")
    content = build.small(build.without_outputs(script), SMALL[script.stem])
    executed = build.execute(content, tmp_path)
    cells = build.code_cells(executed)
    assert all(cell["execution_count"] for cell in cells if cell["source"])
