"""The gate: exported models against float32 on paired examples, in answers and time."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.serving.gate import (
    MetricChange,
    Parity,
    Speedup,
    check_parity,
    judged,
    reference_of,
)
from tfamp.serving.runtimes.signature import LoadedModel, Signature, TensorSpec
from tfamp.trials.statistics import Interval

CLASSES = 4


class Fake(LoadedModel):
    """Answers by a function of arrays by name."""

    def __init__(self, function, inputs, outputs):
        super().__init__("onnx", None, Signature(specs(inputs), specs(outputs)), None)
        self.function = function

    def run(self, inputs):
        return self.function(inputs)


def specs(shapes):
    each = shapes.items()
    return tuple(TensorSpec(n, (None, *shape), "float32") for n, shape in each)


def changed(change):
    """Returns a model that passes its input on, and one that changes its answers."""
    x = keras.Input((CLASSES,), name="x")
    model = keras.Model(x, keras.layers.Identity(name="y")(x))
    return model, Fake(
        lambda given: {"y": change(given["x"].copy())}, {"x": (CLASSES,)}, {"y": (4,)}
    )


def examples(number):
    """Returns rows that name a class each, and the classes."""
    y = np.arange(number) % CLASSES
    return np.eye(CLASSES, dtype="float32")[y], y


def gate(model, candidate, data, **options):
    if not isinstance(data, tf.data.Dataset):
        data = tf.data.Dataset.from_tensors(data)  # one batch
    exact, loss = tfamp.load_exported(model), getattr(model, "loss", None)
    reference = reference_of(exact, data, exact.prepared, loss)
    return check_parity(reference, candidate, **options)


def losing(number):
    def change(x):
        x[:number] = np.roll(x[:number], 1, axis=1)
        return x

    return change


CASES = {
    "0 losses in 360": (360, 0, "undecided", 0.00829, 598),
    "0 losses in 598": (598, 0, "as good, not faster", 0.004997, None),
    "1 loss in 947": (947, 1, "as good, not faster", 0.0049995, None),
    "60 losses in 360": (360, 60, "worse", 0.2022, None),
}


@pytest.mark.quick("0 losses in 360", "60 losses in 360")
@pytest.mark.parametrize(
    "number, lost, verdict, bound, needed", CASES.values(), ids=CASES
)
def test_lost_examples_bound_the_drop(number, lost, verdict, bound, needed):
    parity = gate(*changed(losing(lost)), examples(number))
    (metric,) = parity.metrics
    assert (parity.verdict, metric.num_needed) == (verdict, needed)
    assert (metric.flipped, metric.name) == (lost, "accuracy")
    assert metric.bound == pytest.approx(bound, rel=1e-3)
    assert metric.worsening == pytest.approx(lost / number)
    assert ("It needs" in parity.reason) == (needed is not None)


def test_without_labels_flipped_predictions_bound_the_drop():
    x = examples(700)[0]
    parity = gate(*changed(losing(1)), x)
    assert parity.metrics[0].flipped == 1
    (metric,) = parity.metrics
    assert (metric.name, metric.bound > 0.005) == ("agreement with float32", True)
    assert parity.verdict == "undecided" and metric.num_needed == 947
    assert "There are no labels: only outputs are compared." in parity.reason
    assert gate(*changed(losing(300)), x).verdict == "worse"
    assert gate(*changed(losing(0)), x).verdict == "as good, not faster"


def test_a_logit_changes_its_class_at_0():
    def pushed(by):
        return Fake(lambda given: {"y": given["x"] + by}, {"x": (1,)}, {"y": (1,)})

    x = keras.Input((1,), name="x")
    model = keras.Model(x, keras.layers.Identity(name="y")(x))
    logits = np.repeat(np.array([-2.0, -0.05, 0.5, 2.0], "float32"), 150)[:, None]
    data = (logits, (logits[:, 0] > 0).astype("int32"))
    assert gate(model, pushed(0.01), data).metrics[0].flipped == 0
    assert gate(model, pushed(0.1), data).metrics[0].flipped == 150


def test_numbers_without_classes_are_compared_by_loss_or_by_outputs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, CLASSES)).astype("float32")
    y = x + rng.normal(size=x.shape).astype("float32")
    model, near = changed(lambda x: x * 1.0001)
    _, off = changed(lambda x: x + 1.0)
    assert gate(model, near, (x, y)).metrics[0].name == "difference over spread"
    assert gate(model, off, (x, y)).verdict == "worse"
    model.compile(loss="mse")
    parity = gate(model, near, (x, y))
    assert parity.verdict == "as good, not faster"
    (metric,) = parity.metrics
    # Squared errors around 1 become about 2: worse by about 1, as a part of the loss.
    assert metric.name == "loss" and abs(metric.bound) < 0.005
    assert gate(model, off, (x, y)).metrics[0].worsening == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("by_name", [False, True], ids=["in order", "by name"])
def test_each_output_is_held_to_labels_of_its_own(by_name):
    x = keras.Input((CLASSES,), name="x")
    same = {name: keras.layers.Identity(name=name)(x) for name in ("a", "b")}
    given, y = examples(598)
    other = 3 - y  # the classes of "b", whose answers are those of "a" backwards
    model = keras.Model(x, {"a": same["a"], "b": same["b"][:, ::-1]})
    candidate = Fake(
        lambda x: {"a": x["x"], "b": losing(60)(x["x"][:, ::-1].copy())},
        *({"x": (CLASSES,)}, {"a": (CLASSES,), "b": (CLASSES,)}),
    )
    labels = {"a": y, "b": other} if by_name else (y, other)
    parity = gate(model, candidate, (given, labels))
    found = [(each.output, each.name, each.flipped) for each in parity.metrics]
    assert found == [("a", "accuracy", 0), ("b", "accuracy", 60)]
    assert parity.verdict == "worse"


def test_numbers_that_are_not_finite_are_worse():
    parity = gate(*changed(lambda x: x * np.nan), examples(40))
    assert parity.verdict == "worse" and "not finite" in parity.reason


def test_a_parity_comes_back_from_json():
    found = gate(*changed(losing(1)), examples(360))
    parity = found.timed(speeds(("SavedModel", 1, 2.0)))
    assert Parity.from_dict(json.loads(json.dumps(parity.to_dict()))) == parity
    assert "1 predictions flipped" in " ".join(parity.table().split())


def speeds(*middles):
    return tuple(
        Speedup(name, size, Interval(m, m / 1.02, m * 1.02))
        for name, size, m in middles
    )


FASTER = {
    "than all at one size": ((("a", 1, 2.0), ("b", 1, 1.2), ("a", 9, 1.0)), True),
    "than one of two": ((("a", 1, 2.0), ("b", 1, 1.0)), False),
    "but slower at another size": ((("a", 1, 2.0), ("a", 9, 0.8)), False),
    "than nothing": ((), False),
}


@pytest.mark.parametrize("middles, expected", FASTER.values(), ids=FASTER)
def test_faster_is_faster_than_all_at_a_size_and_slower_at_none(middles, expected):
    good = MetricChange("accuracy", "y", 0.9, 0.9, 0.0, -0.001, 0.004, 0.005, 900)
    bad = MetricChange("accuracy", "y", 0.9, 0.5, 0.4, 0.3, 0.5, 0.005, 900)
    told = "as good and faster" if expected else "as good, not faster"
    for metrics, verdict in (([good], told), ([good, bad], "worse")):
        found = Parity(*judged(metrics), 900, tuple(metrics))
        assert found.timed(speeds(*middles)).verdict == verdict
