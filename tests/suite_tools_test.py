"""What stands around the suite: durations, progress, imports and mutants."""

import ast
import json
import re
import shutil

import pytest

from tests.suite import durations, imports, mutants, progress


def test_durations_keep_what_did_not_run_and_drop_what_is_gone(tmp_path):
    path = tmp_path / "durations.json"
    first = {"a::x[1]": {"setup": 0.5, "call": 1.234, "teardown": 0.001}}
    durations.write(first, [*first], path)
    assert json.loads(path.read_text()) == {"a": {"x[1]": [0.5, 1.23, 0.0]}}
    second = {"b::y": {"call": 2.0}, "b::fast": {"setup": 0.02, "call": 0.02}}
    durations.write(second, [*second], path)
    assert durations.load(path) == {"a::x[1]": 1.73, "b::y": 2.0}
    durations.write({"a::z": {"call": 1.0}}, ["a::z"], path)
    assert durations.load(path) == {"a::z": 1.0, "b::y": 2.0}
    durations.write({"b::w": {"call": 3.0}}, None, path)
    assert durations.load(path) == {"a::z": 1.0, "b::w": 3.0, "b::y": 2.0}


def test_the_recorder_adds_up_the_phases(monkeypatch):
    written = {}
    monkeypatch.setattr(durations, "write", lambda found, names: written.update(found))
    recorder = durations.Recorder(is_whole=True)
    for when, seconds in (("setup", 1.0), ("call", 2.0), ("teardown", 0.5)):
        recorder.pytest_runtest_logreport(report(when=when, duration=seconds))
    recorder.pytest_sessionfinish()
    assert written == {"a::x": {"setup": 1.0, "call": 2.0, "teardown": 0.5}}


def report(name="a::x", when="call", outcome="passed", duration=0.0):
    """Returns what pytest tells of a phase of a test."""
    return pytest.TestReport(name, ("a", 0, "x"), {}, outcome, None, when, [], duration)


@pytest.mark.parametrize("is_terminal", [False, True], ids=["log", "terminal"])
def test_progress_tells_percent_failures_and_the_time_left(is_terminal):
    now, written = [0.0], []
    shown = progress.Progress(
        {"a::slow": 89.99, "a::fast": 9.99},
        2,
        "every case",
        write=written.append,
        is_terminal=is_terminal,
        clock=lambda: now[0],
    )
    shown.begin(["a::slow", "a::fast"])
    assert "Running 2 tests, every case\n" in written[0]
    # 100 seconds of work for two processes.
    assert shown.text() == "  0%  0 of 2 tests, 0:50 left"
    now[0] = 18.0
    shown.pytest_runtest_logreport(report("a::slow", outcome="failed"))
    assert written[-1].endswith("FAILED a::slow\n")
    shown.pytest_runtest_logreport(report("a::slow", when="teardown"))
    # Nine tenths took 18 seconds, so the rest takes 2.
    assert written[-1].strip("\r\033[K\n") == " 90%  1 of 2 tests, 1 failed, 0:02 left"


def test_a_log_gets_a_line_now_and_then():
    now, written = [0.0], []
    names = [f"a::{i}" for i in range(100)]
    shown = progress.Progress({}, 1, write=written.append, clock=lambda: now[0])
    shown.begin(names)
    for name in names:
        now[0] += 1.0
        shown.pytest_runtest_logreport(report(name, when="teardown"))
    assert len(written) == 1 + 100 // progress.STEP_SECONDS


@pytest.mark.parametrize(
    "changed, test",
    [
        ("tfamp/records/formats.py", "tests/formats_test.py"),
        ("tfamp/data/fingerprints.py", "tests/data_fingerprint_test.py"),
        # Through the lazy names of the package and what stands below them.
        ("tfamp/loss_scale/step.py", "tests/loss_scale_step_test.py"),
        ("tfamp/keras_hooks/calls.py", "tests/heads_test.py"),
        # Named in a string, as a program of its own is.
        ("tests/worker_program.py", "tests/multi_worker_test.py"),
        ("recipes/train_digits.py", "tests/recipes_test.py"),
    ],
)
def test_a_change_reaches_the_tests_that_import_it(changed, test):
    near = imports.nearness([changed])
    assert test in near
    assert "tests/conftest.py" not in near


