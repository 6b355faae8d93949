"""Every benchmark runs and says what its last line promises; no time is asserted."""

import functools
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import tfamp
from benchmarks import _runner, _tables, _turns, write_results
from benchmarks.__main__ import main, names

ROOT = Path(__file__).parents[1]
NOT_MEASURING = {"readme_figure", "write_results"}
# Both are float32 in the loss; what is left is rounding of a logit near 10.
FLOAT32_TOLERANCE = 1e-3


def load(name: str):
    """Returns a benchmark as a module, without running it."""
    return importlib.import_module(f"benchmarks.{name}")


def check_freeze(result):
    sizes = result["cases"]["MLP"]["bytes"]
    assert sizes["frozen"] < 0.55 * sizes["float32"]


def check_inference(result):
    own = result["cases"]["MLP"]
    base = own["candidates"]["saved_model float32"]
    assert base["flipped"] == 0 and 0.2 < base["1"]["ratio"] < 5
    names = [name for name in own["candidates"] if "onnx" in name]
    assert all(len(run["kept"]) <= 2 for run in result["planted"]["runs"])
    assert bool(result["planted"]["runs"]) == bool(names)


def check_serving(result):
    assert set(result["rates"]) == {"int8", "saved_model", "fastapi"}
    assert all(each["per_second"] > 0 for each in result["rates"].values())
    assert result["half_peak"]["errors"] == {}
    texts = write_results.section("serving", [result])[0]
    assert "| FastAPI, ONNX int8 |" in texts


def check_memory(result):
    figures = result["cases"]["MLP of 2 blocks"]["float32"]
    # A block has 2 x 1024 x 2048 numbers: the gradient of one product at least.
    assert figures["predicted"] > 2**23
    assert figures["measured"] == sorted(figures["measured"])


def check_remat(result):
    assert result["cases"]["MLP of 3 blocks"]["float32"]["off"] < 1e-4


def check_guilty_layers(result):
    halves = [result["develop"], result["final"]]
    counts = [
        count
        for half in halves
        for found in half["sensitivity"].values()
        for count in found.values()
    ]
    assert sum(total for _, total in counts) > 0
    assert all(0 <= right <= total for right, total in counts)
    assert sum(half["triage"]["causes"][1] for half in halves if half["triage"]) > 0


def check_pipeline(result):
    benchmark = load("pipeline")
    wanted = {f"{ours} / {other}" for ours, other in benchmark.GOALS}
    assert set(result["ratios"]) == wanted
    assert set(result["plans"]) == set(benchmark.PLANS)


def check_training(result):
    row = result["models"]["tiny"]["rows"]["keras:mixed_bfloat16"]
    # One seed: a ratio without an interval, and no verdict.
    assert (row["ratio"][1:], row["answer"]) == ([None, None], "undecided")


def check_tuner(result):
    (run,) = result["cases"]["MLP, differences"]
    assert (run["guilty_suffice"], run["guilty_needed"]) == (True, 2)
    assert run["met"] == [True, True] and run["evaluations"] <= 12


def check_fastest_policy(result):
    assert {each["kind"] for each in result["tries"]} == {"MLP", "CNN"}
    assert all(
        each["behind"] >= 1 and each["candidates"] > 1 for each in result["tries"]
    )


def check_scale(result):
    assert all(each["met"] for each in result["off"].values())
    assert result["workers_equal"] and all(result["examples"].values())
    assert all(each["met"] for each in result["masks"].values())
    killed = result["kills"]["alone"]
    assert killed["kills"] == 2 and killed["equal"]
    assert killed["lost"] <= killed["every_steps"]


RUNS = [[name] for name in names() if name not in NOT_MEASURING]
RUNS.append(["memory", "--glibc"])
# Benchmark -> packages that are of no extra of the tests.
NEEDED = {"serving": ("fastapi", "starlette", "tf2onnx", "onnxruntime", "uvicorn")}


@pytest.mark.slow("what they compute is tested below; what they print, seldom changes")
@pytest.mark.parametrize("command", RUNS, ids=" ".join)
def test_a_benchmark_prints_the_figures_that_it_writes(command, tmp_path):
    for package in NEEDED.get(command[0], ()):
        pytest.importorskip(package)
    path = tmp_path / "figures.json"
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks", *command, "--smoke", f"--json={path}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout.splitlines()[-1])
    assert result == json.loads(path.read_text())
    assert set(result["versions"]) == {"python", "tensorflow", "keras", "tfamp"}
    assert result["command"] == f"python -m benchmarks {' '.join(command)} --smoke"
    (_, columns, rows), *_ = _tables.of(command[0], result)
    assert rows and {len(row) for row in rows} == {len(columns)}
    globals().get(f"check_{command[0]}", lambda _: None)(result)


