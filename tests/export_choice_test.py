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
    """Answers with the seconds that a batch takes it, by its size."""

    def __init__(self, seconds):
        super().__init__(None, Signature((SPEC,), (SPEC,)))
        self.seconds, self.calls = seconds, 0

    def run(self, inputs):
        self.calls += 1
        return self.seconds[len(inputs["x"])]


@pytest.fixture
def answers_are_seconds(monkeypatch):
    monkeypatch.setattr(timings, "_seconds", lambda call, times: call())


def test_the_fastest_over_all_sizes_wins_and_the_slow_drop_out(answers_are_seconds):
    models = {
        "best at one": Taking({1: 0.1, 64: 4.0}),
        "best at both": Taking({1: 0.2, 64: 1.0}),
        "slow": Taking({1: 0.8, 64: 4.0}),
    }
    now = iter(range(10**6))
    paces = timings.raced(models, X, {64, 1}, seconds=400, clock=lambda: next(now))
    assert paces["best at both"] == (0.2, 1.0)
    assert paces["slow"] == (0.8, pytest.approx(4.0))
    assert paces["best at one"][1] == pytest.approx(np.sqrt(2))
    # It was clear at the first looks, long before the budget was spent.
    assert max(each.calls for each in models.values()) < 40


def test_each_takes_a_turn_however_small_the_budget(answers_are_seconds):
    models = {name: Taking({1: cost}) for name, cost in (("a", 2.0), ("b", 1.0))}
    paces = timings.raced(models, X, {1}, seconds=0.0)
    assert paces == {"a": (2.0, pytest.approx(2.0)), "b": (1.0, 1.0)}
    assert timings.raced({"a": models["a"]}, X, {1}, seconds=0.0) == {"a": (2.0, 1.0)}


def candidate(format, dtype="float32"):
    return Candidate(Request(format, dtype), None, None, 0.0)


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
