"""`tfamp prove`: what it prints, writes and ends with, and what it leaves behind."""

import sys
import textwrap

import keras
import pytest
import tensorflow as tf

from tfamp.cli import prove
from tfamp.numerics.proof import prover
from tfamp.numerics.proof.result import Proof

MODULE = """
    import keras
    import tensorflow as tf

    def model():
        found = keras.Sequential(
            [keras.Input((16,)), keras.layers.Dense(8, name="hidden"),
             keras.layers.Dense(4, name="head")], name="tiny")
        found.compile("sgd", "mse")
        return found

    def data():
        return tf.data.Dataset.from_tensors((tf.zeros((32, 16)), tf.zeros((32, 4))))

    def build():
        return model(), data()

    def build_three(seed):
        assert seed == 0
        return model(), data(), data()

    def alone():
        return model()

    def uncompiled():
        return keras.Sequential([keras.layers.Dense(2)], name="raw"), data()
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """A module in the current folder, which a command finds there."""
    (tmp_path / "provable.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("provable", None)


def test_it_prints_the_table_and_writes_json(module, capsys):
    path = module / "proof.json"
    argv = ["provable:build", "--policy", "mixed_bfloat16", "--json", str(path)]
    assert prove.main(argv) == 0
    proof = Proof.from_json(path)
    assert capsys.readouterr().out == f"{proof.table()}\n"
    hidden, head = 2 * 2 * 32 * 16 * 8, 3 * 2 * 32 * 8 * 4
    assert proof.flops == hidden + head
    assert proof.half_share_of_flops == hidden / (hidden + head)
    assert (proof.model, proof.step) == ("tiny", "train")


def test_it_leaves_no_policy_and_no_rewrite():
    assert prove.main(["provable:build", "--policy=mixed_bfloat16+rewrite"]) == 0
    assert keras.config.dtype_policy().name == "float32"
    options = tf.config.optimizer.get_experimental_options()
    assert not options.get("auto_mixed_precision_onednn_bfloat16")


# Word of --policy -> dtypes of the products of both layers in the graph.
POLICIES = {
    "keras:mixed_bfloat16": ["bfloat16"] * 5,
    "mixed_bfloat16+no_rules": ["bfloat16"] * 2 + ["bfloat16"] * 3,
    "float32": ["float32"] * 5,
}


@pytest.mark.parametrize("policy, dtypes", POLICIES.items(), ids=POLICIES)
def test_the_policy_is_in_force_when_the_model_is_built(module, policy, dtypes):
    path = module / "proof.json"
    argv = ["provable:build_three", f"--policy={policy}", f"--json={path}"]
    assert prove.main(argv) == 0
    assert [product.dtype for product in Proof.from_json(path).operations] == dtypes


def test_flags_reach_the_proof(module, monkeypatch, capsys):
    given = []

    class Told:
        def table(self):
            return "the table"

    def told(*args, **kwargs):
        given.append((len(args), kwargs))
        return Told()

    monkeypatch.setattr(prover, "prove", told)
    argv = ["provable:build", "--seconds", "2.5", "--notraining"]
    assert prove.main([*argv, "--policy", "float32+xla"]) == 0
    assert given == [(2, {"training": False, "jit_compile": True, "seconds": 2.5})]
    assert capsys.readouterr().out == "the table\n"
    assert prove.main(["provable:build", "--policy", "float32"]) == 0
    assert given[1] == (2, {"training": True, "jit_compile": None, "seconds": None})


FAILURES = {
    "no data": (
        ["provable:alone"],
        1,
        "expected (model, train) or (model, train, validation). Return the data",
    ),
    "not compiled": (["provable:uncompiled"], 1, "Model 'raw' is not compiled;"),
    "seconds": (["provable:build", "--seconds", "-1"], 2, "seconds"),
}


@pytest.mark.parametrize("argv, status, message", FAILURES.values(), ids=FAILURES)
def test_failures_end_with_a_status_and_a_sentence(capsys, argv, status, message):
    assert prove.main([*argv, "--policy=float32"]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.startswith("tfamp prove: ")
