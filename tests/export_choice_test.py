"""Which export is chosen, how models are timed in turns, and on how many threads."""

import types

import numpy as np
import pytest

from tfamp.serving.exports import exporter
from tfamp.serving.exports.candidates import Candidate
from tfamp.serving.exports.request import Request
from tfamp.serving.runtimes.signature import LoadedModel, Signature, TensorSpec
from tfamp.serving.turns import in_turns, raced, slowdowns, speedup
from tfamp.trials.statistics import Interval

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
    turns = raced(models, X, sizes, seconds=seconds, clock=lambda: Taking.now)
    return slowdowns(turns, sizes)


def test_the_fastest_over_all_sizes_wins():
    models = {
        "best at one": {1: 0.1, 64: 4.0},
        "best at both": {1: 0.2, 64: 1.0},
        "slow": {1: 0.8, 64: 4.0},
    }
    found = paces(models, {64, 1}, seconds=400)
    wanted = {"best at both": 1.0, "slow": 4.0, "best at one": np.sqrt(2)}
    assert found == pytest.approx(wanted)


def test_each_takes_a_few_turns_however_small_the_budget():
    found = paces({"a": {1: 2.0}, "b": {1: 1.0}}, {1}, seconds=1e-3)
    assert found == pytest.approx({"a": 2.0, "b": 1.0})
    # Five turns of two calls that warm up and two that count.
    assert Taking.now == 5 * 4 * (2.0 + 1.0)


def test_a_side_that_takes_half_the_time_is_twice_as_fast():
    now = [0.0]

    def taking(seconds):
        def call():
            now[0] += seconds

        return call

    sides = {"own": taking(1.0), "other": taking(2.0)}
    found = in_turns(sides, seconds=180.0, clock=lambda: now[0])
    assert [len(turn) for turn in found["own"]] == [10] * 9
    speed = speedup(found["other"], found["own"], against="o", batch_size=1)
    assert speed.p50 == Interval(2.0, 2.0, 2.0) == speed.p99


def chosen(seconds, differences, monkeypatch):
    """Returns what is chosen of candidates that take (all, one) thread so long."""
    candidates = [
        Candidate(Request(format, "float32"), None, None, off, None)
        for format, off in differences.items()
    ]

    def made(models, inputs, sizes, *, seconds_of=seconds, seconds):
        return {
            ((name, threads), size): [[seconds_of[name.split()[0]][threads == 1]]]
            for name, threads in models
            for size in sizes
        }

    monkeypatch.setattr(exporter, "raced", made)
    monkeypatch.setattr(exporter, "num_usable_cpus", lambda: 4)
    monkeypatch.setattr(Candidate, "load", lambda self, threads=None: None)
    source = types.SimpleNamespace(tried_inputs=dict)
    return exporter._fastest(source, candidates, None, 1.0)


EXACT = {"litert": 1e-2, "onnx": 1e-6}


@pytest.mark.parametrize(
    ("litert", "onnx", "expected"),
    [(1.0, 1.04, "onnx"), (1.0, 1.06, "litert"), (1.04, 1.0, "onnx")],
    ids=["within 5 %", "faster", "slower"],
)
def test_a_gain_of_less_than_5_percent_is_no_reason_to_be_less_exact(
    litert, onnx, expected, monkeypatch
):
    seconds = {"litert": (litert, litert), "onnx": (onnx, onnx)}
    assert chosen(seconds, EXACT, monkeypatch).request.format == expected


@pytest.mark.parametrize(
    ("alone", "threads"),
    [((1.6, 1.0), 1), ((1.04, 1.0), None), ((1.0, 1.6), None)],
    ids=["one is faster", "alike", "all are faster"],
)
def test_one_thread_is_taken_where_it_was_faster(alone, threads, monkeypatch):
    found = chosen({"onnx": alone}, {"onnx": 0.0}, monkeypatch)
    assert (found.threads, found.seconds) == (threads, alone[threads == 1])


def test_each_races_on_the_threads_that_suit_it(monkeypatch):
    seconds = {"litert": (3.0, 0.5), "onnx": (1.0, 2.0)}
    found = chosen(seconds, EXACT, monkeypatch)
    assert (found.request.format, found.threads) == ("litert", 1)
