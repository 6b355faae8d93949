"""Every recipe runs with `--smoke`, compares, and keeps its promises."""

import dataclasses
import json
import math
import os
import pickle
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest

import tfamp
from tests import made_evidence
from tests.recipe_modules import (
    RECIPES,
    ROOT,
    TINY,
    load,
    parsed,
    run,
    run_process,
    shared,
    train_here,
)
from tfamp.comparison.result import Comparison

pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_bfloat16' will be slow")
MIN_DIGITS_ACCURACY = 0.98


@pytest.fixture(scope="module")
def recipe_modules():
    """The files that recipes share, under the names the recipes know them by."""
    names = ("comparing", "progress", "reporting")
    with shared(*names) as modules:
        yield dict(zip(names, modules, strict=True))


def test_recipes_are_found():
    assert {"train_digits.py", "train_tabular.py", "train_text.py"} <= set(RECIPES)
    assert "datasets.py" not in RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_opens_with_what_a_reader_needs(recipe):
    opening = (ROOT / "recipes" / recipe).read_text().split('"""')[1]
    for word in ("Data:", "Command:", "Time:", "Expect:"):
        assert f"\n{word} " in opening


def check_promises(finished, policy):
    """Checks what every recipe says of a run that went well."""
    record = finished.record
    assert record["finite"] is True
    assert math.isfinite(record["loss"])
    assert record["reason"]
    assert record["asked"] == policy
    assert policy in ("auto", record["policy"])
    assert {"tfamp", "tensorflow", "keras", "python"} == set(record["versions"])
    # No terminal: a line for each epoch, no bar drawn over itself.
    assert "epoch 1/" in finished.stdout
    assert "\r" not in finished.stdout


