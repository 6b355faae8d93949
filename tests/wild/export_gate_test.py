"""What the gate says where labels or calibration are not what their user thinks."""

import keras
import numpy as np
import pytest
from keras import layers

import tfamp
from tfamp.serving.runtimes import PACKAGES

NUMBER = 1200
TELLS_NOTHING = "tell nothing"


def customers():
    """Which of three plans a customer takes, by ten figures of theirs."""
    x = np.random.default_rng(0).normal(size=(NUMBER, 10)).astype("float32")
    return x, x[:, :3].argmax(axis=1)


def trained(outputs, activation, loss, y):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((10,)),
            layers.Dense(48, activation="relu"),
            layers.Dense(outputs, activation=activation),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), loss)
    model.fit(customers()[0], y, epochs=12, batch_size=64, verbose=0)
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


def test_losses_are_compared_where_targets_are_the_models_own(tmp_path):
    x, _ = customers()
    y = (3 * x[:, :1] + x[:, 1:2]).astype("float32")
    model = trained(1, None, "mae", y)
    found = exported(model, (x, y), tmp_path)
    assert found.verdict.startswith("as good")
    (metric,) = found.parity.metrics
    assert metric.name == "loss"
    wanted = model.evaluate(x, y, verbose=0)
    assert metric.reference == pytest.approx(wanted, rel=1e-4)
    # Targets of other examples.
    found = exported(model, (x, np.roll(y, 7, axis=0)), tmp_path)
    assert found.verdict == "undecided"
    assert TELLS_NOTHING in found.parity.reason


def test_calibration_without_spread_is_warned_of(plans, tmp_path):
    for package in PACKAGES["onnx"]:
        pytest.importorskip(package)
    given = {"format": "onnx", "dtype": "int8", "scheme": "static"}
    given["calibration"] = np.zeros((32, 10), "float32")
    with pytest.warns(UserWarning, match="1 different example among 32") as warned:
        found = exported(plans, None, tmp_path, **given)
    assert found.verdict == "undecided"
    assert any("tens of different training examples" in str(w.message) for w in warned)
    assert any(w.filename == __file__ for w in warned)
