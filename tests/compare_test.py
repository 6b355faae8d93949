"""`tfamp.compare`: order, resuming, failures, Ctrl-C, what goes to the processes."""

import math
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import keras
import numpy as np
import pytest

import tfamp
from tests import made_evidence
from tfamp.comparison.result import conclude
from tfamp.trials import parcel, processes, runner
from tfamp.trials.run_records import Run
from tfamp.trials.tasks import Task, checked_policies, checked_seeds

pytest.importorskip("cloudpickle")


def build_nothing():
    """Stands for a building function where runs are made up."""


@pytest.fixture
def started(monkeypatch):
    """Replaces processes by made-up runs; lists those that were asked for."""
    calls = []
    answers = {}

    def do(folder, task, *, timeout_seconds=None, on_progress=lambda part: None):
        key = task.policy, task.seed
        calls.append(key)
        on_progress(0.5)
        if isinstance(answers.get(key), BaseException):
            raise answers[key]
        run = answers.get(key) or made_evidence.run(*key)
        run.to_json(folder / f"{task.name}.json")
        return run

    monkeypatch.setattr(runner, "do", do)
    return calls, answers


def in_words(runs):
    return ", ".join(f"{policy} {seed}" for policy, seed in runs)


def test_policies_take_turns_and_each_goes_first(started):
    tfamp.compare(build_nothing, policies=("float32", "auto"), seeds=3)
    order = "float32 0, auto 0, auto 1, float32 1, float32 2, auto 2"
    assert in_words(started[0]) == order


def test_runs_are_told_as_they_end_and_sorted_in_the_result(started):
    told = []
    found = tfamp.compare(build_nothing, seeds=2, on_run=told.append)
    assert [(run.policy, run.seed) for run in told] == started[0]
    pairs = [(run.policy, run.seed) for run in found.runs]
    assert in_words(pairs) == "float32 0, auto 0, float32 1, auto 1"
    assert found.verdict == "equivalent, not faster"


