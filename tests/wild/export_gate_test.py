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


def another_order(x, y):
    return x, (y + 1) % 3


def one_hot_of_another_order(x, y):
    return x, np.roll(np.eye(3)[y], 1, axis=1)


def labels_of_other_examples(x, y):
    return x, np.random.default_rng(1).permutation(y)


def one_class_alone(x, y):
    return x[y == 0], y[y == 0]


@pytest.mark.parametrize(
    "mistake",
    [
        another_order,
        one_hot_of_another_order,
        labels_of_other_examples,
        one_class_alone,
    ],
)
@pytest.mark.quick("another_order")
def test_nothing_is_as_good_by_labels_that_float32_does_not_meet(
    mistake, plans, tmp_path
):
    found = exported(plans, mistake(*customers()), tmp_path)
    assert found.verdict == "undecided"
    assert TELLS_NOTHING in found.parity.reason
    assert found.parity.metrics[0].name == "agreement with float32"


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [3, 1], ids=["untrained", "rare class"])
def test_a_model_that_is_no_better_than_one_answer_is_undecided(outputs, tmp_path):
    x, y = customers()
    if outputs == 3:
        model = trained(3, "softmax", "sparse_categorical_crossentropy", y, epochs=0)
    else:
        y = (np.arange(NUMBER) % 60 == 0).astype(int)  # nothing in `x` tells it
        model = trained(1, "sigmoid", "binary_crossentropy", y, epochs=1)
    found = exported(model, (x, y), tmp_path)
    assert found.verdict == "undecided" and TELLS_NOTHING in found.parity.reason


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


@pytest.mark.slow
def test_right_labels_are_decided_as_before(plans, tmp_path):
    x, y = customers()
    found = exported(plans, (x, y[:, np.newaxis]), tmp_path)
    assert found.verdict.startswith("as good")
    assert found.parity.metrics[0].name == "accuracy"
    cost = found.parity.processes[0]  # of the process that the file was tried in
    assert cost.name == found.format
    assert cost.cold_start_seconds > 0.1 and cost.peak_bytes > 2**24


ALL_ALIKE = np.zeros((32, 10), "float32")
AGAIN_AND_AGAIN = np.tile(customers()[0][:2], (16, 1))
INT8 = {"format": "onnx", "dtype": "int8", "scheme": "static"}


def true_accuracy(found):
    x, y = customers()
    return np.mean(found.load().predict(x).argmax(axis=1) == y)


@needs_onnx
@pytest.mark.parametrize(
    ("calibration", "number"),
    [(ALL_ALIKE, "1 different example"), (AGAIN_AND_AGAIN, "2 different examples")],
    ids=["zeros", "two again and again"],
)
@pytest.mark.quick("zeros")
def test_calibration_without_spread_is_warned_of(calibration, number, plans, tmp_path):
    with pytest.warns(UserWarning, match=f"{number} among 32") as warned:
        found = exported(plans, None, tmp_path, calibration=calibration, **INT8)
    assert found.verdict == "undecided"
    assert any("tens of different training examples" in str(w.message) for w in warned)
    assert any(w.filename == __file__ for w in warned)
    if calibration is ALL_ALIKE:  # compared on other inputs than these
        assert found.difference > 0.1


@needs_onnx
@pytest.mark.slow("conversions by ONNX Runtime, which take seconds each")
def test_a_ruined_file_is_not_as_good_by_labels_in_another_order(plans, tmp_path):
    with pytest.warns(UserWarning, match="1 different example"):
        found = exported(
            *(plans, another_order(*customers()), tmp_path),
            calibration=ALL_ALIKE,
            write_failed=True,
            **INT8,
        )
    assert not found.verdict.startswith("as good")


@needs_onnx
@pytest.mark.slow("conversions by ONNX Runtime, which take seconds each")
def test_calibration_with_spread_passes_in_silence(plans, tmp_path):
    x, y = customers()
    options = {"calibration": x[:64], **INT8}
    found = exported(plans, (x, y), tmp_path, tolerance=0.05, **options)
    assert found.verdict.startswith("as good") and true_accuracy(found) > 0.9
    assert not any("those of `calibration`" in note for note in found.parity.notes)
    (note,) = found.parity.notes
    assert note == "onnx float32 was not timed beside it: the budget was used up."
    assert {each.against for each in found.parity.speedups} == {"SavedModel"}
    again = exported(plans, (x[:64], y[:64]), tmp_path, tolerance=0.2, **options)
    assert any("those of `calibration`" in note for note in again.parity.notes)


@needs_onnx
@pytest.mark.slow("conversions by ONNX Runtime, which take seconds each")
def test_without_validation_examples_that_calibrated_nothing_are_compared(
    plans, tmp_path
):
    x, _ = customers()
    calibration = np.concatenate([x[:59], 3 * x[59:64]])
    found = exported(plans, None, tmp_path, calibration=calibration, **INT8)
    assert found.verdict == "undecided"
    wanted = plans.predict(calibration[-5:], verbose=0)
    off = np.abs(found.load().predict(calibration[-5:]) - wanted).max()
    assert found.difference == pytest.approx(off / wanted.std(), rel=1e-3)


@needs_onnx
@pytest.mark.slow("conversions by ONNX Runtime, which take seconds each")
def test_a_model_of_one_layer_to_round_that_int8_spoils_is_called_worse(tmp_path):
    x, y = customers()
    model = trained(3, "softmax", "sparse_categorical_crossentropy", y)
    cut_off = 0.02 * x[:64]
    with pytest.raises(ValueError, match=r"worse than float32.*`write_failed=True`"):
        exported(model, (x, y), tmp_path, calibration=cut_off, **INT8)


class Read(keras.utils.PyDataset):
    """Batches that are counted as they are read."""

    def __init__(self, x, y, size=100):
        super().__init__()
        self.x, self.y, self.size, self.number = x, y, size, 0

    def __len__(self):
        return len(self.x) // self.size

    def __getitem__(self, index):
        self.number += 1
        rows = slice(index * self.size, (index + 1) * self.size)
        return self.x[rows], self.y[rows]


@pytest.mark.slow
@needs_onnx
def test_validation_data_are_read_and_predicted_once(plans, tmp_path):
    validation = Read(*customers())
    options = {"format": "onnx", "dtype": "int8", "scheme": "dynamic"}
    found = exported(plans, validation, tmp_path, tolerance=0.05, **options)
    assert found.parity.num_examples == NUMBER
    # Shapes are told by the first batches; whatever is tried, there is one pass more.
    assert validation.number < 2 * len(validation)


@pytest.mark.slow("the gate's processes, as above")
def test_a_generator_is_compared_whole(plans, tmp_path):
    x, y = customers()
    batches = ((x[i : i + 100], y[i : i + 100]) for i in range(0, NUMBER, 100))
    found = exported(plans, batches, tmp_path)
    assert found.parity.num_examples == NUMBER
    assert found.verdict.startswith("as good")
