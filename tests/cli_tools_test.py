"""Commands on a model: what they print, write and end with, and what they leave."""

import re

import keras
import pytest
import tensorflow as tf

import tfamp
from tests.written_modules import written
from tfamp.cli.main import main

MODULE = """
    import keras
    import numpy as np

    def model(activation="softmax"):
        return keras.Sequential(
            [keras.Input((16,)), keras.layers.Dense(8, name="hidden"),
             keras.layers.Dense(8, activation, name="head")], name="tiny")

    def data(mean=0.0):
        rng = np.random.default_rng(0)
        x = mean + rng.normal(size=(64, 16)).astype("float32")
        return x, rng.normal(size=(64, 8)).astype("float32")

    def alone():
        return model()

    def uncompiled():
        return model(), data()

    def build():
        found = model()
        found.compile("sgd", "mse")
        return found, data()

    def build_three(seed):
        assert seed == 0
        return *build(), data()

    def as_dataset():
        import tensorflow as tf
        found, (x, y) = build()
        return found, tf.data.Dataset.from_tensor_slices((x, y)).batch(16)

    def broken():
        found, (x, y) = build()
        x[33, 2] = np.nan
        return found, (x, y)

    def large():
        return model(), data(1e5)

    def warned():
        return model(), data(1e4)

    def linear():
        return model(None)

    def nothing():
        return None

    def many():
        return model(), data(), data(), data()
"""
STOCK = "--policy=keras:mixed_bfloat16"
MANAGED = "--policy=mixed_bfloat16"


module = written("tool_models", MODULE)


def told(record, name, target, *flags):
    """Runs a command, which ends well, and returns what it wrote as JSON."""
    assert main([name, f"tool_models:{target}", *flags, "--json=found.json"]) == 0
    return record.from_json("found.json")


RESULTS = {
    "check": (["build", MANAGED], tfamp.data.Findings, 0, "for bfloat16"),
    "check half": (["large"], tfamp.data.Findings, 1, "overflow"),
    "lint": (["build", STOCK], tfamp.data.Findings, 1, "half-head"),
    "assignment": (["alone", MANAGED], tfamp.Assignment, 0, "mixed_bfloat16"),
    "prove": (["build", MANAGED], tfamp.Proof, 0, "bfloat16"),
    "ranges": (["build", "--num_batches=1"], tfamp.Ranges, 0, "loss scale"),
    "sensitivity": (["build", "--num_batches=1"], tfamp.Sensitivity, 0, "float16"),
    "bottleneck": (
        *(["as_dataset", "--seconds=0.2", "--policy=float32"], tfamp.data.Bottleneck),
        *(0, "rounds, batches of 16"),
    ),
    "lr_find": (
        *(["as_dataset", "--num_steps=20", "--policy=float32"],),
        *(tfamp.training.LearningRates, 0, "rate"),
    ),
    "triage": (["build", "--policy=float32"], tfamp.Triage, 0, "the cause is none"),
}


@pytest.mark.quick("check", "check half", "lint", "assignment")
@pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
@pytest.mark.parametrize("case", RESULTS)
def test_a_result_is_printed_and_written(module, capsys, case):
    (target, *flags), record, status, words = RESULTS[case]
    argv = [case.split()[0], f"tool_models:{target}", *flags]
    assert main([*argv, "--json=found.json"]) == status
    out = capsys.readouterr().out
    found = record.from_json(module / "found.json")
    assert out == f"{found}\n"
    assert words in out
    assert keras.config.dtype_policy().name == "float32"


def test_json_may_go_to_the_terminal_and_nothing_else_does(capsys):
    assert main(["assignment", "tool_models:alone", MANAGED, "--json=-"]) == 0
    found = tfamp.Assignment.from_json(capsys.readouterr().out)
    assert found["head"].variable_dtype == "float32"


