"""Which export is chosen, and which float32 the gate times it against."""

import types

import numpy as np
import pytest

from tfamp.serving.exports import choosing
from tfamp.serving.exports.candidates import Candidate
from tfamp.serving.exports.request import Request
from tfamp.serving.parity import timings
from tfamp.serving.runtimes.signature import LoadedModel, Signature, TensorSpec

SPEC = TensorSpec("x", (None, 1), "float32")
X = {"x": np.ones((2, 1), np.float32)}


class Taking(LoadedModel):
    """Takes some seconds of a clock for a batch, by its size."""

    def __init__(self, seconds):
        super().__init__(None, Signature((SPEC,), (SPEC,)))
        self.seconds = seconds

    def run(self, inputs):
        Taking.now += self.seconds[len(inputs["x"])]


def paces(models, sizes, seconds):
    Taking.now = 0.0
    models = {name: Taking(each) for name, each in models.items()}
    return timings.raced(models, X, sizes, seconds=seconds, clock=lambda: Taking.now)


def test_the_fastest_over_all_sizes_wins():
    models = {
        "best at one": {1: 0.1, 64: 4.0},
        "best at both": {1: 0.2, 64: 1.0},
        "slow": {1: 0.8, 64: 4.0},
    }
    found = paces(models, {64, 1}, seconds=400)
    assert found["best at both"] == pytest.approx((0.2, 1.0))
    assert found["slow"] == pytest.approx((0.8, 4.0))
    assert found["best at one"] == pytest.approx((0.1, np.sqrt(2)))


def test_each_takes_a_few_turns_however_small_the_budget():
    models = {"a": {1: 2.0}, "b": {1: 1.0}}
    assert paces(models, {1}, seconds=1e-3) == {
        "a": pytest.approx((2.0, 2.0)),
        "b": pytest.approx((1.0, 1.0)),
    }
    # Five turns of two calls that warm up and two that count.
    assert Taking.now == 5 * 4 * (2.0 + 1.0)
    assert paces({"a": {1: 2.0}}, {1}, 1e-3) == {"a": pytest.approx((2.0, 1.0))}


def candidate(format, dtype="float32"):
    return Candidate(Request(format, dtype), None, None, 0.0)


@pytest.mark.parametrize(
    ("slowdowns", "expected"),
    [((1.0, 1.04), "onnx"), ((1.0, 1.06), "litert"), ((1.04, 1.0), "onnx")],
    ids=["within 5 %", "faster", "slower"],
)
def test_a_gain_of_less_than_5_percent_is_no_reason_to_be_less_exact(
    slowdowns, expected, tmp_path, monkeypatch
):
    exact = {"litert": 1e-2, "onnx": 1e-6}

    def write_sparing(source, request, folder):
        (folder / "model").write_bytes(b"weights")
        return Candidate(request, folder, None, exact[request.format]), None

    def paced(source, candidates, seconds):
        names = [each.request.name for each in candidates]
        return {
            name: timings.Pace(1.0, slowdown)
            for name, slowdown in zip(names, slowdowns, strict=True)
        }

    monkeypatch.setattr(choosing, "write_sparing", write_sparing)
    monkeypatch.setattr(choosing, "_raced", paced)
    monkeypatch.setattr(choosing, "missing", lambda format: ())
    choice = choosing.choose(
        types.SimpleNamespace(validation=None),
        [Request(format, "float32") for format in exact],
        tmp_path,
        budget_seconds=100,
    )
    assert choice.best.request.format == expected
    outcomes = {each.name: each.outcome for each in choice.tried}
    assert outcomes[f"{expected} float32"] == "chosen"


@pytest.mark.parametrize(
    ("chosen", "fastest", "expected"),
    [
        (candidate("onnx", "int8"), "litert", "litert"),
        (candidate("onnx", "int8"), "onnx", "onnx"),
        (candidate("onnx"), "litert", "litert"),
        (candidate("onnx"), "onnx", None),
    ],
    ids=["other", "own format", "float32", "itself"],
)
def test_the_gate_times_against_the_best_float32_of_all_runtimes(
    chosen, fastest, expected, tmp_path, monkeypatch
):
    def write(source, request, folder):
        if request.format == "openvino":
            raise ValueError("OpenVINO has no loops.")
        return Candidate(request, folder, None, 0.0)

    def paced(source, candidates, seconds):
        return {
            each.request.name: timings.Pace(1.0, 1.0 + (each.request.format != fastest))
            for each in candidates
        }

    monkeypatch.setattr(choosing, "write", write)
    monkeypatch.setattr(choosing, "_raced", paced)
    monkeypatch.setattr(choosing, "choose_threads", lambda source, candidate: None)
    monkeypatch.setattr(choosing, "missing", lambda format: ())
    source, choice = types.SimpleNamespace(), choosing.Choice(chosen, None)
    best, notes = choosing.best_float32(
        *(source, choice, tmp_path / "a"), budget_seconds=100
    )
    assert (best and best.request) == (expected and Request(expected, "float32"))
    (note,) = notes
    assert note.startswith("The float32 of openvino was not timed: ")
    assert "no loops" in note
    now = iter(range(0, 10**6, 100))
    _, notes = choosing.best_float32(
        *(source, choice, tmp_path / "b"),
        budget_seconds=100,
        clock=lambda: next(now),
    )
    assert "openvino was not timed: the budget was used up" in notes[-1]
