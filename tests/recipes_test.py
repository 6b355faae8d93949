"""Every recipe runs with `--smoke` and keeps its promises; digits reach 0.98."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")
ROOT = Path(__file__).parents[1]
# A recipe is a file that can be run; the others are what recipes share.
RECIPES = sorted(
    path.name
    for path in (ROOT / "recipes").glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
MIN_DIGITS_ACCURACY = 0.98


def run(recipe, *arguments, **environment):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(ROOT / "recipes" / recipe), *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def last_record(finished):
    assert finished.returncode == 0, finished.stderr[-2000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def recipe_modules():
    """The files that recipes share, under the names the recipes know them by."""
    path = list(sys.path)
    sys.path.insert(0, str(ROOT / "recipes"))
    import progress
    import reporting

    yield {"progress": progress, "reporting": reporting}
    sys.path[:] = path
    for name in ("datasets", "progress", "reporting"):
        sys.modules.pop(name, None)


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_recipes_are_found():
    assert {"train_digits.py", "train_tabular.py", "train_text.py"} <= set(RECIPES)
    assert "datasets.py" not in RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_opens_with_what_a_reader_needs(recipe):
    opening = (ROOT / "recipes" / recipe).read_text().split('"""')[1]
    for word in ("Data:", "Command:", "Time:", "Expect:"):
        assert f"\n{word} " in opening


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["auto", "float32", "mixed_bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_smoke_keeps_the_promises_of_its_last_line(recipe, policy, tmp_path):
    finished = run(
        recipe, "--smoke", f"--policy={policy}", f"--output={tmp_path / 'out.json'}"
    )
    record = last_record(finished)
    assert record["finite"] is True
    assert math.isfinite(record["loss"])
    assert record["reason"]
    assert record["asked"] == policy
    assert policy in ("auto", record["policy"])
    assert {"tfamp", "tensorflow", "keras", "python"} == set(record["versions"])
    assert json.loads((tmp_path / "out.json").read_text()) == record
    # No terminal: a line for the epoch, no bar drawn over itself.
    assert "epoch 1/1" in finished.stdout
    assert "\r" not in finished.stdout


@pytest.mark.slow
def test_a_loop_of_its_own_applies_the_window_that_is_not_full():
    record = last_record(
        run("custom_loop.py", "--smoke", "--policy=float32", "--accumulation_steps=3")
    )
    # Four microbatches: three make an update, `flush` applies the fourth.
    assert (record["updates"], record["skipped"]) == (2, 0)


@pytest.mark.slow
def test_several_policies_end_in_one_table():
    finished = run("train_digits.py", "--smoke", "--policy=auto,float32")
    record = last_record(finished)
    assert [one["asked"] for one in record["runs"]] == ["auto", "float32"]
    assert record["finite"] is True
    assert finished.stdout.count("examples/s") == 1
    assert record["runs"][0]["reason"] in finished.stdout


@pytest.mark.slow
def test_a_run_that_fails_fails_the_whole_command():
    finished = run("train_digits.py", "--smoke", "--policy=float32,nonsense")
    assert finished.returncode == 1
    assert "The run under `--policy=nonsense` ended with exit code 1" in finished.stderr
    assert "Unknown `policy` 'nonsense'" in finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_digits_are_read_well(policy):
    record = last_record(run("train_digits.py", f"--policy={policy}"))
    assert record["accuracy"] >= MIN_DIGITS_ACCURACY
    assert record["policy"] == policy
    assert record["finite"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, least, gain",
    [
        # Of 190 rows; seeds 0 to 2 give 0.94 to 0.96, at least 0.16 above naive.
        ([], 0.90, 0.10),
        # Seeds 0 to 2 give 0.33 to 0.36, at least 0.33 above naive.
        (["--dataset=diabetes"], 0.25, 0.20),
    ],
    ids=["breast_cancer", "diabetes"],
)
def test_treated_tables_are_read_better_than_naively(arguments, least, gain):
    record = last_record(run("train_tabular.py", "--policy=float32", *arguments))
    assert record["score_damaged"] >= least
    assert record["score_damaged"] >= record["naive_damaged"] + gain
    assert record["score_clean"] >= record["naive_clean"]
    assert record["findings"][0] == "nan"
    assert record["same_bits_after_loading"] is True


def test_a_table_is_damaged_as_the_flags_say(recipe_modules):
    import numpy as np

    damage = load("train_tabular").damage
    rows = np.arange(1.0, 4001.0).reshape(1000, 4)
    damaged = damage(rows, 0.1, 0.02, np.random.default_rng(0))
    np.testing.assert_array_equal(rows.ravel(), np.arange(1.0, 4001.0))
    missing = np.isnan(damaged)
    ratio = (damaged / rows)[~missing]
    assert set(ratio.round(6)) == {1.0, 100.0}
    # Five standard deviations of 4,000 draws.
    assert abs(missing.mean() - 0.1) < 5 * math.sqrt(0.1 * 0.9 / 4000)
    assert abs((ratio > 2).mean() - 0.02) < 5 * math.sqrt(0.02 * 0.98 / 3600)


@pytest.mark.parametrize(
    "impute, num_rows, num_missing",
    [("median", 6, 1), ("drop", 5, 0), ("knn", 6, 0)],
)
def test_the_pipeline_drops_or_fills_rows_or_leaves_them_to_the_model(
    recipe_modules, impute, num_rows, num_missing
):
    import numpy as np

    import tfamp

    train_tabular = load("train_tabular")
    settings = train_tabular.define_flags()
    settings(["train_tabular.py", "--batch_size=4"])
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    x[3, 1] = np.nan
    y = np.arange(6, dtype=np.float32)
    statistics = tfamp.data.fit_statistics((x, y))
    data = list(train_tabular.batches((x, y), impute, statistics, settings))
    found = np.concatenate([rows for rows, _ in data])
    assert len(found) == num_rows
    assert np.isnan(found).sum() == num_missing


def test_a_model_that_changes_when_it_is_loaded_is_seen(recipe_modules, monkeypatch):
    import keras
    import numpy as np

    import tfamp

    def model(value):
        kernel = keras.initializers.Constant(value)
        dense = keras.layers.Dense(1, kernel_initializer=kernel)
        return keras.Sequential([keras.Input((2,)), dense])

    train_tabular = load("train_tabular")
    rows = np.ones((3, 2), np.float32)
    assert train_tabular.survives_saving(model(1.0), rows)
    other = model(1.0 + 2.0**-23)
    monkeypatch.setattr(tfamp, "load_model", lambda path: other)
    assert not train_tabular.survives_saving(model(1.0), rows)


def test_speed_leaves_the_first_epoch_out(recipe_modules):
    speed = recipe_modules["reporting"].speed
    assert speed([9.0, 2.0, 4.0, 2.0], 100, 10) == {
        "examples_per_second": 50.0,
        "step_milliseconds": 200.0,
    }
    assert speed([4.0], 100, 10)["examples_per_second"] == 25.0


def test_a_non_finite_weight_is_seen(recipe_modules):
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    is_finite = recipe_modules["reporting"].is_finite
    assert is_finite(model, 1.0)
    assert not is_finite(model, math.nan)
    model.layers[0].kernel.assign([[math.inf]])
    assert not is_finite(model, 1.0)


def test_targets_are_one_character_ahead(recipe_modules):
    train_text = load("train_text")
    inputs, targets = train_text.cut_windows(b"abcdefgh", window=3)
    assert [row.tobytes() for row in inputs] == [b"abc", b"def"]
    assert [row.tobytes() for row in targets] == [b"bcd", b"efg"]
    with pytest.raises(ValueError, match="The text has 3 characters; expected more"):
        train_text.cut_windows(b"abc", window=3)


def test_a_character_model_does_not_look_ahead(recipe_modules):
    import numpy as np

    model = load("train_text").build_model(8, width=16, num_layers=1, num_heads=2)
    text = np.arange(65, 73, dtype=np.uint8)[np.newaxis]
    changed = text.copy()
    changed[0, 5] = 32
    difference = np.abs(model(text).numpy() - model(changed).numpy()).max(axis=(0, 2))
    assert (difference[:5] == 0).all()
    assert difference[5] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--polcy=auto"], "Unknown command line flag 'polcy'"),
        (["auto"], "Got arguments ('auto',)"),
        (["--epochs=many"], "flag --epochs=many"),
    ],
    ids=["flag", "argument", "type"],
)
def test_wrong_arguments_end_with_a_message(recipe_modules, capsys, arguments, message):
    assert load("train_digits").main(["train_digits.py", *arguments]) == 1
    assert message in capsys.readouterr().err
