"""`tfamp compare`: what it asks for, prints, writes and ends with."""

import dataclasses
import json
import sys
import warnings

import pytest

import tfamp
from tests import made_evidence
from tfamp.cli.main import main
from tfamp.trials.run_records import Run
from tfamp.trials.statistics import effect_of_ratio

pytest.importorskip("jinja2")
TARGET = "digits:build"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Stands for the comparison: what it was asked, and what it answers."""
    call = {"found": made_evidence.evidence(), "warns": ()}

    def compared(target, *, on_run, **settings):
        call.update(settings, target=target)
        if isinstance(call["found"], BaseException):
            raise call["found"]
        for text in call["warns"]:
            warnings.warn(text, UserWarning, stacklevel=2)
        for run in call["found"].runs:
            on_run(run)
        settings["directory"].mkdir(parents=True)
        return call["found"]

    monkeypatch.setattr(tfamp, "compare", compared)
    monkeypatch.chdir(tmp_path)
    return call


def test_it_asks_for_what_the_flags_say(asked, tmp_path):
    argv = [
        *("compare", TARGET, "--policies", "float32,auto+no_rules", "--seeds=5"),
        "--epochs=2",
        *("--tolerance=0.01", "--metric=accuracy", "--better=max", "--out=there"),
        "--latency-batch-sizes=1,4",
        *("--timeout-seconds=60", "--resume", "--title=A net"),
    ]
    assert main(argv) == 0
    expected = {
        "target": TARGET,
        "policies": ["float32", "auto+no_rules"],
        "seeds": 5,
        "epochs": 2,
        "tolerance": 0.01,
        "metric": "accuracy",
        "better": "max",
        "latency_batch_sizes": [1, 4],
        "timeout_seconds": 60,
        "resume": True,
        "title": "A net",
    }
    assert {key: asked[key] for key in expected} == expected
    assert str(asked["directory"]) == "there/runs"
    assert asked["command"].startswith(f"tfamp compare {TARGET} --policies float32,")


def test_it_prints_runs_and_table_and_writes_three_files(asked, tmp_path, capsys):
    assert main(["compare", TARGET, "--out=there"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[1/6] float32, seed 0: 1,007 examples/s  loss 0.5000")
    assert lines[5].startswith("[6/6] auto, seed 2: ")
    assert lines[5].endswith(" left)")
    assert lines[-1] == "Report: there/report.html"
    table = asked["found"].table()
    assert "\n".join(lines[6:-1]) == table
    assert json.loads((tmp_path / "there" / "report.json").read_text())["runs"]
    assert (tmp_path / "there" / "report.md").read_text().startswith("## digits CNN")
    assert "<html" in (tmp_path / "there" / "report.html").read_text()


def test_json_on_the_terminal_is_alone(asked, capsys):
    assert main(["compare", TARGET, "--out=there", "--json=-"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["runs"]) == 6
    assert "[6/6] auto, seed 2: " in err


def test_how_many_runs_are_left_is_not_guessed_when_it_goes_on(asked, capsys):
    assert main(["compare", TARGET, "--out=there", "--resume"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[1] float32, seed 0: ")
    assert "left" not in lines[0]


def test_the_bar_of_a_terminal_stands_for_the_lines(asked, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["compare", TARGET, "--out=there"]) == 0
    assert "seed 0:" not in capsys.readouterr().out


def test_a_failed_run_is_told_with_its_error(asked, capsys):
    failed = Run("auto", 1, status="failed", error="ValueError: no such layer")
    asked["found"] = made_evidence.evidence(replaced=(failed,))
    assert main(["compare", TARGET, "--out=there"]) == 0
    out = capsys.readouterr().out
    assert "[4/6] auto, seed 1: failed: ValueError: no such layer" in out


def test_warnings_come_after_the_table(asked, capsys):
    asked["warns"] = ("Two policies are the same.",)
    assert main(["compare", TARGET, "--out=there"]) == 0
    assert capsys.readouterr().err == "tfamp compare: Two policies are the same.\n"


def as_judged(answer, low, high):
    found = made_evidence.evidence()
    verdict = found.verdicts["auto"]
    speed = dataclasses.replace(verdict.speed, estimate=low, low=low, high=high)
    effect = effect_of_ratio(speed, more_is_better=True)
    verdict = dataclasses.replace(
        verdict, answer=answer, speed=speed, speed_effect=effect
    )
    return dataclasses.replace(found, verdicts={"auto": verdict})


FAILURES = {
    "worse": (as_judged("worse", 1.1, 1.3), {"worse"}),
    "slower": (as_judged("slower", 0.7, 0.9), {"slower", "not-faster"}),
    "as fast": (as_judged("equivalent, not faster", 0.98, 1.02), {"not-faster"}),
    "faster by too little": (
        as_judged("equivalent, not faster", 1.01, 1.03),
        {"not-faster"},
    ),
    "undecided": (as_judged("undecided", 1.1, 1.3), {"undecided"}),
    "faster": (as_judged("equivalent and faster", 1.1, 1.3), set()),
    "a run failed": (
        dataclasses.replace(
            as_judged("equivalent and faster", 1.1, 1.3),
            runs=(*made_evidence.evidence().runs, Run("auto", 9, status="failed")),
        ),
        {"failed"},
    ),
}
WORDS = ("worse", "slower", "not-faster", "undecided", "failed")


@pytest.mark.quick(
    "worse-undecided",
    "as fast-failed",
    "undecided-slower",
    "faster-worse",
    "faster-not-faster",
)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("found, applies", FAILURES.values(), ids=FAILURES)
def test_the_status_gates_on_what_was_asked(asked, capsys, found, applies, word):
    asked["found"] = found
    status = main(["compare", TARGET, "--out=there", f"--fail-on={word}"])
    assert status == (1 if word in applies else 0)
    told = (
        f"tfamp compare: auto is {word.replace('-', ' ')}: " in capsys.readouterr().err
    )
    assert told == (word in applies)


WRONG_CALLS = {
    "unknown word": (["--fail-on=wrose"], "wrose"),
    "size zero": (["--latency-batch-sizes=0,1"], "`--latency_batch_sizes` has '0'"),
    "size of words": (["--latency-batch-sizes=few"], "_sizes` has 'few'"),
    "no seeds": (["--seeds=0"], "seeds"),
    "unknown flag": (["--sedes=3"], "sedes"),
}


@pytest.mark.parametrize("flags, told", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_wrong_calls_end_with_2_before_anything_runs(asked, capsys, flags, told):
    assert main(["compare", TARGET, *flags]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.err.endswith("See `tfamp compare --help`.\n")
    assert "target" not in asked


@pytest.mark.parametrize(
    "error, status, told",
    [
        (ValueError("no two runs"), 1, "tfamp compare: no two runs\n"),
        (ImportError("no jinja2"), 1, "tfamp compare: no jinja2\n"),
        (KeyboardInterrupt(), 130, "`--resume` with the same --out goes on"),
    ],
)
def test_what_ends_it_is_one_line(asked, capsys, error, status, told):
    asked["found"] = error
    assert main(["compare", TARGET, "--out=there"]) == status
    assert told in capsys.readouterr().err
