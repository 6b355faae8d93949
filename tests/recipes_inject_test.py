"""The faults that `--inject` puts into recipes are there, and are told."""

import re
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.recipe_modules import TINY, TRAINING, load, run, shared

pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
FAULTS = ("bad_batch", "bad_lr", "mask", "overflow_layer")


@pytest.fixture(scope="module")
def faults():
    """The module of faults, where recipes find it and one another."""
    with shared("injecting") as (module,):
        yield module


def settings(inject, learning_rate=0.5):
    return types.SimpleNamespace(inject=inject, learning_rate=learning_rate)


# Layers


@pytest.mark.parametrize(
    "inject, name", [("overflow_layer", "overflow"), ("mask",) * 2]
)
@pytest.mark.parametrize(
    "dtype, survives",
    [("float32", True), ("mixed_bfloat16", True), ("mixed_float16", False)],
)
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_layer_breaks_float16_and_no_other_format(
    faults, inject, name, dtype, survives, in_graph
):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, faults.layer(inject, inputs))
    layer = model.get_layer(name)
    layer.dtype_policy = keras.DTypePolicy(dtype)
    call = tf.function(layer) if in_graph else layer
    # Powers of two and sums of few: bfloat16 holds them.
    x = np.array([[0.25, -1.5, 3.0, 0.5]], "float32")
    outputs = tf.cast(call(tf.constant(x)), "float32").numpy()
    if survives:
        np.testing.assert_array_equal(outputs, x)
    else:
        assert not np.isfinite(outputs).any()


@pytest.mark.parametrize("inject", [None, *FAULTS])
def test_other_faults_leave_layers_and_batches_alone(faults, inject):
    inputs, data = keras.Input((4,)), numbered(2)
    if inject not in ("mask", "overflow_layer"):
        assert faults.layer(inject, inputs) is inputs
    if inject != "bad_batch":
        assert faults.batches(inject, data) is data


@pytest.mark.parametrize("name", ["Overflow", "Mask"])
def test_a_layer_is_saved_and_loaded(faults, tmp_path, name):
    model = keras.Sequential([keras.Input((2,)), getattr(faults, name)(name="own")])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = np.array([[1.0, -2.0]], "float32")
    np.testing.assert_array_equal(loaded(x), x)
    assert loaded.layers[0].name == "own"


# Batches and the learning rate


def numbered(num_batches, *, is_known=True):
    x = np.arange(2 * num_batches, dtype="float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x.astype("uint8"))).batch(2)
    return dataset if is_known else dataset.filter(lambda x, y: True)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("num_batches, middle", [(2, 1), (5, 2)])
def test_the_batch_in_the_middle_is_bad_and_no_other(
    faults, num_batches, middle, is_known
):
    data = faults.batches("bad_batch", numbered(num_batches, is_known=is_known))
    assert int(data.cardinality()) == num_batches
    for _ in range(2):
        weights = [weight.numpy() for _, _, weight in data]
        bad = [bool(np.isnan(weight).all()) for weight in weights]
        assert bad == [i == middle for i in range(num_batches)]
        assert all((w == 1.0).all() for w, b in zip(weights, bad, strict=True) if not b)
    kept = np.concatenate([x for x, _, _ in data])
    np.testing.assert_array_equal(kept, np.arange(2 * num_batches))


def test_targets_with_an_axis_of_time_get_a_weight_each(faults):
    x = np.zeros((6, 5), "uint8")
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(2)
    weights = [w.numpy() for _, _, w in faults.batches("bad_batch", data)]
    assert [w.shape for w in weights] == [(2, 5)] * 3
    assert [bool(np.isnan(w).all()) for w in weights] == [False, True, False]


@pytest.mark.parametrize(
    "inject, expected", [(None, 0.5), ("mask", 0.5), ("bad_lr", 5000.0)]
)
def test_a_bad_learning_rate_is_ten_thousand_times_too_high(faults, inject, expected):
    assert faults.learning_rate(settings(inject)) == expected


# What is said


def test_a_fault_is_announced_in_one_line(faults, capsys):
    faults.announce(settings(None))
    assert capsys.readouterr().out == ""
    for inject in FAULTS:
        faults.announce(settings(inject))
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"Injected fault {inject}: the ")


@pytest.mark.parametrize("recipe", TRAINING)
@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--inject=mask", "--compare=2"],
            "`--inject` came with `--compare`; expected",
        ),
        (["--guard=runs", "--compare=2"], "`--guard` came with `--compare`; expected"),
        (["--inject=gremlin"], r"inject=gremlin.*bad_batch"),
    ],
    ids=["fault compared", "guard compared", "unknown fault"],
)
def test_flags_that_cannot_be_are_refused(faults, capsys, recipe, arguments, message):
    assert load(recipe).main([recipe, *arguments]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error)


# Each recipe with two faults, each fault with a recipe or two.
PAIRS = [
    (recipe, inject)
    for i, recipe in enumerate(TRAINING)
    for j, inject in enumerate(FAULTS)
    if (i + j) % 2 == 0
]


@pytest.mark.parametrize("recipe, inject", PAIRS)
def test_smoke_runs_with_a_fault(recipe, inject):
    """Under float32 a layer's fault changes nothing, a NaN batch ends in NaN."""
    finished = run(
        *(recipe, "--smoke", "--policy=float32", f"--inject={inject}"),
        *TINY.get(recipe, ()),
    )
    assert finished.stdout.count("Injected fault") == 1
    if inject != "bad_lr":
        assert finished.record["finite"] == (inject != "bad_batch")


# `--guard`


REMEDIES = {
    "bad_batch": ("data", "drop batch"),
    "bad_lr": ("learning rate", "cut learning rate"),
    "mask": ("precision", "keep in float32"),
    "overflow_layer": ("precision", "keep in float32"),
}


def cured(folder, inject, *arguments):
    """Runs the recipe of the tables with a fault and a guard; returns its record."""
    finished = run(
        *("train_tabular.py", "--policy=mixed_float16", *arguments),
        *(f"--inject={inject}", f"--guard={folder}"),
    )
    record = finished.record
    first = record["recoveries"][0]
    assert (first["cause"], first["remedy"]) == REMEDIES[inject]
    assert {each["remedy"] for each in record["recoveries"]} == {first["remedy"]}
    assert "Recovery 1 at epoch 1" in finished.stdout
    replay = f"Replay a failing step: tfamp replay {record['bundles'][0]}"
    assert replay in finished.stdout
    assert Path(record["bundles"][0]).is_relative_to(folder)
    assert record["finite"]
    return record


def test_a_guarded_recipe_is_cured_at_its_first_step(tmp_path):
    cured(tmp_path, "mask", "--smoke")


@pytest.fixture(scope="module")
def healthy():
    """Accuracy of the recipe without a fault."""
    record = run("train_tabular.py", "--policy=mixed_float16").record
    assert "recoveries" not in record
    return record["score_clean"]


@pytest.mark.whole(
    "the test above holds the cure, failure_to_recovery_test what follows"
)
@pytest.mark.parametrize("inject", FAULTS)
def test_a_guarded_recipe_ends_as_well_as_a_healthy_one(inject, healthy, tmp_path):
    assert cured(tmp_path, inject)["score_clean"] >= healthy - 0.01
