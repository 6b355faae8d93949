"""The sets that find-the-fault tools are judged on say the truth, and are balanced."""

import collections
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import faults
from benchmarks.faults import lowering, records
from benchmarks.faults.building import Chain, Node, Raw, Stage, assemble, compiled
from benchmarks.faults.failure_training import step
from benchmarks.faults.lowering import Harm, Subject
from benchmarks.faults.own_layers import Adding, Dropped
from benchmarks.faults.prove_truth import holds
from benchmarks.faults.truth import is_right, prove
from tfamp.keras_hooks import structure

layers, ops = keras.layers, keras.ops
DTYPES = ("float16", "bfloat16")
FAULTY = [case for case in faults.CASES if case.kind != "healthy"]
HEALTHY = [case for case in faults.CASES if case.kind == "healthy"]
# The whole set is proven by benchmarks/faults/prove_truth.py, which takes minutes.
EACH_CASE = pytest.mark.parametrize(
    "case",
    [*faults.FIRST_CASES[::8], *faults.FURTHER_CASES[::16]],
    ids=lambda case: case.name,
)
EACH_FAILURE = pytest.mark.parametrize(
    "failure", faults.FAILURES, ids=lambda failure: failure.name
)


def by_name(name):
    return next(case for case in faults.CASES if case.name == name)


# What the sets hold


def test_the_set_is_as_large_as_asked():
    styles = collections.Counter(case.style for case in faults.CASES)
    assert len(FAULTY) >= 60
    assert len(HEALTHY) >= 15
    assert sum(case.depth >= 15 for case in FAULTY) >= 25
    assert min(styles[s] for s in ("functional", "sequential")) >= 10
    assert min(styles[s] for s in ("subclassed", "nested")) >= 10
    assert sum(styles.values()) == len(faults.CASES)
    assert len(faults.FAILURES) >= 30
    further = collections.Counter(
        case.kind == "healthy" for case in faults.FURTHER_CASES
    )
    assert further[False] >= 30 and further[True] >= 20


def test_every_cause_has_failures():
    causes = collections.Counter(failure.cause for failure in faults.FAILURES)
    assert set(causes) == {
        *("data", "model", "learning rate", "optimizer"),
        *("loss scale", "precision", "none"),
    }
    assert min(causes.values()) >= 4


SETS = {
    "cases": faults.FIRST_CASES,
    "further cases": faults.FURTHER_CASES,
    "failures": faults.FIRST_FAILURES,
    "further failures": faults.FURTHER_FAILURES,
}


@pytest.mark.parametrize("cases", SETS.values(), ids=SETS)
def test_each_kind_is_split_in_halves(cases):
    sizes = collections.Counter((case.kind, case.split) for case in cases)
    for kind in {case.kind for case in cases}:
        assert abs(sizes[kind, "develop"] - sizes[kind, "final"]) <= 1, kind
    total = collections.Counter(case.split for case in cases)
    assert abs(total["develop"] - total["final"]) <= 1
    assert set(total) == {"develop", "final"}


def test_a_name_that_comes_twice_is_refused():
    case = by_name("mlp")
    with pytest.raises(ValueError, match="'mlp'.*more than once"):
        records.split([case, case])


@pytest.mark.quick(
    "widen_shrink_functional",
    "widen_shrink_sequential",
    "widen_shrink_nested",
    "widen_shrink_nested_stage",
    "own_norm_subclassed",
)
@pytest.mark.parametrize("case", faults.CASES, ids=lambda case: case.name)
def test_what_is_said_of_a_case_fits_together(case):
    for dtype in DTYPES:
        has_layers = case.guilty[dtype] != frozenset({frozenset()})
        assert has_layers == (case.verdict[dtype] == "layers")
        assert has_layers == bool(case.reasons[dtype])


# How the truth is found, on a model that a reader can follow


def doubled_twice(style="functional"):
    """X times 2, then squared within float16's range or, above 128, out of it."""
    twice = Raw(lambda x: 2.0 * x, name="twice")
    square = Raw(lambda x: x * x / 1e4, name="square")
    last = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False, name="last")
    x = np.array([[1.0], [50.0], [100.0], [200.0]], "float32")
    y = np.zeros((4, 1), "float32")
    return compiled(assemble(style, (1,), [twice], [square], [last])), [(x, y)]


@pytest.mark.quick("functional-square", "nested-inner/square")
@pytest.mark.parametrize(
    "style, path",
    [
        ("functional", "square"),
        ("sequential", "square"),
        ("subclassed", "square"),
        ("nested", "inner/square"),
        ("nested stage", "stage/square"),
    ],
)
def test_a_square_beyond_float16_is_the_guilty_layer(style, path):
    subject = Subject(*doubled_twice(style))
    truth = prove(subject, "float16")
    assert (truth.verdict, truth.guilty) == ("layers", {path})
    assert prove(subject, "bfloat16").verdict == "safe"
    assert is_right(subject, "float16", frozenset({path}))
    assert not is_right(subject, "float16", frozenset({"last"}))


