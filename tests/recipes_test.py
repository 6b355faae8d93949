"""Every recipe is one file that a reader can run, and trains what it says."""

import ast
import math

import pytest

from tests.recipe_modules import FOLDER, RECIPES, record_of, run_recipe

pytest.importorskip("sklearn", reason="needs the extra `data`")
NEEDS = {
    "train_bert.py": "keras_hub",
    "train_vit.py": "keras_hub",
    "export_and_serve.py": "starlette",
    "quantize_digits.py": "onnx",
}
# The losses of a game say nothing of quality; workers build in a strategy's scope.
NOT_COMPARED = {"train_gan.py", "train_workers.py", "compare_digits.py"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_one_short_file_that_says_what_a_reader_needs(recipe):
    text = (FOLDER / recipe).read_text()
    assert 60 <= len(text.splitlines()) <= 150
    assert 1 <= text.count("flags.DEFINE_") <= 8
    opening = ast.get_docstring(ast.parse(text))
    for word in ("Data:", "Command:", "Time:", "Expect:"):
        assert f"\n{word} " in opening
    assert f"python recipes/{recipe}" in opening
    target = f"tfamp compare recipes.{recipe.removesuffix('.py')}:build"
    if recipe not in NOT_COMPARED | {"export_and_serve.py"}:
        assert target in opening


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_imports_no_other_and_public_names_alone(recipe):
    names = {path.removesuffix(".py") for path in RECIPES}
    for node in ast.walk(ast.parse((FOLDER / recipe).read_text())):
        if isinstance(node, ast.Import):
            assert not names & {alias.name for alias in node.names}
            assert all(not alias.name.startswith("tfamp.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module not in names
            assert not node.module.startswith("tfamp.")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id != "tfamp" or not node.attr.startswith("_")


def check(record):
    """Checks what every recipe says of a run that went well."""
    assert record["policy"]
    numbers = [value for value in record.values() if isinstance(value, float)]
    assert numbers and all(map(math.isfinite, numbers))


def test_a_recipe_runs_as_its_reader_starts_it(tmp_path):
    record = record_of(run_recipe("custom_loop.py", "--smoke", folder=tmp_path))
    check(record)
    # Five microbatches: four make an update, `flush` applies the fifth.
    assert (record["updates"], record["skipped"]) == (2, 0)


@pytest.mark.slow("one recipe runs in the test above")
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs(recipe, tmp_path):
    if recipe in NEEDS:
        pytest.importorskip(NEEDS[recipe])
    finished = run_recipe(recipe, "--smoke", folder=tmp_path)
    record = record_of(finished)
    check(record)
    if recipe == "compare_digits.py":  # what a newcomer sees first
        assert finished.stderr == ""
        assert (tmp_path / "reports").is_dir()
    elif recipe == "train_workers.py":
        assert not any(tmp_path.iterdir())
    assert record.get("same_answers", 1.0) == 1.0


@pytest.mark.slow("the data and the model of the recipes are held by what is above")
@pytest.mark.parametrize(
    "recipe, arguments, name, least",
    [
        ("train_digits.py", ["--epochs=5"], "accuracy", 0.98),
        ("train_tabular.py", [], "treated_damaged", 0.9),
        ("train_workers.py", [], "accuracy", 0.94),
        ("train_forecast.py", [], "mae_if_it_stays", 0),
    ],
)
def test_a_recipe_learns_what_it_says(recipe, arguments, name, least, tmp_path):
    arguments = ["--policy=float32", *arguments]
    record = record_of(run_recipe(recipe, *arguments, folder=tmp_path))
    assert record[name] >= least
    assert record.get("treated_damaged", 1) >= record.get("naive_damaged", 0) + 0.1
    assert record.get("mae", 0) <= 0.98 * record.get("mae_if_it_stays", 0)
