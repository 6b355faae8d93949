"""Every recipe is one file that a reader can run, and trains what it says."""

import ast
import contextlib
import dataclasses
import importlib.util
import math
import subprocess
import sys

import numpy as np
import pytest
from absl import flags

import tfamp
from tests import made_evidence
from tests.recipe_modules import FOLDER, RECIPES, ROOT, record_of, run_recipe
from tfamp.machine.speeds import Device

pytest.importorskip("sklearn", reason="needs the extra `data`")
NEEDS = {
    "train_bert.py": "keras_hub",
    "train_vit.py": "keras_hub",
    "export_and_serve.py": "starlette",
    "quantize_digits.py": "onnx",
}
# The losses of a game say nothing of quality; workers build in a strategy's scope.
NOT_COMPARED = {"train_gan.py", "train_workers.py", "compare_digits.py"}


def test_every_kind_of_recipe_is_there():
    assert len(RECIPES) == 14
    assert {"train_digits.py", "train_workers.py", "export_and_serve.py"} <= {*RECIPES}


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
    """The others are in the whole tier; this one has the most of its own."""
    record = record_of(run_recipe("custom_loop.py", "--smoke", folder=tmp_path))
    check(record)
    # Five microbatches: four make an update, `flush` applies the fifth.
    assert (record["updates"], record["skipped"]) == (2, 0)


@pytest.mark.quick("compare_digits.py")
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


def test_the_model_of_the_first_recipe_can_be_built_and_compared():
    module = _load("train_digits.py")
    model, train, test = module.build(seed=3, epochs=2, batch_size=8)
    assert model.compiled
    images, labels = train.element_spec
    assert images.shape[1:] == model.input_shape[1:]
    assert images.dtype == "uint8"
    schedule = model.optimizer.get_config()["learning_rate"]["config"]
    assert schedule["decay_steps"] == 2 * (1437 // 8)
    assert set(model.evaluate(test.take(1), verbose=0, return_dict=True)) == {
        *("loss", "accuracy")
    }
    again, _, _ = module.build(seed=3, epochs=2, batch_size=8)
    for one, other in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow("`tfamp compare` of a program of one's own holds it, and `build`")
def test_a_recipe_is_compared_from_the_repository_by_name(tmp_path):
    command = ["compare", "recipes.train_tabular:build", "--seeds=1"]
    finished = subprocess.run(
        [sys.executable, "-m", "tfamp", *command]
        + ["--policies=float32,keras:float32", f"--out={tmp_path / 'report'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert (tmp_path / "report" / "report.html").is_file()


@pytest.mark.slow("the data and the model of the recipes are held by what is above")
@pytest.mark.parametrize(
    "recipe, arguments, name, least",
    [
        ("train_digits.py", ["--epochs=5"], "accuracy", 0.98),
        ("train_tabular.py", [], "treated_damaged", 0.9),
        ("train_workers.py", [], "accuracy", 0.94),
    ],
)
def test_a_recipe_learns_what_it_says(recipe, arguments, name, least, tmp_path):
    arguments = ["--policy=float32", *arguments]
    record = record_of(run_recipe(recipe, *arguments, folder=tmp_path))
    assert record[name] >= least
    if "naive_damaged" in record:
        assert record[name] >= record["naive_damaged"] + 0.1


@pytest.mark.slow("a minute of training")
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_forecast_is_better_than_that_nothing_changes(policy, tmp_path):
    finished = run_recipe("train_forecast.py", f"--policy={policy}", folder=tmp_path)
    record = record_of(finished)
    assert record["mae"] < 0.98 * record["mae_if_it_stays"]


@pytest.mark.parametrize(
    "kind, policy, half",
    [
        ("cpu", "float32", "mixed_bfloat16"),
        ("gpu", "float32", "mixed_float16"),
        ("gpu", "mixed_bfloat16", "mixed_bfloat16"),
    ],
)
def test_a_half_precision_is_compared_where_auto_is_float32_too(
    kind, policy, half, monkeypatch
):
    module = _load("compare_digits.py")
    status = dataclasses.replace(
        tfamp.status(), policy=policy, devices=(Device(kind, "made up"),)
    )
    monkeypatch.setattr(tfamp, "scope", contextlib.nullcontext)
    monkeypatch.setattr(tfamp, "status", lambda: status)
    policies, here = module.choose()
    assert policies == ["float32", "float32+xla", half]
    assert here.startswith(f"{policy}, as ")


def test_a_comparison_of_digits_ends_with_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    module = _load("compare_digits.py")
    found = made_evidence.evidence({"float32": (1.0, 0.9), "float32+xla": (2.0, 0.9)})
    module.draw(found, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


# What a reader may get wrong


def test_a_missing_folder_is_named():
    for recipe in ("train_digits.py", "train_resnet50.py"):
        with pytest.raises(ValueError, match=r"`folder` is './photos/train'"):
            _load(recipe).build(dataset="./photos")
    with pytest.raises(ValueError, match=r"Found 0 files '\*\*/\*.txt' in"):
        _load("train_text.py").load(str(ROOT / "recipes"))


@pytest.mark.parametrize("recipe", ["train_vit.py", "train_bert.py"])
def test_keras_hub_is_asked_for_where_it_is_missing(recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    with pytest.raises(ImportError, match="Run `pip install keras-hub`"):
        _load(recipe)


def test_a_short_series_is_refused():
    module = _load("train_forecast.py")
    with pytest.raises(ValueError, match="has 3 moments; expected more than `--win"):
        module.cut_windows(np.zeros((3, 1)), window=3)
    x, y = module.cut_windows(np.arange(5.0)[:, None], window=3)
    assert x[..., 0].tolist() == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]
    assert y[:, 0].tolist() == [3.0, 4.0]


def test_a_character_model_does_not_look_ahead():
    model = _load("train_text.py").build_model()
    text = np.arange(128, dtype="uint8")[np.newaxis]
    changed = text.copy()
    changed[0, 100] = 32
    difference = np.abs(model(text).numpy() - model(changed).numpy()).max(axis=(0, 2))
    assert (difference[:100] == 0).all()
    assert difference[100] > 0


def _load(recipe):
    """Returns a recipe as a module; others have flags of the same names."""
    spec = importlib.util.spec_from_file_location(recipe[:-3], FOLDER / recipe)
    module = importlib.util.module_from_spec(spec)
    before = set(flags.FLAGS)
    try:
        spec.loader.exec_module(module)
    finally:
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)
    return module