def test_an_operation_of_a_graph_is_lowered_too():
    model = assemble(
        "functional",
        (1,),
        [Node("square", keras.ops.square)],
        [Node("root", lambda x: keras.ops.sqrt(x))],
        [keras.layers.Dense(1, kernel_initializer="ones", name="last")],
    )
    x = np.array([[1.0], [10.0], [300.0]], "float32")
    subject = Subject(compiled(model), [(x, np.zeros((3, 1), "float32"))])
    assert subject.harm({"square"}, "float16").output == np.inf
    assert prove(subject, "float16").guilty == {"square", "root"}


def test_lowering_ends_with_the_block_and_harms_no_state():
    model, data = doubled_twice()
    before = [layer.dtype_policy.name for layer in model.layers]
    subject = Subject(model, data)
    subject.harm(set(subject.paths), "float16")
    assert [layer.dtype_policy.name for layer in model.layers] == before
    assert subject.harm(set(), "float16") == Harm(0.0, 0.0)


def test_what_keras_made_a_layer_of_is_lowered_with_it():
    inputs = keras.Input((4, 8))
    attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(inputs, attention(inputs, inputs))
    subject = Subject(
        compiled(model), [(np.ones((2, 4, 8), "float32"), np.ones((2, 4, 8)))]
    )
    assert subject.paths == ["attention"]
    assert len(subject.units[0].layers) > 4


def test_moving_statistics_are_put_back():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.BatchNormalization(name="norm")]
    )
    x = np.arange(12, dtype="float32").reshape(4, 3)
    subject = Subject(compiled(model), [(x, x)])
    subject.harm({"norm"}, "float16")
    np.testing.assert_array_equal(model.get_layer("norm").moving_mean.numpy(), 0.0)


def test_errors_are_as_by_hand():
    true = [np.array([[0.0], [2.0]])]
    # Spread 1, error 0.5 in one of two values.
    assert lowering.output_error([np.array([[0.0], [2.5]])], true) == pytest.approx(
        np.sqrt(0.125)
    )
    assert lowering.output_error([np.array([[0.0], [np.nan]])], true) == np.inf
    # Norms 5, 1 and a noise around zero, which does not count; 1 of 5 is 0.2.
    reference = {"a": [3.0, 4.0], "b": [1.0], "noise": [1e-6]}
    reference = {path: np.array(value) for path, value in reference.items()}
    given = reference | {"a": np.array([3.0, 5.0]), "noise": np.array([5e-6])}
    assert lowering.gradient_error(given, reference) == pytest.approx(0.2)
    given["noise"] = np.array([np.inf])
    assert lowering.gradient_error(given, reference) == np.inf


def test_dropout_drops_the_same_in_every_dtype_and_keeps_it():
    inputs = keras.Input((8,))
    model = keras.Sequential(
        [inputs, layers.Dropout(0.5, name="drop"), Raw(ops.square)]
    )
    data = [(np.ones((4, 8), "float32"), np.ones((4, 8), "float32"))]
    subject = Subject(compiled(model), data)
    assert subject.harm(set(subject.paths), "float16") == Harm(0.0, 0.0)


def test_a_users_block_is_lowered_with_the_dropout_inside():
    block = Dropped(lambda x: ops.square(1e3 * x) * 1e-6, name="block")
    model = keras.Sequential([keras.Input((8,)), block])
    data = [(np.ones((4, 8), "float32"), np.ones((4, 8), "float32"))]
    assert Subject(compiled(model), data).harm({"block"}, "float16").output == np.inf


def test_a_loss_that_a_layer_adds_is_harm():
    penalty = Adding(lambda x: ops.mean(ops.square(600.0 * x)), name="penalty")
    model = keras.Sequential([keras.Input((8,)), penalty])
    data = [(np.ones((4, 8), "float32"), np.ones((4, 8), "float32"))]
    assert Subject(compiled(model), data).harm({"penalty"}, "float16").output == np.inf


# The cases


# Layers that lose digits on processors that add up in this dtype, not in float32.
BY_PROCESSOR = {("average_pooling", "bfloat16"): frozenset({"mean"})}


@pytest.mark.quick("embedding")
@EACH_CASE
def test_the_truth_is_proven(case):
    subject = Subject(*case.build(0))
    for dtype in DTYPES:
        truth = prove(subject, dtype)
        if (case.name, dtype) in BY_PROCESSOR and truth.guilty:
            assert truth.guilty == BY_PROCESSOR[case.name, dtype], truth
            continue
        assert holds(case, dtype, truth), (dtype, truth)


