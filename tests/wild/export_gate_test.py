"""What the gate says where labels or calibration are not what their user thinks."""

import importlib.util

import keras
import numpy as np
import pytest
from keras import layers

import tfamp

needs_onnx = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnx", "tf2onnx", "onnxruntime"))),
    reason="onnx is not installed",
)
NUMBER = 1200
TELLS_NOTHING = "tell nothing"


def customers():
    """Which of three plans a customer takes, by ten figures of theirs."""
    x = np.random.default_rng(0).normal(size=(NUMBER, 10)).astype("float32")
    return x, x[:, :3].argmax(axis=1)


def trained(outputs, activation, loss, y, *, epochs=12):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((10,)),
            layers.Dense(48, activation="relu"),
            layers.Dense(outputs, activation=activation),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), loss)
    if epochs:
        model.fit(customers()[0], y, epochs=epochs, batch_size=64, verbose=0)
    return model


@pytest.fixture(scope="module")
def plans():
    return trained(3, "softmax", "sparse_categorical_crossentropy", customers()[1])


def exported(model, validation, folder, **options):
    # No other runtime is to be timed beside it, which is what the budget is for.
    options = {"format": "saved_model", "budget_seconds": 0.01, **options}
    return tfamp.export(model, folder / "m", validation=validation, **options)


def test_nothing_is_as_good_by_labels_in_another_order(plans, tmp_path):
    x, y = customers()
    found = exported(plans, (x, (y + 1) % 3), tmp_path)
    assert found.verdict == "undecided"
    assert TELLS_NOTHING in found.parity.reason
    assert found.parity.metrics[0].name == "agreement with float32"


def price(x):
    return (3 * x[:, :1] + x[:, 1:2]).astype("float32")


def interests(x):
    return (x[:, :4] + 0.3 * x[:, 4:8] > 0.5).astype("float32")


OF_NUMBERS = {
    "regression": (1, None, "mae", price),
    "multi-label": (
        4,
        None,
        keras.losses.BinaryCrossentropy(from_logits=True),
        interests,
    ),
}


@pytest.mark.parametrize("is_mistaken", [False, True], ids=["right", "mistaken"])
@pytest.mark.parametrize(
    ("outputs", "activation", "loss", "targets"), OF_NUMBERS.values(), ids=OF_NUMBERS
)
@pytest.mark.quick("regression-right", "multi-label-mistaken")
def test_losses_are_compared_where_targets_are_the_models_own(
    outputs, activation, loss, targets, is_mistaken, tmp_path
):
    x, _ = customers()
    y = targets(x)
    model = trained(outputs, activation, loss, y)
    if is_mistaken:  # targets of other examples
        y = np.roll(y, 7, axis=0)
    found = exported(model, (x, y), tmp_path)
    if is_mistaken:
        assert found.verdict == "undecided"
        assert TELLS_NOTHING in found.parity.reason
    else:
        assert found.verdict.startswith("as good")
        (metric,) = found.parity.metrics
        assert metric.name == "loss"
        wanted = model.evaluate(x, y, verbose=0)
        assert metric.reference == pytest.approx(wanted, rel=1e-4)


ALL_ALIKE = np.zeros((32, 10), "float32")
INT8 = {"format": "onnx", "dtype": "int8", "scheme": "static"}


@needs_onnx
def test_calibration_without_spread_is_warned_of(plans, tmp_path):
    with pytest.warns(UserWarning, match="1 different example among 32") as warned:
        found = exported(plans, None, tmp_path, calibration=ALL_ALIKE, **INT8)
    assert found.verdict == "undecided"
    assert any("tens of different training examples" in str(w.message) for w in warned)
    assert any(w.filename == __file__ for w in warned)