def test_benchmarks_are_listed_with_a_line_each(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(names())
    assert all(line.endswith(".") and len(line) <= 100 for line in lines)
    assert main(["memroy"]) == 2
    assert "Unknown benchmark 'memroy'; expected callbacks" in capsys.readouterr().err


def test_a_result_says_where_it_is_from_and_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_runner, "RESULTS", tmp_path)
    other = {"device": "another", "figure": 1}
    (tmp_path / "toy.json").write_text(json.dumps([other, other | {"device": "here"}]))
    about = {"device": "here", "versions": {}}
    monkeypatch.setattr(_runner, "about", lambda argv: about)
    toy = types.SimpleNamespace(
        FLAGS=(("integer", "turns", 3, "Turns."),),
        measure=lambda settings: {"figure": settings.turns},
    )
    assert _runner.run(["toy", "--turns=2", "--record"], toy) == 0
    found = {"benchmark": "toy", **about, "figure": 2}
    assert json.loads(capsys.readouterr().out) == found
    assert json.loads((tmp_path / "toy.json").read_text()) == [other, found]


def test_a_side_is_measured_in_its_process(capsys):
    toy = types.SimpleNamespace(measure_side=lambda size: {"twice": 2 * size})
    assert _runner.run(["toy", '--side={"size": 3}'], toy) == 0
    assert json.loads(capsys.readouterr().out) == {"twice": 6}


def test_a_section_tells_what_was_missed():
    missed = {
        **{"case": "cube", "dtype": "float16", "seed": 0, "expected": "layers"},
        **{"wanted": [["a"]], "found": "safe", "guilty": []},
    }
    half = {
        "sensitivity": {"float16": {"found": [1, 2], "reasons": [1, 1]}},
        "triage": {"causes": [3, 4], "layers": [2, 2]},
        "missed": [missed],
    }
    result = {"develop": half, "final": {**half, "missed": []}, "command": "c"}
    result |= {"versions": {"keras": "3"}, "seeds": 1}
    text, later = write_results.section("guilty_layers", [result])
    assert "| develop | float16 | 1 of 2 | 1 of 1 |" in text
    assert "develop: cause 3 of 4, layer 2 of 2" in text
    expected = "- cube float16, seed 0 (develop): expected layers [['a']], got safe"
    assert expected in later


class Counted:
    """An iterable with fewer batches each time, where asked to."""

    def __init__(self, *sizes):
        self.sizes = iter(sizes)

    def __iter__(self):
        return iter(range(next(self.sizes)))


def test_an_epoch_is_timed_to_its_last_batch_and_holds_as_many_as_the_first(
    monkeypatch,
):
    benchmark = load("pipeline")
    ticks = iter([0.0, 3.0, 3.5])
    epochs = benchmark.Epochs(Counted(4, 4, 5))
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(ticks))
    epochs()
    assert (epochs.num_batches, epochs.seconds, epochs.ends) == (4, [3.0], [0.5])
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="has more batches in a later epoch"):
        epochs()


def test_goals_of_the_pipeline_are_met_by_ratios_plans_and_ends_at_their_limits():
    benchmark = load("pipeline")

    def side(*seconds, ends=(0.0,)):
        epochs = benchmark.Epochs([])
        epochs.seconds, epochs.ends = list(seconds), list(ends)
        return epochs

    epochs = {
        "tfamp": side(1.0, 2.0, ends=(0.02, 0.001)),
        "naive, not optimised": side(2.0, 4.0),
        "hand-tuned": side(0.96, 1.92),
        "arrays": side(1.0, 1.0),
        "arrays, balanced": side(1.001, 1.001),
        "arrays, weighted": side(1.0011, 1.0011),
        "arrays, weighted without replacement": side(1.0, 1.0),
    }
    ratios = benchmark.ratios(epochs)
    assert {name: figures["met"] for name, figures in ratios.items()} == {
        "tfamp / naive, not optimised": True,
        "tfamp / hand-tuned": False,
    }
    plans = benchmark.plan_figures(epochs, 100)
    assert [plans[name]["met"] for name in benchmark.PLANS] == [True, False, True]
    ends = benchmark.end_figures(epochs)
    assert (ends["longest_milliseconds"], ends["met"]) == (20.0, True)


