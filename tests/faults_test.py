"""The models that the tools are judged by are spoilt where they are said to be."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.wild.fault_cases import BOTH, CASES
from tests.wild.fault_steps import FAILURES, step

# Those of chains, which have layers beside the guilty ones.
CHAINS = [case for case in CASES if ", " in case.name and any(case.guilty.values())]
SOME = CHAINS[::6]
# Error of the outputs over their spread, and of a layer's gradient over its norm.
LIMITS = {"float16": (0.1, 0.3), "bfloat16": (0.3, 0.5)}


def test_the_set_is_as_large_as_it_is_said_to_be():
    assert sum(not case.is_healthy for case in CASES) >= 100
    assert sum(case.is_healthy for case in CASES) >= 75
    assert len({case.name for case in CASES}) == len(CASES)
    assert {failure.cause for failure in FAILURES} == {
        *("data", "model", "learning rate", "optimizer"),
        *("loss scale", "precision", "none"),
    }


def walk(layer, prefix=""):
    """Yields the path and each layer that holds no other."""
    for child in getattr(layer, "parts", None) or layer.layers:
        if hasattr(child, "parts") or isinstance(child, keras.Model):
            yield from walk(child, f"{prefix}{child.name}/")
        else:
            yield prefix + child.name, child


def run(model, batch, scale):
    """Returns outputs and each layer's gradient in float64; the state stays."""
    x, y, *_ = batch
    state = [variable.numpy() for variable in model.non_trainable_variables]
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        loss = tf.cast(model.compute_loss(y=y, y_pred=predicted), "float32") * scale
    variables = model.trainable_variables
    found = {}
    for variable, each in zip(
        variables, tape.gradient(loss, [v.value for v in variables]), strict=True
    ):
        flat = np.ravel(tf.convert_to_tensor(each)).astype("float64") / scale
        found.setdefault(variable.path.rpartition("/")[0], []).append(flat)
    for variable, value in zip(model.non_trainable_variables, state, strict=True):
        variable.assign(value)
    outputs = np.asarray(tf.cast(predicted, "float32"), "float64")
    return outputs, [np.concatenate(each) for each in found.values()]


def is_harmed(case, dtype, chooses):
    """Whether half precision in some layers spoils the first batch at every scale."""
    model, (batch, *_) = case.build(0)
    exact = run(model, batch, 1.0)
    for path, layer in walk(model):
        if chooses(path):
            layer.dtype_policy = keras.DTypePolicy(f"mixed_{dtype}")
    scales = (1.0, 256.0, 2.0**15) if dtype == "float16" else (1.0,)
    return all(
        is_off(run(model, batch, each), exact, *LIMITS[dtype]) for each in scales
    )


def is_off(found, exact, most_off, most_of_gradient):
    """Whether outputs or the gradient of a layer are further off than the limits."""
    (outputs, gradients), (true, norms) = found, exact
    if not all(np.isfinite(each).all() for each in (outputs, *gradients)):
        return True
    usual = np.median([np.linalg.norm(each) for each in norms])
    errors = [
        np.linalg.norm(given - each) / np.linalg.norm(each)
        for given, each in zip(gradients, norms, strict=True)
        if np.linalg.norm(each) > 1e-3 * usual
    ]
    spread = np.sqrt(np.mean((true - true.mean(axis=0)) ** 2))
    off = np.sqrt(np.mean((outputs - true) ** 2)) / spread
    return off > most_off or max(errors) > most_of_gradient


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case in SOME else pytest.mark.slow)
        for case in CHAINS
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_each_guilty_layer_spoils_the_model_and_all_others_do_not(case):
    for dtype in BOTH:
        guilty = case.guilty[dtype]
        for path in guilty:
            assert is_harmed(case, dtype, lambda each, path=path: each == path)
        assert not is_harmed(case, dtype, lambda each, own=guilty: each not in own)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_a_failing_step_is_not_finite_and_a_healthy_one_is(failure):
    model, batch = failure.build(0)
    try:
        is_finite = step(model, batch)
    except tf.errors.InvalidArgumentError:  # a label that is no class
        is_finite = False
    assert is_finite == (failure.cause == "none")
