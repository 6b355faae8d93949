"""Every benchmark runs and says what its last line promises; no time is asserted."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from benchmarks import _page, _runner
from benchmarks.__main__ import names

ROOT = Path(__file__).parents[1]
MEASURING = [name for name in names() if name not in ("readme_figure", "write_results")]
# Benchmark -> packages that are of no extra of the tests.
NEEDED = {
    "beyond": ("onnx", "onnxruntime", "tf2onnx"),
    "serving": ("fastapi", "starlette", "tf2onnx", "onnxruntime", "uvicorn"),
}


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