@pytest.mark.parametrize("policy", ["auto", "mixed_bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.anchors("custom_loop.py-auto", "train_text.py-mixed_bfloat16")
def test_smoke_keeps_the_promises_of_its_last_line(recipe, policy, tmp_path):
    """Those of `train_digits.py` and `train_tabular.py` are kept below, too."""
    arguments = ["--smoke", f"--policy={policy}", f"--output={tmp_path / 'out.json'}"]
    # One of them as a reader starts it.
    start = run_process if recipe == "custom_loop.py" else run
    finished = start(recipe, *arguments, *TINY.get(recipe, ()))
    check_promises(finished, policy)
    assert json.loads((tmp_path / "out.json").read_text()) == finished.record
    if recipe == "custom_loop.py":
        # Five microbatches: four make an update, `flush` applies the fifth.
        assert (finished.record["updates"], finished.record["skipped"]) == (2, 0)


@pytest.mark.whole("a recipe starts and runs above, without what makes it small")
@pytest.mark.parametrize("recipe", RECIPES)
def test_smoke_runs_as_it_is_written_in_a_process(recipe):
    check_promises(run_process(recipe, "--smoke"), "auto")


@pytest.fixture
def commands(recipe_modules, monkeypatch):
    """Has the runs of several policies take place here; lists their commands."""
    started = []

    def start(command, *, check):
        started.append(command)
        python, path, *arguments = command
        assert (python, check) == (sys.executable, False)
        finished = run(Path(path).name, *arguments)
        print(finished.stderr, file=sys.stderr)
        return finished

    monkeypatch.setattr(recipe_modules["reporting"].subprocess, "run", start)
    return started


def test_several_policies_end_in_one_table(commands):
    finished = run("custom_loop.py", "--smoke", "--policy=auto,float32")
    record = finished.record
    assert [one["asked"] for one in record["runs"]] == ["auto", "float32"]
    assert record["finite"] is True
    assert finished.stdout.count("ms/step") == 1
    assert record["runs"][0]["reason"] in finished.stdout
    assert ["--nosummary" in command for command in commands] == [True, True]


def test_a_run_that_fails_fails_the_whole_command(commands):
    finished = run("custom_loop.py", "--smoke", "--policy=nonsense,float32")
    assert finished.returncode == 1
    assert "The run under `--policy=nonsense` ended with exit code 1" in finished.stderr
    assert "Unknown `policy` 'nonsense'" in finished.stderr
    assert len(commands) == 1


@pytest.mark.whole("the two tests above hold it, with their runs in one process")
def test_several_policies_train_in_processes_of_their_own():
    finished = run_process("custom_loop.py", "--smoke", "--policy=auto,nonsense")
    assert finished.returncode == 1
    assert finished.stdout.count("epoch 1/1") == 1
    assert "The run under `--policy=nonsense` ended with exit code 1" in finished.stderr


@pytest.mark.parametrize(
    "policy, epochs",
    [
        ("float32", 5),
        pytest.param(
            *("mixed_bfloat16", 8),
            marks=pytest.mark.whole("a CPU without its units takes minutes"),
        ),
    ],
)
def test_digits_are_read_well(policy, epochs):
    finished = run("train_digits.py", f"--policy={policy}", f"--epochs={epochs}")
    check_promises(finished, policy)
    assert finished.record["accuracy"] >= MIN_DIGITS_ACCURACY
    assert finished.record["policy"] == policy


@pytest.mark.parametrize(
    "dataset, least, gain",
    [
        # Of 190 rows; seeds 0 to 2 give 0.94 to 0.96, at least 0.15 above naive.
        ("breast_cancer", 0.90, 0.10),
        # Seeds 0 to 2 give 0.32 to 0.36, at least 0.33 above naive.
        ("diabetes", 0.25, 0.20),
    ],
)
@pytest.mark.anchors("breast_cancer-*")
def test_treated_tables_are_read_better_than_naively(dataset, least, gain):
    finished = run("train_tabular.py", "--policy=float32", f"--dataset={dataset}")
    check_promises(finished, "float32")
    record = finished.record
    assert record["score_damaged"] >= least
    assert record["score_damaged"] >= record["naive_damaged"] + gain
    assert record["score_clean"] >= record["naive_clean"]
    assert record["findings"][0] == "nan"
    assert record["same_bits_after_loading"] is True


def test_a_table_is_damaged_as_the_flags_say(recipe_modules):
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


# What a recipe builds


@pytest.mark.parametrize("recipe", RECIPES)
def test_build_returns_a_compiled_model_with_data_that_fits_it(recipe_modules, recipe):
    module, settings = parsed(recipe, "--smoke", "--batch_size=8")
    model, train_data, validation = module.build(settings)
    assert model.compiled
    for data in (train_data, validation):
        inputs, targets = data.element_spec
        assert inputs.shape[1:] == model.input_shape[1:]
        assert targets.dtype.is_integer or targets.shape.rank == 1
    assert int(train_data.cardinality()) in (2, 5)  # five are a window, and one more
    assert {len(targets) for _, targets in train_data} == {8}
    assert model.jit_compile is False
    # What quality is judged by, beside the loss.
    metrics = model.evaluate(validation.take(1), verbose=0, return_dict=True)
    assert set(metrics) == {"loss", "accuracy"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_seed_and_epochs_come_before_the_settings(recipe_modules, recipe):
    module, settings = parsed(recipe, "--smoke", "--batch_size=8", "--seed=1")

    def kernels(**own):
        model, data, _ = module.build(settings, **own)
        first = next(iter(data))
        return [np.asarray(w) for w in (*model.trainable_weights, *first)]

    asked, same, other = kernels(), kernels(seed=1), kernels(seed=2)
    for a, b in zip(asked, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(asked[0], other[0])  # weights of the first layer
    assert not np.array_equal(asked[-2], other[-2])  # inputs


@pytest.mark.parametrize(
    "recipe, steps", [("train_digits.py", 2), ("train_text.py", 2)]
)
def test_the_learning_rate_falls_over_the_epochs_that_are_trained(
    recipe_modules, recipe, steps
):
    module, settings = parsed(recipe, "--smoke", "--batch_size=8", "--epochs=9")

    def decay_steps(**own):
        model, _, _ = module.build(settings, **own)
        schedule = model.optimizer.get_config()["learning_rate"]["config"]
        return schedule["decay_steps"]

    assert decay_steps() == steps  # `--smoke` trains for one epoch
    assert decay_steps(epochs=5) == 5 * steps


def test_settings_are_the_defaults_where_none_are_given(recipe_modules):
    module, flags = parsed("train_digits.py", "--batch_size=8", "--epochs=3")
    resolve = recipe_modules["reporting"].resolve
    defaults = resolve(module.define_flags)
    assert (defaults.batch_size, defaults.epochs, defaults.seed) == (64, 30, 0)
    given = resolve(module.define_flags, flags)
    assert (given.batch_size, given.epochs) == (8, 3)
    again = resolve(module.define_flags, given, seed=4, epochs=1)
    assert (again.batch_size, again.epochs, again.seed) == (8, 1, 4)
    assert given.seed == 0  # the settings passed in are left alone


def test_fit_makes_the_updates_of_the_loop(recipe_modules):
    module, settings = parsed("custom_loop.py", "--smoke", "--batch_size=8")
    looped, data, _ = module.build(settings)
    step = module.make_step(looped, looped.optimizer, jit_compile=False)
    for images, labels in data:
        step(images, labels)
    looped.optimizer.flush()
    fitted, data, _ = module.build(settings)
    fitted.fit(data, verbose=0)
    assert fitted.optimizer.applied_steps == looped.optimizer.applied_steps == 2
    before, _, _ = module.build(settings)
    # Adam moves a weight by about the learning rate, 2e-3, an update.
    names = [weight.path for weight in before.trainable_weights]
    for name, first, a, b in zip(
        names,
        before.get_weights(),
        looped.get_weights(),
        fitted.get_weights(),
        strict=False,
    ):
        assert np.abs(a - first).max() > 1e-3, name
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6, err_msg=name)


# `--compare`


def plain(**changed):
    """Returns settings as the flags of a comparison give them."""
    defaults = {
        **{"policy": ["auto"], "keep_float32": ["default"], "seed": 0, "smoke": False},
        **{"jit_compile": False, "compare": 2, "report": None, "resume": False},
        **{"profile": False, "output": None, "summary": True, "epochs": 3},
    }
    return types.SimpleNamespace(**defaults | changed)


@pytest.mark.parametrize(
    "policy, jit_compile, expected",
    [
        (["auto"], False, ["float32", "auto"]),
        (["mixed_float16"], False, ["float32", "mixed_float16"]),
        (["auto", "mixed_bfloat16"], False, ["auto", "mixed_bfloat16"]),
        (["auto"], True, ["float32+xla", "auto+xla"]),
        (["auto+xla", "auto"], True, ["auto+xla", "auto+xla"]),
        (["float32+xla+rewrite"], True, ["float32+xla", "float32+xla+rewrite"]),
    ],
    ids=["default", "one", "several", "XLA", "XLA twice", "XLA first"],
)
def test_flags_become_policies(recipe_modules, policy, jit_compile, expected):
    settings = plain(policy=policy, jit_compile=jit_compile)
    assert recipe_modules["comparing"].policies(settings) == expected


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--report=x"], "Got `--report` without `--compare`; expected both"),
        (["--profile"], "Got `--profile` without `--compare`; expected both"),
        (["--resume"], "Got `--resume` without `--compare`; expected both"),
        (
            ["--compare=2", "--keep_float32=none"],
            "`--keep_float32` is 'none' with `--compare`; expected 'default'",
        ),
        (["--compare=2", "--report=."], "`--report` is '.', where something is"),
        (["--compare=2", "--resume"], "`--resume` goes with `--report` None; expected"),
        (
            ["--compare=2", "--resume", "--report=."],
            "`--resume` goes with `--report` '.'; expected the folder of a comparison",
        ),
        (["--compare=-1"], "flag --compare=-1"),
        (
            ["--compare=2", "--report=new", "--policy=float32"],
            "`policies` is ('float32', 'float32'); expected at least two different",
        ),
        (["--compare=2", "--report=new", "--policy=half"], "Unknown `policies` 'half'"),
    ],
    ids=[
        *("report alone", "profile alone", "resume alone", "rules", "used folder"),
        *("resume nothing", "resume no folder", "number", "one policy", "unknown"),
    ],
)
def test_flags_that_would_have_no_effect_are_refused(
    recipe_modules, capsys, monkeypatch, tmp_path, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "something").touch()
    module = load("train_digits")
    assert module.main(["train_digits.py", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new" / "report.html").exists()


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """Replaces `tfamp.compare` by what makes its runs up; lists how it was called.

    The dict holds what differs in the run of a policy and a seed; "stop" is how many
    runs there are before Ctrl-C.
    """
    monkeypatch.chdir(tmp_path)
    calls, changed = [], {}

    def compare(build, *, policies, seeds, on_run, **options):
        calls.append({"build": build, "policies": policies, "seeds": list(seeds)})
        calls[-1] |= options
        Path(options["directory"]).mkdir(parents=True, exist_ok=True)
        stop = changed.get("stop", 1000)
        if stop < 2:
            raise KeyboardInterrupt
        runs = [made_evidence.run(p, seed) for seed in seeds for p in policies]
        runs = [
            dataclasses.replace(each, **changed.get((each.policy, each.seed), {}))
            for each in runs
        ]
        for each in runs[:stop]:
            on_run(each)
        if stop < len(runs):
            warnings.warn("Stopped early.", UserWarning, stacklevel=2)
        found = made_evidence.evidence(
            dict.fromkeys(policies, (1.0, 0.9)), seeds=tuple(seeds), replaced=runs
        )
        found = dataclasses.replace(found, runs=tuple(runs[:stop]))
        names = [field.name for field in dataclasses.fields(found)]
        return Comparison(**{name: getattr(found, name) for name in names})

    monkeypatch.setattr(tfamp, "compare", compare)
    return calls, changed


def test_a_comparison_ends_with_the_path_of_its_report(recipe_modules, made_up, capsys):
    arguments = ["--compare=2", "--seed=5", "--batch_size=8", "--epochs=4"]
    slow = {"final_metrics": {"loss": 0.7, "accuracy": 0.9}}
    made_up[1]["float32", 6] = slow | {"examples_per_second": 500.0}
    code = load("train_digits").main(
        ["recipes/train_digits.py", *arguments, "--output=out.json"]
    )
    assert code == 0
    *lines, path, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert json.loads(Path("out.json").read_text()) == record
    assert path == f"Report: {record['report']}"
    assert re.fullmatch(
        r"reports/train_digits-\d{8}-\d{6}/report.html", record["report"]
    )
    folder = Path(record["report"]).parent
    assert "float32" in (folder / "report.html").read_text()
    assert json.loads((folder / "report.json").read_text())["seeds"] == [5, 6]
    assert record["policies"] == ["float32", "auto"]
    assert record["seeds"] == [5, 6]
    assert record["best"] == "auto"
    assert record["reference"] == "float32"
    assert record["metric"] == "accuracy"
    assert record["loss"] == 0.5
    assert record["finite"] is True
    assert {"tfamp", "tensorflow", "keras", "python"} == set(record["versions"])
    assert lines[0].startswith("[1/4] float32, seed 5: 991 examples/s  ")
    (call,) = made_up[0]
    assert (call["policies"], call["seeds"]) == (["float32", "auto"], [5, 6])
    assert call["epochs"] == 4
    assert call["profile_steps"] == 0
    assert call["title"] == "Handwritten digits"
    assert call["directory"] == folder / "runs"
    command = f"python recipes/train_digits.py {' '.join(arguments)} --output=out.json"
    assert call["command"] == command
    # What goes to the other processes: a function of a module, and plain settings.
    build, again = call["build"], pickle.loads(pickle.dumps(call["build"]))
    assert build.func.__module__ == "train_digits"
    assert again.args == build.args
    assert (build.args[0].batch_size, build.args[0].epochs) == (8, 4)


def test_smoke_and_profile_act_in_a_comparison(recipe_modules, made_up, capsys):
    arguments = ["--compare=1", "--smoke", "--profile", "--jit_compile", "--nosummary"]
    assert load("custom_loop").main(["custom_loop.py", *arguments]) == 0
    (call,) = made_up[0]
    assert call["policies"] == ["float32+xla", "auto+xla"]
    assert call["epochs"] == 1
    assert call["profile_steps"] == 5
    assert call["build"].args[0].smoke is True
    assert "Report" not in capsys.readouterr().out


def test_a_comparison_goes_on_with_more_seeds_and_the_same_flags(
    recipe_modules, made_up, capsys
):
    module, calls = load("train_digits"), made_up[0]

    def main(*arguments):
        capsys.readouterr()
        return module.main(["train_digits.py", "--report=found", *arguments])

    assert main("--compare=1", "--batch_size=8") == 0
    assert main("--compare=3", "--batch_size=8") == 1
    assert "add `--resume` to go on with its runs" in capsys.readouterr().err
    assert main("--compare=3", "--batch_size=8", "--resume") == 0
    output = capsys.readouterr().out
    assert output.startswith("[1] float32, seed 0: ")
    assert "left" not in output.split("\n")[0]
    assert [call["resume"] for call in calls] == [False, True]
    assert [call["seeds"] for call in calls] == [[0], [0, 1, 2]]
    assert main("--compare=4", "--batch_size=16", "--resume") == 1
    assert (
        "`--batch_size` was 8 and is 16. Expected the same" in capsys.readouterr().err
    )
    assert len(calls) == 2


def test_what_is_not_finite_is_null_for_scripts(recipe_modules, made_up, capsys):
    changed = made_up[1]
    changed["auto", 0] = {"final_metrics": {"loss": math.nan, "accuracy": 0.1}}
    load("train_digits").main(["train_digits.py", "--compare=1"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "NaN" not in last
    assert "Infinity" not in last
    record = json.loads(last)
    assert record["finite"] is False
    assert record["loss"] is None
    assert record["examples_per_second_ratio"]["high"] is None
    assert record["verdict"] == "undecided"


def test_ctrl_c_says_how_to_go_on(recipe_modules, made_up, capsys):
    arguments = ["train_digits.py", "--compare=2", "--report=found"]
    made_up[1]["stop"] = 1
    assert load("train_digits").main(arguments) == 130
    go_on = "`--resume --report=found` and the same flags do the rest."
    assert f"stopped, nothing to compare yet; {go_on}" in capsys.readouterr().err
    made_up[1]["stop"] = 3
    assert load("train_digits").main([*arguments, "--resume"]) == 0
    printed = capsys.readouterr()
    assert f"train_digits: Stopped early.\ntrain_digits: {go_on}" in printed.err
    assert printed.out.splitlines()[-2] == "Report: found/report.html"


@pytest.mark.parametrize(
    "changed, expected",
    [
        ({}, True),
        ({"num_nonfinite_weights": 1}, False),
        ({"status": "failed", "error": "it broke"}, False),
        ({"final_metrics": {"loss": math.inf, "accuracy": 0.9}}, False),
    ],
    ids=["well", "weight", "failure", "metric"],
)
def test_finite_says_that_all_runs_were(recipe_modules, changed, expected):
    run = dataclasses.replace(made_evidence.run("auto", 1), **changed)
    found = made_evidence.evidence(replaced=(run,))
    record = recipe_modules["comparing"].record("digits", found, Path("r"), {})
    assert record["finite"] is expected


def test_a_line_says_what_a_run_came_to_and_what_is_left(recipe_modules, capsys):
    now = iter([100.0, 110.0, 130.0])
    lines = recipe_modules["comparing"].Lines(4, clock=lambda: next(now))
    lines.show(made_evidence.run("auto", 0))
    failed = dataclasses.replace(
        made_evidence.run("auto", 1), status="failed", error="it broke"
    )
    lines.show(failed)
    first, second = capsys.readouterr().out.splitlines()
    # 1,000 examples/s of a made-up wave, 1 + 0.01 sin(4).
    assert first == (
        "[1/4] auto, seed 0: 992 examples/s  loss 0.5000  accuracy 0.9000  (30 s left)"
    )
    assert second == "[2/4] auto, seed 1: failed: it broke  (30 s left)"


def test_smoke_compares_and_leaves_a_report(tmp_path, monkeypatch):
    train_here(monkeypatch)
    finished = run(
        *("custom_loop.py", "--smoke", "--policy=float32,keras:float32"),
        *("--batch_size=8", "--compare=1", f"--report={tmp_path / 'report'}"),
    )
    record = finished.record
    assert record["finite"] is True
    assert math.isfinite(record["loss"])
    assert record["seeds"] == [0]
    assert f"Report: {tmp_path / 'report' / 'report.html'}" in finished.stdout
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [each["batch_size"] for each in found["runs"]] == [8, 8]
    assert [each["num_epochs"] for each in found["runs"]] == [1, 1]
    # No terminal: a line for each run, no bar drawn over itself.
    assert "[2/2] " in finished.stdout
    assert "\r" not in finished.stdout + finished.stderr


@pytest.mark.whole("`tfamp compare` of a program of one's own holds it, and `build`")
def test_a_recipe_is_compared_from_the_repository_by_name(tmp_path):
    target = "recipes.train_digits:build"
    finished = subprocess.run(
        [sys.executable, "-m", "tfamp", "compare", target, "--seeds=1"]
        + ["--policies=float32,keras:float32", f"--out={tmp_path / 'report'}"],
        cwd=ROOT,
        env={name: v for name, v in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [each["num_steps"] for each in found["runs"]] == [22, 22]  # 1437 // 64