def test_a_folder_with_runs_is_not_taken_by_mistake(started, tmp_path):
    tfamp.compare(build_nothing, seeds=1, directory=tmp_path)
    message = (
        "has runs of an earlier comparison; expected an empty folder. Pass `resume"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        tfamp.compare(build_nothing, seeds=1, directory=tmp_path)


def test_resuming_runs_what_is_missing_and_what_failed(started, tmp_path):
    calls, answers = started
    answers["auto", 1] = Run("auto", 1, status="failed", error="it broke")
    tfamp.compare(build_nothing, seeds=2, directory=tmp_path)
    del answers["auto", 1]
    calls.clear()
    found = tfamp.compare(build_nothing, seeds=3, directory=tmp_path, resume=True)
    assert calls == [("auto", 1), ("float32", 2), ("auto", 2)]
    assert len(found.pairs("auto")) == 3


def test_runs_of_other_settings_do_not_go_on(started, tmp_path):
    tfamp.compare(build_nothing, seeds=1, epochs=1, directory=tmp_path)
    message = "cannot go on: epochs was 1 and is 2. Expected the same settings"
    with pytest.raises(ValueError, match=re.escape(message)):
        tfamp.compare(build_nothing, seeds=1, epochs=2, directory=tmp_path, resume=True)


def test_a_changed_source_is_noticed(started, tmp_path, monkeypatch):
    module = tmp_path / "model_of_mine.py"
    module.write_text("def build():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import model_of_mine

    runs = tmp_path / "runs"
    tfamp.compare(model_of_mine.build, seeds=1, directory=runs)
    module.write_text("def build():\n    return 2\n")
    with pytest.raises(ValueError, match="cannot go on: source was"):
        tfamp.compare(model_of_mine.build, seeds=1, directory=runs, resume=True)


def test_a_first_run_that_fails_ends_it_with_its_log(started, tmp_path):
    failed = Run("float32", 0, status="failed", error="ValueError: no such layer")
    started[1]["float32", 0] = failed
    (tmp_path / "float32_seed0.log").write_text("line one\nValueError: no such layer\n")
    with pytest.raises(RuntimeError) as caught:
        tfamp.compare(build_nothing, directory=tmp_path)
    assert str(caught.value) == (
        "The first run, 'float32' with seed 0, failed: ValueError: no such layer. "
        "Expected it to train; mend what its log ends with:\n"
        "line one\nValueError: no such layer"
    )


def test_a_policy_that_failed_at_once_is_not_tried_again(started):
    calls, answers = started
    answers["mixed_float16", 0] = Run("mixed_float16", 0, status="failed", error="no")
    policies = ("float32", "mixed_float16", "auto")
    found = tfamp.compare(build_nothing, policies=policies, seeds=3)
    assert [seed for policy, seed in calls if policy == "mixed_float16"] == [0]
    assert "seed 0 failed: no" in found.verdicts["mixed_float16"].reason
    assert found.verdicts["auto"].answer == "equivalent, not faster"


def test_a_policy_that_failed_later_is_tried_with_the_other_seeds(started):
    calls, answers = started
    answers["auto", 1] = Run("auto", 1, status="failed", error="no")
    tfamp.compare(build_nothing, seeds=3)
    assert [seed for policy, seed in calls if policy == "auto"] == [0, 1, 2]


def test_ctrl_c_keeps_what_can_be_compared(started, tmp_path):
    started[1]["float32", 1] = KeyboardInterrupt()
    with pytest.warns(UserWarning, match="Stopped after 3 of 6 runs; the comparison"):
        found = tfamp.compare(build_nothing, directory=tmp_path)
    pairs = [(run.policy, run.seed) for run in found.runs]
    assert in_words(pairs) == "float32 0, auto 0, auto 1"
    assert found.verdict == "undecided"
    started[1].clear()
    started[0].clear()
    tfamp.compare(build_nothing, directory=tmp_path, resume=True)
    assert started[0] == [("float32", 1), ("float32", 2), ("auto", 2)]


def test_ctrl_c_before_two_runs_can_be_compared_is_ctrl_c(started):
    started[1]["auto", 0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        tfamp.compare(build_nothing)


REFUSED = {
    "one policy": ({"policies": ("auto",)}, "expected at least two different ones"),
    "twice": ({"policies": ("auto", "auto")}, "expected at least two different ones"),
    "unknown": ({"policies": ("float32", "fp16")}, "Unknown `policies` 'fp16'"),
    "no seed": ({"seeds": ()}, "`seeds` is (); expected a number of seeds"),
    "0 seeds": ({"seeds": 0}, "`seeds` is 0"),
    "same seeds": ({"seeds": (1, 1)}, "`seeds` is (1, 1)"),
    "resume": ({"resume": True}, "`resume` is True without a `directory`"),
    "epochs": ({"epochs": 0}, "`epochs` is 0"),
    "tolerance": ({"tolerance": -1}, "`tolerance` is -1"),
    "better": ({"better": "more"}, "Unknown `better` 'more'"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_arguments_are_checked_before_any_run(started, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tfamp.compare(build_nothing, **arguments)
    assert started[0] == []


def test_a_model_is_no_building_function(started):
    for wrong in (object(), keras.Sequential([keras.Input((2,))])):
        with pytest.raises(TypeError, match="expected a function that returns a comp"):
            tfamp.compare(wrong)
    assert started[0] == []


def test_seeds_and_policies_are_read():
    assert checked_seeds(3) == (0, 1, 2)
    assert checked_seeds((5, 1)) == (5, 1)
    policies = ["float32", "keras:float16"]
    assert checked_policies(policies) == tuple(policies)


def test_functions_and_arrays_come_out_as_they_went_in(tmp_path):
    factor = 3

    def build(seed):
        return factor * seed

    x, y = np.arange(6.0).reshape(3, 2), np.arange(3)
    assert parcel.pack(tmp_path, build, (x, y), lambda: "later") == ()
    built, (train_x, train_y), validation = parcel.unpack(tmp_path)
    assert built(2) == 6
    np.testing.assert_array_equal(train_x, x)
    np.testing.assert_array_equal(train_y, y)
    assert validation() == "later"


def test_functions_that_use_tfamp_go_along(tmp_path):
    def build():
        return tfamp.__name__

    build.__module__ = "__main__"  # as in a script or a notebook
    parcel.pack(tmp_path, build, None, None)
    assert parcel.unpack(tmp_path)[0]() == "tfamp"


def test_the_elements_of_a_dataset_go_along_and_it_is_said(tmp_path):
    import tensorflow as tf

    dataset = tf.data.Dataset.range(10).shuffle(10, seed=1).batch(4)
    (note,) = parcel.pack(tmp_path, build_nothing, dataset, None)
    assert note.startswith("The elements of `train` were written down once")
    _, train, validation = parcel.unpack(tmp_path)
    first, second = ([b.tolist() for b in train.as_numpy_iterator()] for _ in range(2))
    assert first == second
    assert sorted(sum(first, [])) == list(range(10))
    assert validation is None


def test_a_pipeline_goes_along(tmp_path):
    x = np.arange(8.0)
    pipeline = tfamp.data.Pipeline.from_arrays(x).batch(4)
    parcel.pack(tmp_path, build_nothing, pipeline, None)
    _, train, _ = parcel.unpack(tmp_path)
    train = train.build() if hasattr(train, "build") else train
    found = [batch.tolist() for batch in train.as_numpy_iterator()]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_cannot_go_along_is_refused(tmp_path):
    import tensorflow as tf

    endless = tf.data.Dataset.range(3).repeat()
    with pytest.raises(ValueError, match="`train` has no end, so its elements"):
        parcel.pack(tmp_path, build_nothing, endless, None)
    with pytest.raises(TypeError, match="`train` is <generator object .*read once"):
        parcel.pack(tmp_path, build_nothing, (n for n in range(3)), None)
    with pytest.raises(TypeError, match="`validation` is of type lock, which cannot"):
        parcel.pack(tmp_path, build_nothing, None, threading.Lock())


def test_a_function_that_holds_a_dataset_is_refused(tmp_path):
    import tensorflow as tf

    dataset = tf.data.Dataset.range(3)
    with pytest.raises(TypeError, match="it holds something that cannot be pickled"):
        parcel.pack(tmp_path, lambda: dataset, None, None)


ENDS = {
    "killed": (-signal.SIGKILL, "SIGKILL ended the process: the system killed it"),
    "illegal": (-signal.SIGILL, "`tfamp doctor` tells which"),
    "other": (-signal.SIGHUP, "SIGHUP ended the process: somebody sent it"),
    "status": (3, "the process ended with status 3 and left no record"),
}


@pytest.mark.parametrize("status, message", ENDS.values(), ids=ENDS)
def test_the_end_of_a_process_is_explained(status, message):
    assert message in processes.why_ended(status)


@pytest.fixture
def did(tmp_path, monkeypatch):
    """Does a task whose process runs other Python code; `told` talks for it."""

    def do(code, **options):
        talk = (
            "import os, sys\n"
            "def told(word): os.write(int(sys.argv[3]), (word + '\\n').encode())\n"
        )
        words = [sys.executable, "-c", talk + code]
        monkeypatch.setattr(processes, "command", lambda _, more: [*words, *more])
        return runner.do(tmp_path, Task("float32"), **options)

    return do


def test_a_process_tells_how_far_it_is(did):
    parts = []
    did("told('0.25'); told('0.50')", on_progress=parts.append)
    assert parts[-1] == 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="others do not end")
def test_a_process_ends_with_the_one_that_started_it(tmp_path):
    program = (
        "import os, subprocess, sys\n"
        "code = 'from tfamp.trials import processes; processes.end_with_parent(); '\n"
        "code += 'import time; print(1, flush=True); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdin=-1, stdout=-1)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    import psutil

    command = [sys.executable, "-c", program]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    number = int(completed.stdout)
    if psutil.pid_exists(number):
        state = psutil.Process(number)
        assert state.wait(10) is None or state.status() == psutil.STATUS_ZOMBIE


def test_a_process_that_dies_leaves_a_failed_run_and_its_log(did, tmp_path):
    run = did("print('last words', flush=True); os.kill(os.getpid(), 9)")
    assert (run.status, run.error) == ("failed", processes.why_ended(-9))
    assert processes.tail(tmp_path / "float32_seed0.log") == "last words"


def test_an_old_record_is_not_taken_for_a_new_one(did, tmp_path):
    made_evidence.run("float32", 0).to_json(tmp_path / "float32_seed0.json")
    assert did("").status == "failed"


def test_a_run_that_takes_too_long_is_ended(did):
    found = did("import time; time.sleep(600)", timeout_seconds=0.3)
    assert found.error == "it took longer than 0.3 s"


def test_an_interruption_ends_the_process(did, tmp_path):
    def interrupt(part):
        if part:
            raise KeyboardInterrupt

    code = "print(os.getpid(), flush=True); told('0.5'); sys.stdin.read()"
    with pytest.raises(KeyboardInterrupt):
        did(code, on_progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(processes.tail(tmp_path / "float32_seed0.log")), 0)


def concluded(policies, **options):
    runs = [
        made_evidence.run(policy, seed, speed=speed)
        for seed in range(3)
        for policy, speed in policies.items()
    ]
    given = {"title": "t", "policies": tuple(policies), "seeds": (0, 1, 2)}
    runs = [replace(run, **options) for run in runs]
    return conclude(runs, metric=None, better=None, tolerance=0.005, **given)


def test_the_fastest_float32_is_named_as_the_reference():
    found = concluded({"float32": 1.0, "float32+xla": 1.5, "auto": 1.2})
    assert found.reference == "float32+xla"
    assert found.ratio("examples_per_second", "auto").estimate < 1


def test_what_auto_came_to_is_said():
    found = concluded({"float32": 1.0, "auto": 1.2})
    assert "auto came to auto: it was made up" in found.notes


def test_notes_of_runs_are_said_once_for_each_policy():
    found = concluded({"float32": 1.0, "auto": 1.2}, notes=("It rained.",))
    notes = [note for note in found.notes if "rained" in note]
    assert notes == ["float32: It rained.", "auto: It rained."]


def test_the_metric_and_its_direction_are_chosen():
    found = concluded({"float32": 1.0, "auto": 1.2})
    assert (found.metric, found.better) == ("accuracy", "max")
    lossy = concluded({"float32": 1.0, "auto": 1.2}, final_metrics={"loss": math.pi})
    assert (lossy.metric, lossy.better) == ("loss", "min")


def test_a_metric_of_unknown_direction_is_refused_after_the_first_run(started):
    calls, answers = started
    run = made_evidence.run("float32", 0)
    answers["float32", 0] = replace(run, final_metrics={"loss": 0.5, "gain": 3.0})
    with pytest.raises(ValueError, match="`metric` is 'gain', and `better` is None"):
        tfamp.compare(build_nothing)
    assert calls == [("float32", 0)]
    answers.clear()
    calls.clear()
    with pytest.raises(ValueError, match="`metric` is 'gain', and `better` is None"):
        tfamp.compare(build_nothing, metric="val_gain")
    assert calls == []