def test_tests_named_like_a_change_are_nearest():
    near = imports.nearness(["tfamp/loss_scale/step.py"])
    tests = [path for path in near if path.endswith("_test.py")]
    assert min(tests, key=near.get) == "tests/loss_scale_step_test.py"
    # Formats stand below all; the loss scale does not know the report.
    assert "tests/formats_test.py" not in near


MUTANTS = mutants.load()


def test_mutants_are_many_and_in_all_packages():
    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    packages = {path.name for path in imports.PACKAGE.iterdir() if path.is_dir()}
    hit = {mutant.file.split("/")[1] for mutant in MUTANTS}
    assert packages - hit <= {"__pycache__"}


def test_each_mutant_changes_one_place_and_can_be_parsed(tmp_path):
    for mutant in MUTANTS:
        path = tmp_path / mutant.file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(imports.ROOT / mutant.file, path)
        before = mutant.apply(tmp_path)
        assert "\n" not in mutant.was and path.read_text() != before
        compile(path.read_text(), mutant.file, "exec")


def test_each_mutant_is_noticed_by_a_test_that_there_is():
    names = [killer.split("::") for mutant in MUTANTS for killer in mutant.killers]
    assert len(names) >= len(MUTANTS)
    for file, *rest in names:
        name = rest[-1].rpartition(".")[2]  # of a doctest the object it stands in
        assert re.search(rf"(def|class) {name}\b", (imports.ROOT / file).read_text())


def test_a_mutant_of_text_that_is_gone_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    mutant = mutants.Mutant("x is wrong", "a.py", "y = 1", "y = 2")
    with pytest.raises(ValueError, match="'y = 1' stands 0 times in a.py"):
        mutant.apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 1\n"


def test_a_mutant_dies_by_a_test_that_fails_and_the_file_is_put_back(
    tmp_path, monkeypatch
):
    (tmp_path / "a.py").write_text("x = 1\n")
    mutant = mutants.Mutant("x is wrong", "a.py", "x = 1", "x = 2", ("t::one",))
    asked = []

    def run_tests(root, seed, whole, arguments):
        asked.append((list(arguments), (root / "a.py").read_text()))
        return (1, "t::two") if "--near=a.py" in arguments else (0, "")

    monkeypatch.setattr(mutants, "run_tests", run_tests)
    outcome = mutants.judged(mutant, tmp_path, "seed", whole=False)
    assert outcome.killer == "t::two"
    assert asked == [(["t::one"], "x = 2\n"), (["--near=a.py"], "x = 2\n")]
    assert (tmp_path / "a.py").read_text() == "x = 1\n"
    monkeypatch.setattr(mutants, "run_tests", lambda *_: (0, ""))
    assert mutants.judged(mutant, tmp_path, "seed", whole=False).killer == ""


def test_what_readme_cites_runs_in_every_run():
    readme = (imports.ROOT / "README.md").read_text(encoding="utf-8")
    for path, name in re.findall(r"`(tests/\w+\.py)::(\w+)`", readme):
        tree = ast.parse((imports.ROOT / path).read_text(encoding="utf-8"))
        (test,) = [n for n in tree.body if getattr(n, "name", None) == name]
        assigned = [n for n in tree.body if isinstance(n, ast.Assign)]
        of_the_file = [n.value for n in assigned if "pytestmark" in ast.unparse(n)]
        marks = {ast.unparse(mark) for mark in (*test.decorator_list, *of_the_file)}
        assert not [m for m in marks if "mark.whole" in m], f"{path}::{name}"