def test_readme_figure_shows_what_readme_says(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.png"
    assert main(["readme_figure", "--smoke", f"--output={path}"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert path.stat().st_size > 0
    exact, stock, ours = result["gradients"]["sigmoid, wrong by 9"].values()
    # sigma(9) = 1 / (1 + exp(-9)) = 0.99988
    assert exact == pytest.approx(0.99988, abs=1e-5)
    assert stock == 0
    assert ours == pytest.approx(exact, rel=FLOAT32_TOLERANCE)
    exact, stock, ours = result["gradients"]["softmax, wrong by 12"].values()
    assert exact == pytest.approx(0.999994, abs=1e-6)
    assert stock in ("inf", "nan")
    assert ours == pytest.approx(exact, rel=FLOAT32_TOLERANCE)


def training_figures(over_stock):
    """Figures of one model whose "auto" is `over_stock` of stock Keras."""
    rows = {
        "float32": {"examples_per_second": 10.0, "resolved": "float32", "metric": 0.9},
        "auto": {
            "examples_per_second": 20.0,
            "resolved": "mixed_bfloat16",
            "metric": 0.91,
            "ratio": [2.0, 1.9, 2.1],
            "over_stock": over_stock,
            "answer": "equivalent and faster",
        },
    }
    return {"mlp": {"rows": rows, "batch_size": 256, "metric": "accuracy"}}


def test_goals_of_training_are_held_against_stock_keras():
    benchmark = load("training")
    met = benchmark.goals(training_figures([0.99, 0.9, 1.1]))
    assert met["mlp"]["auto"]["met"]
    missed = benchmark.goals(training_figures([0.98, 0.97, 0.985]))["mlp"]["auto"]
    assert (missed["met"], missed["ruled_out"]) == (False, True)
    noisy = benchmark.goals(training_figures([0.98, 0.9, 1.1]))["mlp"]["auto"]
    assert (noisy["met"], noisy["ruled_out"]) == (False, False)


def test_the_section_on_training_is_written_from_what_was_measured():
    models = training_figures([0.98, 0.9, 1.1])
    models["mlp"] |= {"device": "CPU", "versions": {"keras": "3"}, "seeds": 3}
    result = {"models": models, "goals": load("training").goals(models), "command": "c"}
    text, later = write_results.section("training", [result])
    assert "```bash\nc\n```" in text and later.startswith("### What a policy brings")
    first = "| mlp, batch 256 | float32 | 10 | reference |  |  |  | accuracy 0.9000 |"
    assert first in text
    row = "|  | auto = mixed_bfloat16 | 20 | 2.00 [1.90, 2.10] | 0.98 [0.90, 1.10]"
    assert row in text
    assert "Met: none. mlp: 0.98 [0.90, 1.10], which the noise allows." in text


def test_results_stand_as_they_are_written():
    written = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    assert write_results.page() == written, "run python -m benchmarks write_results"
    assert written.count("\n## Summary\n") == written.count("\n## Appendix") == 1


def test_other_searches_than_the_tuner_ask_as_they_say():
    benchmark = load("tuner")
    asked = []

    def holds(float32):
        asked.append(set(float32))
        return {"b", "g"} <= set(float32)

    # Nothing; of 8 the first 7 in three halvings; then b in as many; then both.
    assert benchmark.bisect("abcdefgh", holds, most=20) == len(asked) == 9
    assert asked[0] == set() and asked[-1] == {"b", "g"}
    assert benchmark.bisect("abcdefgh", holds, most=8) is None
    assert benchmark.bisect("acd", holds, most=50) is None  # never enough
    savings = {"a": 0.1, "b": 0.2, "c": 0.4, "g": 0.05}
    assert benchmark.give_back(savings, holds, 2) == ["a", "b", "g"]
    assert benchmark.give_back(savings, holds, 9) == ["b", "g"]
    cheapest = next(paths for paths in benchmark.by_cost(savings) if holds(paths))
    assert cheapest == ("b", "g")
    inside = {"a": 0.1, "a/x": 0.2, "ab": 0.4}
    assert benchmark.saving_lost(inside, ["a"]) == pytest.approx(0.3)


def test_figures_of_the_tuner_count_runs_as_they_are_required():
    run = {"met": [True, True], "evaluations": 5, "kept": 0.95, "searched": True}
    several = {"guilty": ["a", "b"], "bisection": 5}
    runs = [
        run | several,
        run | several | {"bisection": 6},
        run | several | {"bisection": None},  # bisection never came to an end
        run | {"guilty": [], "bisection": 2, "evaluations": 12, "met": [True, False]},
        run | {"guilty": ["a"], "bisection": 2, "searched": False, "kept": 0.0},
    ]
    found = load("tuner").figures({"one": runs[:2], "two": runs[2:]})
    assert {name: (each["reached"], each["met"]) for name, each in found.items()} == {
        "met": (0.9, False),
        "evaluations": (12, True),
        "kept": (0.95, True),
        "fewer": (0.6667, False),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer, values", "regression, graded rounding"])
def test_what_spoils_models_is_hidden_in_float32_and_found_in_half(name):
    (case,) = [each for each in load("_tuner_models").CASES if each.name == name]
    model, guilty, (one, two) = case.trained(3, (0, 1), epochs=1)
    assert len(guilty) == case.guilty
    assert not all(map(np.array_equal, one, two))
    x, y = case.examples(9, 256)
    exact = model.predict(x, verbose=0)
    assert np.isfinite(exact).all()
    tfamp.apply(model, case.policy)
    low = model.predict(x, verbose=0)
    # The same places for the same seed, whatever the weights.
    assert case.trained(3, (5,), epochs=1)[1] == guilty
    off = np.abs(low - exact).mean() / exact.std()
    assert not off < 0.02


def test_figures_of_serving_are_held_against_their_goals(monkeypatch):
    benchmark = load("serving")
    rates = iter([4000, 900, 1000, 4400, 3600, 1000])  # the first who goes, changes
    told = functools.partial(tfamp.Latency, 0.001, None, None, num_answers=2, errors={})
    monkeypatch.setattr(
        benchmark, "ask", lambda *_: told(answers_per_second=next(rates))
    )
    monkeypatch.setattr(benchmark, "processor_seconds", lambda pid: 0.0)
    monkeypatch.setattr(
        benchmark,
        "take_turns",
        lambda sides, turns: np.array(
            [[side() for side in sides] for _ in range(turns)]
        ),
    )
    servers = {"int8": (1, 2), "fastapi": (3, 4)}
    found = benchmark.compare_rates(servers, np.zeros(1), 2, 0.1)
    # Untimed 4000 and 900; then 1000 over 4400, and 3600 over 1000.
    assert found["int8"]["per_second"] == 2300
    own = found["fastapi"]
    assert (own["ratio"], own["goal"], own["met"]) == (1.914, 2.0, False)


def test_a_ratio_is_the_median_of_the_ratios_of_the_turns():
    # Turn by turn 2, 1.5 and 1; a slow second turn slows both sides.
    clock = np.array([[0.001, 0.002], [0.004, 0.006], [0.002, 0.002]])
    processor = np.array([[1, 3], [1, 2], [1, 1]])
    seconds = np.stack([clock, processor], axis=-1)
    figures = load("enable_overhead").figures(seconds, goal=1.02)
    assert (figures["ratio"], figures["interval"]) == (1.5, [1.0, 2.0])
    assert (figures["stock_milliseconds"], figures["tfamp_milliseconds"]) == (2, 2)
    assert (figures["processor_ratio"], figures["met"]) == (2, False)


def test_figures_of_scale_are_held_against_their_goals():
    benchmark = load("scale")
    found = {'[96, "float32", 1]': [[1.0], [2.5]], '[81, "float32", 1]': [[1.0]]}
    exact = {'[96, "float32", 1]': [[1.0], [2.0]], '[81, "float32", 1]': [[1.25]]}
    assert benchmark.furthest(found, exact) == {"float32": 0.5}
    assert benchmark.come_once([[0, 3], [2, 1]], 4)
    assert not benchmark.come_once([[0, 1], [1, 3]], 4)
    # Two turns of float32 and half: bytes and seconds.
    wire = benchmark.on_the_wire([[[4e6, 0.4], [2e6, 0.2]], [[4e6, 0.4], [2e6, 0.3]]])
    assert wire["megabytes"] == [4.0, 2.0]
    assert (wire["bytes"]["ratio"], wire["bytes"]["met"]) == (0.5, True)
    assert (wire["step"]["ratio"], wire["step"]["met"]) == (0.625, False)


def test_kills_are_spread_over_workers_and_saves_and_lost_steps_are_counted():
    kills = load("_scale_kills")
    found = kills.moments(0, 20, workers=2, pace=0.05)
    assert found == kills.moments(0, 20, workers=2, pace=0.05)
    assert {each["worker"] for each in found} == {0, 1}
    assert sum("save" in each for each in found) == 10
    # In the middle of a file, and where it is whole and has no name.
    parts = [each["part"] for each in found if "save" in each]
    assert min(parts) < 1 < max(parts)
    # Life, step, loss: the second life trains step 2 again, the third nothing.
    noted = [[0, 1, 0.5], [0, 2, 0.4], [1, 2, 0.4], [2, 3, 0.3]]
    assert kills.lost_steps(noted) == [1, 0]


def test_sides_take_turns_and_go_first_in_turn():
    order = []
    sides = [lambda: order.append("a") or (1, 2), lambda: order.append("b") or (3, 4)]
    seconds = _turns.take_turns(sides, 3)
    assert "".join(order) == "abbaab"
    assert seconds.tolist() == [[[1, 2], [3, 4]]] * 3
