"""Every benchmark runs and says what its last line promises; no time is asserted."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import tfamp
from benchmarks import _page, _runner, _tuner_models, pipeline, training, tuner
from benchmarks.__main__ import main, names

ROOT = Path(__file__).parents[1]
MEASURING = [name for name in names() if name not in ("readme_figure", "write_results")]
# Benchmark -> packages that are of no extra of the tests.
NEEDED = {"serving": ("fastapi", "starlette", "tf2onnx", "onnxruntime", "uvicorn")}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURING)
def test_a_benchmark_prints_the_figures_that_it_writes(name, tmp_path):
    for package in NEEDED.get(name, ()):
        pytest.importorskip(package)
    path = tmp_path / "figures.json"
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--smoke", f"--json={path}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout.splitlines()[-1])
    assert result == json.loads(path.read_text())
    assert set(result["versions"]) == {"python", "tensorflow", "keras", "tfamp"}
    assert result["command"] == f"python -m benchmarks {name} --smoke"
    assert {"commit", "date", "device", "instructions"} <= set(result)
    ((_, columns, rows),) = _page.of(name, result)
    assert rows and {len(row) for row in rows} == {len(columns)}


def test_benchmarks_are_listed_with_a_line_each(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(names())
    assert all(line.endswith(".") and len(line) <= 100 for line in lines)
    assert main(["memroy"]) == 2
    assert "Unknown benchmark 'memroy'; expected beyond" in capsys.readouterr().err


def test_a_result_says_where_it_is_from_and_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_runner, "RESULTS", tmp_path)
    other = {"device": "another", "figure": 1}
    (tmp_path / "toy.json").write_text(json.dumps([other, other | {"device": "here"}]))
    about = {"device": "here", "versions": {}}
    monkeypatch.setattr(_runner, "about", lambda argv: about)
    toy = types.SimpleNamespace(
        FLAGS=(("integer", "turns", 3, "Turns."),),
        measure=lambda settings: {"figure": settings.turns},
        measure_side=lambda size: {"twice": 2 * size},
    )
    assert _runner.run(["toy", "--turns=2", "--record"], toy) == 0
    found = {"benchmark": "toy", **about, "figure": 2}
    assert json.loads(capsys.readouterr().out) == found
    assert json.loads((tmp_path / "toy.json").read_text()) == [other, found]
    assert _runner.run(["toy", '--side={"size": 3}'], toy) == 0
    assert json.loads(capsys.readouterr().out) == {"twice": 6}


def without_marks(text):
    return "\n\n".join(
        part for part in text.split("\n\n") if not part.startswith(_page.MARK)
    )


def test_results_stand_as_they_are_written():
    written = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    page = _page.page()
    assert without_marks(page) == without_marks(written), "run write_results"
    assert written.count("\n## Summary\n") == written.count("\n## Appendix") == 1


@pytest.mark.parametrize(
    "record, is_old",
    [
        ({"date": "2000-01-01"}, True),
        ({}, True),
        ({"commit": "abc"}, True),
        ({"commit": "def"}, False),
        ({"commit": "lost"}, True),
        ({"date": "2026-01-02"}, True),
        ({"date": "2026-01-03"}, False),
    ],
)
def test_a_record_is_marked_where_what_it_measures_has_changed(
    record, is_old, monkeypatch
):
    answers = {"abc..": "fed", "def..": "", "lost": "", "lost..": ""}

    def git(*words):
        return next((answers[w] for w in words if w in answers), "123 of 2026-01-02")

    monkeypatch.setattr(_page, "git", git)
    line = _page.mark("memory", [record])
    assert line.startswith(_page.MARK) == is_old
    assert ("changed by 123 of 2026-01-02" in line) == is_old


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
    # Both are float32 in the loss; what is left is rounding of a logit near 10.
    assert ours == pytest.approx(exact, rel=1e-3)
    exact, stock, ours = result["gradients"]["softmax, wrong by 12"].values()
    assert exact == pytest.approx(0.999994, abs=1e-6)
    assert stock in ("inf", "nan")
    assert ours == pytest.approx(exact, rel=1e-3)


def test_an_epoch_is_timed_to_its_last_batch_and_holds_as_many_as_the_first(
    monkeypatch,
):
    sizes = iter([4, 4, 5])

    class Counted:
        def __iter__(self):
            return iter(range(next(sizes)))

    ticks = iter([0.0, 3.0])
    epochs = pipeline.Epochs(Counted())
    monkeypatch.setattr(pipeline.time, "perf_counter", lambda: next(ticks))
    epochs()
    assert (epochs.num_batches, epochs.seconds) == (4, [3.0])
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="has more batches in a later epoch"):
        epochs()


@pytest.mark.parametrize(
    "over_stock, met, ruled_out",
    [
        ([0.99, 0.9, 1.1], True, False),
        ([0.98, 0.97, 0.985], False, True),
        ([0.98, 0.9, 1.1], False, False),
    ],
)
def test_goals_of_training_are_held_against_stock_keras(over_stock, met, ruled_out):
    found = training.goals({"mlp": {"rows": {"auto": {"over_stock": over_stock}}}})
    own = found["mlp"]["auto"]
    assert (own["met"], own["ruled_out"]) == (met, ruled_out)


def test_other_searches_than_the_tuner_ask_as_they_say():
    asked = []

    def holds(float32):
        asked.append(set(float32))
        return {"b", "g"} <= set(float32)

    # Nothing; of 8 the first 7 in three halvings; then b in as many; then both.
    assert tuner.bisect("abcdefgh", holds, most=20) == len(asked) == 9
    assert asked[0] == set() and asked[-1] == {"b", "g"}
    assert tuner.bisect("abcdefgh", holds, most=8) is None
    assert tuner.bisect("acd", holds, most=50) is None  # never enough
    savings = {"a": 0.1, "b": 0.2, "c": 0.4, "g": 0.05}
    assert tuner.give_back(savings, holds, 2) == ["a", "b", "g"]
    assert tuner.give_back(savings, holds, 9) == ["b", "g"]
    cheapest = next(paths for paths in tuner.by_cost(savings) if holds(paths))
    assert cheapest == ("b", "g")
    inside = {"a": 0.1, "a/x": 0.2, "ab": 0.4}
    assert tuner.saving_lost(inside, ["a"]) == pytest.approx(0.3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer, values", "regression, graded rounding"])
def test_what_spoils_models_is_hidden_in_float32_and_found_in_half(name):
    (case,) = [each for each in _tuner_models.CASES if each.name == name]
    model, guilty, (one, two) = case.trained(3, (0, 1), epochs=1)
    assert len(guilty) == case.guilty
    assert not all(map(np.array_equal, one, two))
    x, y = case.examples(9, 256)
    exact = model.predict(x, verbose=0)
    assert np.isfinite(exact).all()
    tfamp.apply(model, case.policy)
    off = np.abs(model.predict(x, verbose=0) - exact).mean() / exact.std()
    assert not off < 0.02


def test_a_ratio_is_the_median_over_turns_and_sides_go_first_in_turn():
    found = _runner.ratio(np.array([2.0, 6.0, 2.0]), np.array([1.0, 4.0, 2.0]))
    assert found == {"ratio": 1.5, "interval": [1.0, 2.0]}
    order = []
    sides = [lambda: order.append("a") or (1, 2), lambda: order.append("b") or (3, 4)]
    seconds = _runner.take_turns(sides, 3)
    assert "".join(order) == "abbaab"
    assert seconds.tolist() == [[[1, 2], [3, 4]]] * 3