@pytest.mark.slow("every further case is lowered layer by layer")
@pytest.mark.parametrize("case", faults.FURTHER_CASES, ids=lambda case: case.name)
def test_the_truth_of_every_further_case_is_proven(case):
    subject = Subject(*case.build(0))
    for dtype in DTYPES:
        truth = prove(subject, dtype)
        assert holds(case, dtype, truth), (dtype, truth)


@pytest.mark.quick("images_of_bytes", "tiny_loss_dropped")
@EACH_CASE
def test_the_same_seed_builds_the_same_case(case):
    (first, data), (second, again) = case.build(3), case.build(3)
    # Keras numbers names that it makes up itself.
    paths, again_paths = (
        [re.sub(r"_\d+(?=/|$)", "", path) for path, *_ in structure.walk(each)][1:]
        for each in (first, second)
    )
    assert paths == again_paths
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(tf.nest.flatten(data), tf.nest.flatten(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_fault_is_at_another_depth_for_another_seed():
    places = set()
    for seed in range(4):
        model, _ = by_name("widen_shrink_functional").build(seed)
        places.add([layer.name for layer in model.layers].index("widen"))
    assert len(places) > 1


# The failures


def scale_one(model):
    """Has the model's optimizer scale nothing."""
    if hasattr(model.optimizer, "freeze"):
        model.optimizer.freeze(1.0)


def is_finite(model, batch):
    """Whether a step is, a batch that TensorFlow itself refuses is not."""
    try:
        return step(model, batch)
    except tf.errors.InvalidArgumentError:
        return False


@pytest.mark.quick("nan_in_y_float16", "norm_of_zero_inside", "learning_rate_adam")
@EACH_FAILURE
def test_a_failure_fails_and_none_does_not(failure):
    model, batch = failure.build(0)
    assert is_finite(model, batch) == (failure.cause == "none")


@pytest.mark.quick("healthy_rows_float16", "healthy_infinite_mask")
@EACH_FAILURE
def test_the_cause_is_the_cause(failure):
    """Each cause is taken away, and the step is finite; what is no cause is not."""
    model, batch = failure.build(0, policy="float32")
    fails_in_float32 = failure.cause in ("data", "model", "learning rate", "optimizer")
    assert is_finite(model, batch) != fails_in_float32
    if failure.cause == "loss scale":
        model, batch = failure.build(0)
        scale_one(model)
        assert is_finite(model, batch)
    if failure.cause == "precision":
        model, batch = failure.build(0)
        scale_one(model)
        assert not is_finite(model, batch)
    if failure.cause == "data":
        model, batch = failure.build(0)
        scale_one(model)
        assert is_finite(model, repaired(batch))
    if failure.cause in ("learning rate", "optimizer"):
        model, batch = failure.build(0)
        inputs, targets, *_ = batch
        assert np.isfinite(np.asarray(targets)).all()
        rebuilt = keras.optimizers.SGD(1e-6)
        if failure.cause == "optimizer":
            model.compile(optimizer=rebuilt, loss="mse")
            assert is_finite(model, batch)


def repaired(batch):
    """Returns a batch with 0 for what is not finite, out of range or huge."""

    def repair(values):
        values = np.where(np.isfinite(values), values, 0).astype(values.dtype)
        return np.where(np.abs(values) > 50, 0, values)

    return tuple(repair(values) for values in batch)


@pytest.mark.quick(
    "nan_in_x",
    "nan_in_x_bfloat16",
    "infinity_in_x_float16",
    "nan_in_sequence",
    "nan_in_y",
)
@EACH_FAILURE
def test_the_named_layer_is_where_it_begins(failure):
    """It gets finite values, and gives one that is not, forward or backward."""
    if not failure.layers or failure.cause == "optimizer":
        assert failure.cause not in ("model", "precision")
        return
    model, batch = failure.build(0)
    paths = {path: layer for path, layer, _ in structure.walk(model)}
    layers = [paths[path] for path in failure.layers if path in paths]
    seen = []
    for layer in layers:
        original = layer.call

        def call(inputs, *args, original=original, layer=layer, **kwargs):
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = original(inputs, *args, **kwargs)
                total = tf.reduce_sum(tf.cast(outputs, "float32"))
            seen.append((inputs, outputs, tape.gradient(total, inputs)))
            return outputs

        layer.call = call
    if not layers:
        assert failure.name == "mask_constant_nodes"
        return
    model(batch[0], training=True)
    # The last: it may have been tried in a trace before.
    inputs, outputs, gradient = (np.asarray(tf.cast(v, "float32")) for v in seen[-1])
    assert np.isfinite(inputs).all()
    assert not (np.isfinite(outputs).all() and np.isfinite(gradient).all())


def test_chain_and_stage_are_users_classes():
    assert not Chain.__module__.startswith("keras")
    assert not Stage.__module__.startswith("keras")
