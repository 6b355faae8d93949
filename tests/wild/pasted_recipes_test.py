"""Recipes pasted into the cell of a notebook, in a real kernel, as into Colab.

A kernel is started with flags of its own, such as `-f kernel.json`, which are none of
the recipe's; and a cell is run again after a look at what it printed.
"""

import json
import os
import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="runs cells in a kernel")
nbformat = pytest.importorskip("nbformat", reason="runs cells in a kernel")
pytest.importorskip("sklearn", reason="needs the extra `data`")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes"
RECIPES = sorted(path.name for path in FOLDER.glob("*.py"))
NEEDS = {
    "compare_digits.py": "cloudpickle",
    "export_and_serve.py": "uvicorn",
    "quantize_digits.py": "onnx",
    "train_bert.py": "keras_hub",
    "train_vit.py": "keras_hub",
}
SMOKE = 'flags.DEFINE_boolean("smoke", False'
SECONDS = 300


def lines_of_a_cell_run_twice(recipe, monkeypatch, folder, times=2):
    """Returns what the last run of the cell printed, line by line."""
    text = (FOLDER / recipe).read_text(encoding="utf-8")
    # What a reader does who wants to see only that it runs: another default.
    assert SMOKE in text
    text = text.replace(SMOKE, SMOKE.replace("False", "True"))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text) for _ in range(times)],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}
    )
    client.create_kernel_manager()
    # The interpreter of the tests, whatever kernels are installed.
    client.km.kernel_cmd = [
        *(sys.executable, "-m", "ipykernel_launcher"),
        *("-f", "{connection_file}"),
    ]
    client.execute()
    outputs = notebook.cells[-1].outputs
    printed = [each.text for each in outputs if each.get("name") == "stdout"]
    return "".join(printed).strip().splitlines()


def check_record(line):
    record = json.loads(line)
    assert record["policy"]
    assert any(isinstance(value, float) for value in record.values())


@pytest.mark.slow
def test_a_pasted_recipe_runs_and_runs_again(monkeypatch, tmp_path):
    lines = lines_of_a_cell_run_twice("train_digits.py", monkeypatch, tmp_path)
    check_record(lines[-1])


@pytest.mark.slow("one recipe is pasted above; each takes a kernel of its own")
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "train_digits.py"])
def test_every_recipe_can_be_pasted(recipe, monkeypatch, tmp_path):
    if recipe in NEEDS:
        pytest.importorskip(NEEDS[recipe], reason="the recipe asks for it")
    lines = lines_of_a_cell_run_twice(recipe, monkeypatch, tmp_path, times=1)
    check_record(lines[-1])