def test_a_plot_is_drawn(module):
    pytest.importorskip("matplotlib")
    told(tfamp.Ranges, "ranges", "build", "--num_batches=1", "--plot=ranges.png")
    assert (module / "ranges.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_is_not_there_is_an_error(capsys):
    assert main(["assignment", "tool_models:alone", "--json=no/x"]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_a_policy_leaves_nothing_behind():
    told(tfamp.Proof, "prove", "build", "--policy=mixed_bfloat16+rewrite")
    assert keras.config.dtype_policy().name == "float32"
    options = tf.config.optimizer.get_experimental_options()
    assert not options.get("auto_mixed_precision_onednn_bfloat16")


# Word of --policy -> dtypes of the products of both layers in the graph.
POLICIES = {
    "keras:mixed_bfloat16": ["bfloat16"] * 5,
    "mixed_bfloat16+no_rules": ["bfloat16"] * 5,
    "mixed_bfloat16": ["bfloat16"] * 2 + ["float32"] * 3,
    "float32": ["float32"] * 5,
}


@pytest.mark.quick("float32")
@pytest.mark.parametrize("policy, dtypes", POLICIES.items(), ids=POLICIES)
def test_the_policy_is_in_force_when_the_model_is_built(policy, dtypes):
    proof = told(tfamp.Proof, "prove", "build_three", f"--policy={policy}")
    assert sorted(each.dtype for each in proof.operations) == dtypes


def test_flags_reach_the_function(monkeypatch):
    given = []

    def prove(model, data, **kwargs):
        given.append((model.jit_compile, kwargs))

    monkeypatch.setattr(tfamp, "prove", prove)
    argv = ["prove", "tool_models:build", "--batch_size", "8", "--notraining"]
    assert main([*argv, "--policy", "float32+xla"]) == 0
    assert main(["prove", "tool_models:build", "--policy", "float32"]) == 0
    first = {"training": False, "batch_size": 8}
    second = {"training": True, "batch_size": 32}
    assert given == [(True, first), (False, second)]


def test_triage_takes_the_batch_that_is_named():
    how = ("triage", "broken", "--policy=float32")
    assert told(tfamp.Triage, *how).cause == "none"
    assert told(tfamp.Triage, *how, "--batch=1").cause == "data"
    assert told(tfamp.Triage, *how, "--batch_size=64").cause == "data"


# Target and flags -> status.
RUNS = {
    "managed": (["build", MANAGED], 0),
    "without data": (["alone", STOCK], 1),
    "with validation": (["build_three", STOCK], 1),
    "warning": (["linear", STOCK], 0),
    "warning that fails": (["linear", STOCK, "--fail-on=warning"], 1),
    "error that fails": (["build", STOCK, "--fail-on", "error"], 1),
}


@pytest.mark.parametrize("case", RUNS)
def test_the_status_tells_how_bad_it_is(case):
    (target, *flags), status = RUNS[case]
    assert main(["lint", f"tool_models:{target}", *flags]) == status


@pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
def test_lint_builds_under_mixed_float16_unless_told_otherwise(capsys):
    assert main(["lint", "tool_models:warned"]) == 0
    printed = capsys.readouterr()
    assert "Lint of model 'tiny', with float16" in printed.out
    assert "unnormalised-input" in re.sub(r"[\s│]", "", printed.out)
    assert printed.err.startswith("tfamp lint: 'mixed_float16' will be slow")


FAILURES = {
    "no model": (
        *("lint nothing", 1),
        "'tool_models:nothing' returned None; expected a model, (model, train) or "
        "(model, train, validation). Return the model first.",
    ),
    "too many": ("lint many", 1, "expected a model, (model, train)"),
    "no data": (
        *("prove alone", 1),
        "expected (model, train) or (model, train, validation). Return the data",
    ),
    "not compiled": ("prove uncompiled", 1, "Model 'tiny' is not compiled;"),
    "severity": (
        *("lint build --fail-on=note", 2),
        "Unknown `--fail_on` 'note'; expected 'error' or 'warning'.",
    ),
    "dtype": ("sensitivity build --dtype=fp8", 2, "Unknown `--dtype` 'fp8'; expected"),
    "batches": ("ranges build --num_batches=0", 2, "num_batches"),
}


@pytest.mark.quick("no model", "rule", "reason", "twice", "severity")
@pytest.mark.parametrize("line, status, message", FAILURES.values(), ids=FAILURES)
def test_failures_end_with_a_status_and_a_sentence(capsys, line, status, message):
    name, target, *flags = line.split()
    assert main([name, f"tool_models:{target}", "--policy=float32", *flags]) == status
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"tfamp {name}: ")) == ("", True)
    assert message in err
