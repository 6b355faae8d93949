"""`tfamp lint`: what it prints, writes and ends with, and what it leaves behind."""

import re
import sys
import textwrap

import keras
import pytest

from tfamp.cli import lint
from tfamp.records.findings import Findings

MODULE = """
    import keras
    import numpy as np

    def model():
        return keras.Sequential(
            [keras.Input((16,)), keras.layers.Dense(8, name="hidden"),
             keras.layers.Dense(8, "softmax", name="head")], name="tiny")

    def data(mean=0.0):
        rng = np.random.default_rng(0)
        return (mean + rng.normal(size=(8, 16)).astype("float32"), np.zeros((8, 8)))

    def alone():
        return model()

    def build():
        found = model()
        found.compile("adam", "mse")
        return found, data()

    def build_three(seed):
        return model(), data(), data()

    def warned():
        return model(), data(1e4)

    def linear():
        return keras.Sequential(
            [keras.Input((16,)), keras.layers.Dense(8, name="head")], name="tiny")

    def nothing():
        return None

    def many():
        return model(), data(), data(), data()
"""
STOCK = "--policy=keras:mixed_bfloat16"
MANAGED = "--policy=mixed_bfloat16"


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """A folder with a module that can be linted, as the current one."""
    (tmp_path / "lintable.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("lintable", None)


def test_it_prints_the_table_and_writes_json(module, capsys):
    path = module / "lint.json"
    assert lint.main(["lintable:build", STOCK, "--json", str(path)]) == 1
    found = Findings.from_json(path)
    assert capsys.readouterr().out == f"{found.table()}\n"
    assert [(each.rule, each.layer) for each in found] == [("half-head", "head")]
    assert found.skipped == ()
    assert keras.config.dtype_policy().name == "float32"


# Arguments -> status.
RUNS = {
    "managed": (["lintable:build", MANAGED], 0),
    "without data": (["lintable:alone", STOCK], 1),
    "with validation": (["lintable:build_three", STOCK], 1),
    "warning": (["lintable:linear", STOCK], 0),
    "warning that fails": (["lintable:linear", STOCK, "--fail-on=warning"], 1),
    "error that fails": (["lintable:build", STOCK, "--fail-on", "error"], 1),
    "silenced": (["lintable:build", STOCK, "--silence", "half-head:it is a test"], 0),
}


@pytest.mark.parametrize("argv, status", RUNS.values(), ids=RUNS)
def test_the_status_tells_how_bad_it_is(argv, status):
    assert lint.main(argv) == status


def test_silenced_rules_are_printed_with_their_reasons(capsys):
    argv = ["lintable:alone", STOCK]
    argv.append("--silence=half-head:a test, no more,half-loss: none")
    assert lint.main([*argv, "--silence=late-policy:b"]) == 0
    printed = capsys.readouterr().out
    assert "Not checked: half-head: silenced, a test, no more\n" in printed
    assert "Not checked: half-loss: silenced, none\n" in printed
    assert "Not checked: late-policy: silenced, b\n" in printed


@pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
def test_the_policy_is_mixed_float16_unless_told_otherwise(capsys):
    assert lint.main(["lintable:warned"]) == 0
    printed = capsys.readouterr()
    assert "Lint of model 'tiny', with float16" in printed.out
    assert "unnormalised-input" in re.sub(r"[\s│]", "", printed.out)


FAILURES = {
    "no model": (
        ["lintable:nothing"],
        1,
        "'lintable:nothing' returned None; expected a model, (model, train) or "
        "(model, train, validation). Return the model first.",
    ),
    "too many": (["lintable:many"], 1, "expected a model, (model, train)"),
    "rule": (
        ["lintable:build", "--silence=half_head:why"],
        2,
        "Unknown `--silence` 'half_head'; expected 'half-head'",
    ),
    "reason": (
        ["lintable:build", "--silence=half-head"],
        2,
        "`--silence` is 'half-head'; expected 'rule:reason', such as "
        "'half-head:its loss takes logits'",
    ),
    "twice": (
        ["lintable:build", "--silence=half-head:a", "--silence=half-head:b"],
        2,
        "`--silence` names 'half-head' twice; expected one reason",
    ),
    "severity": (["lintable:build", "--fail-on=note"], 2, "fail_on"),
}


@pytest.mark.parametrize("argv, status, message", FAILURES.values(), ids=FAILURES)
def test_failures_end_with_a_status_and_a_sentence(capsys, argv, status, message):
    assert lint.main([*argv, "--policy=float32"]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.startswith("tfamp lint: ")
