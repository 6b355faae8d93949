"""Recipes pasted into the cell of a notebook, in a real kernel, as into Colab.

A kernel is started with flags of its own, such as `-f kernel.json`, which are none of
the recipe's; and a cell is run again after a look at what it printed.
"""

import json
import os
import sys

import pytest

from tests.recipe_modules import FOLDER, RECIPES, ROOT
from tests.recipes_test import NEEDS, check

nbclient = pytest.importorskip("nbclient", reason="runs cells in a kernel")
nbformat = pytest.importorskip("nbformat", reason="runs cells in a kernel")

SMOKE = 'flags.DEFINE_boolean("smoke", False'


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_pasted_recipe_runs_and_one_of_them_again(recipe, monkeypatch, tmp_path):
    pytest.importorskip(NEEDS.get(recipe, "tfamp"), reason="the recipe asks for it")
    text = (FOLDER / recipe).read_text(encoding="utf-8")
    # What a reader does who wants to see only that it runs: another default.
    assert SMOKE in text
    text = text.replace(SMOKE, SMOKE.replace("False", "True"))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    times = 2 if recipe == "train_digits.py" else 1
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text) for _ in range(times)],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
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
    check(json.loads("".join(printed).strip().splitlines()[-1]))
