"""`tfamp.compare`: order, resuming, failures, Ctrl-C, what goes to the processes."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import types
from dataclasses import replace

import numpy as np
import pytest

import tfamp
from tests import made_evidence
from tfamp.comparison.result import conclude
from tfamp.memory.batch_search import processes as batch_search
from tfamp.memory.batch_search.processes import Settings, TrialSettings
from tfamp.memory.batch_search.records import Trial
from tfamp.trials import measurements, parcel, processes, storage
from tfamp.trials.run_records import OperationTime, Run
from tfamp.trials.storage import Job, checked_policies, checked_seeds, file_name

pytest.importorskip("cloudpickle")
pytest.importorskip("scipy")


def build_nothing():
    """Stands for a building function where runs are made up."""


@pytest.fixture
def started(monkeypatch):
    """Replaces processes by made-up runs; lists those that were asked for."""
    calls = []
    answers = {}

    class RunProcess:
        """Ends at once with a made-up run."""

        pid = None
        has_met = False

        def __init__(self, folder, policy, seed, *, timeout_seconds, on_progress):
            self.folder, self.policy, self.seed = folder, policy, seed
            self.part_done, self.on_progress = 0.5, on_progress

        def go_on(self):
            calls.append((self.policy, self.seed))
            self.on_progress(self)
            if isinstance(answers.get((self.policy, self.seed)), BaseException):
                raise answers[self.policy, self.seed]
            return False

        def result(self):
            key = (self.policy, self.seed)
            run = answers.get(key) or made_evidence.run(*key)
            run.to_json(self.folder / f"{file_name(*key)}.json")
            return run

        def end(self):
            """Has ended."""

    monkeypatch.setattr(processes, "RunProcess", RunProcess)
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
    assert found.verdict == "undecided"


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


def test_each_look_at_more_runs_has_less_error(started, tmp_path):
    found = tfamp.compare(build_nothing, seeds=2, directory=tmp_path)
    assert found.num_looks == 1
    again = {"directory": tmp_path, "resume": True}
    same = tfamp.compare(build_nothing, seeds=2, **again)
    assert (same.num_looks, same.verdicts) == (1, found.verdicts)
    more = tfamp.compare(build_nothing, seeds=3, **again)
    assert more.num_looks == 2
    (note,) = [note for note in more.notes if "were judged" in note]
    assert note.startswith("These runs were judged 2 times as they came in, so this ")
    # Another metric is another question to the same runs.
    assert tfamp.compare(build_nothing, seeds=3, metric="loss", **again).num_looks == 3
    alone = tfamp.compare(build_nothing, seeds=3)
    assert alone.num_looks == 1
    one, two = (each.verdicts["auto"].quality for each in (alone, more))
    assert two.high - two.low > one.high - one.low


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
    with pytest.raises(TypeError, match="expected a function that returns a compiled"):
        tfamp.compare(object())


def test_seeds_and_policies_are_read():
    assert checked_seeds(3) == (0, 1, 2)
    assert checked_seeds((5, 1)) == (5, 1)
    policies = ["float32", "keras:float16"]
    assert checked_policies(policies) == tuple(policies)


def test_a_job_comes_back_from_json():
    job = Job("t", ("a", "b"), (1, 2), 3, 4, (5,), 6, 7, True, "s", "c")
    assert Job.from_json(job.to_json()) == job
    changed = replace(job, policies=("a",), seeds=(1,), batch_size=8)
    assert job.differences(changed) == ("batch_size",)


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


def process(tmp_path, monkeypatch, code, **options):
    """A run's process that runs other Python code; `told` and `go` talk for it."""
    talk = (
        "import os, sys\n"
        "def told(word): os.write(int(sys.argv[4]), (word + '\\n').encode())\n"
        "def go(): return sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", talk + code]
    monkeypatch.setattr(processes, "command", lambda module, words: [*command, *words])
    return processes.RunProcess(tmp_path, "float32", 0, **options)


def test_a_process_goes_on_turn_by_turn(tmp_path, monkeypatch):
    code = "told('0.25'); told('turn'); print(go()); told('turn'); print(go())"
    parts = []
    note = {"on_progress": lambda process: parts.append(process.part_done)}
    found = process(tmp_path, monkeypatch, code, **note)
    assert found.pid is None
    assert found.go_on()
    assert found.part_done == 0.25
    assert found.go_on()
    assert not found.go_on()
    assert processes.tail(tmp_path / "float32_seed0.log").split() == ["go", "go"]
    assert parts[-1] == 0.25


@pytest.mark.skipif(sys.platform != "linux", reason="others are not stopped")
def test_a_process_that_waits_is_stopped_and_fetches_no_input(tmp_path, monkeypatch):
    import psutil

    code = "told('meet'); told('turn'); print(go())"
    found = process(tmp_path, monkeypatch, code)
    assert found.go_on() and found.has_met
    state = psutil.Process(found.pid)
    while state.status() == psutil.STATUS_RUNNING:
        pass  # the signal is on its way
    assert state.status() == psutil.STATUS_STOPPED
    assert not found.go_on()
    assert processes.tail(tmp_path / "float32_seed0.log").split() == ["go"]


@pytest.mark.skipif(sys.platform != "linux", reason="others are not stopped")
def test_a_stopped_process_ends_with_the_one_that_started_it(tmp_path):
    program = (
        "import os, subprocess, sys\n"
        "code = 'from tfamp.trials import processes; processes.end_with_parent(); '\n"
        "code += 'print(1, flush=True); input()'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdin=-1, stdout=-1)\n"
        "child.stdout.readline()\n"
        "os.kill(child.pid, 19)\n"
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


def test_a_process_that_dies_leaves_a_failed_run_and_its_log(tmp_path, monkeypatch):
    code = "print('last words', flush=True); os.kill(os.getpid(), 9)"
    found = process(tmp_path, monkeypatch, code)
    assert not found.go_on()
    run = found.result()
    assert (run.status, run.error) == ("failed", processes.why_ended(-9))
    assert processes.tail(tmp_path / "float32_seed0.log") == "last words"


def test_a_process_that_dies_while_it_waits_is_seen(tmp_path, monkeypatch):
    found = process(tmp_path, monkeypatch, "told('turn'); os.kill(os.getpid(), 9)")
    assert found.go_on()
    assert not found.go_on()
    assert found.result().error == processes.why_ended(-9)


def test_an_old_record_is_not_taken_for_a_new_one(tmp_path, monkeypatch):
    made_evidence.run("float32", 0).to_json(tmp_path / "float32_seed0.json")
    found = process(tmp_path, monkeypatch, "")
    assert not found.go_on()
    assert found.result().status == "failed"


def test_a_run_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    code = "import time; time.sleep(600)"
    found = process(tmp_path, monkeypatch, code, timeout_seconds=0.3)
    assert not found.go_on()
    assert found.result().error == "it took longer than 0.3 s"


def test_a_process_can_be_ended_and_ends_with_its_comparison(tmp_path, monkeypatch):
    found = process(tmp_path, monkeypatch, "told('turn'); sys.exit(not go())")
    assert found.go_on()
    found.end()
    with pytest.raises(ProcessLookupError):
        os.kill(found.pid, 0)


class Player:
    """Goes on for some turns, and notes each."""

    def __init__(self, notes, name, turns, meets_at=None):
        self.name, self.turns, self.notes = name, turns, notes
        self.meets_at, self.has_met = meets_at, False

    def go_on(self):
        self.notes.append(self.name)
        self.turns -= 1
        self.has_met = self.turns == self.meets_at
        if self.turns < 0:
            raise KeyboardInterrupt
        return self.turns > 0

    def end(self):
        self.notes.append(f"end {self.name}")


# Whether there is room, name and turns of each player and how many are left where it
# waits for the others, the order of the turns, that of the ends.
ORDERS = {
    # Each starts while those before it wait; then the first that waits goes on.
    "in a circle": (True, [("a", 3), ("b", 1), ("c", 2)], "abcaca", "bca"),
    # Both have two turns left where they meet: "a" after one turn, "b" after three.
    "they meet": (True, [("a", 3, 2), ("b", 5, 2)], "abbb" + "abab", "ab"),
    "no room": (False, [("a", 2), ("b", 2)], "aabb", "ab"),
    # Nobody waits for those that have not begun.
    "no room to meet": (False, [("a", 3, 2), ("b", 3, 2)], "aaabbb", "ab"),
}


@pytest.mark.parametrize("has_room, players, turns, ends", ORDERS.values(), ids=ORDERS)
def test_players_go_on_in_turns(has_room, players, turns, ends, monkeypatch):
    monkeypatch.setattr(processes, "memory_has_room", lambda waiting: has_room)
    notes = []
    ended = processes.in_turns(Player(notes, *player) for player in players)
    assert "".join(player.name for player in ended) == ends
    assert "".join(notes) == turns


def test_an_interruption_ends_all_that_have_begun(monkeypatch):
    monkeypatch.setattr(processes, "memory_has_room", lambda waiting: True)
    notes = []
    players = [Player(notes, "a", 2), Player(notes, "b", 0), Player(notes, "c", 1)]
    with pytest.raises(KeyboardInterrupt):
        list(processes.in_turns(players))
    assert notes == ["a", "b", "end a", "end b"]


def test_room_is_what_memory_has_free(monkeypatch):
    import psutil

    own = psutil.Process().memory_info().rss
    free = iter(types.SimpleNamespace(available=int(n * own)) for n in (1.6, 1.4))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: next(free))
    here, gone = (types.SimpleNamespace(pid=n) for n in (os.getpid(), 2**22 + 1))
    assert processes.memory_has_room([here, gone])
    assert not processes.memory_has_room([here])


def test_a_run_tells_how_far_it_is_and_waits_for_its_turn():
    reading, writing = os.pipe()
    answers = io.StringIO("go\n")
    own = processes.Line(writing, answers, takes_turns=True)
    own.tell(0.5)
    own.wait_for_turn()
    assert os.read(reading, 100).decode().split() == ["0.5000", "turn"]
    with pytest.raises(SystemExit):
        own.wait_for_turn()  # nobody answers any more
    for end in (reading, writing):
        os.close(end)


def test_a_run_that_takes_no_turns_does_not_wait():
    processes.Line(None, io.StringIO(""), takes_turns=True).wait_for_turn()


def weights(path, before, after):
    np.savez(path, before_0=np.float32(before), after_0=np.float32(after))
    return path


def test_drift_is_the_distance_over_the_way(tmp_path):
    # From 0 the reference went to (3, 4), five away; the other ended one beside it.
    reference = weights(tmp_path / "a.npz", [0.0, 0.0], [3.0, 4.0])
    other = weights(tmp_path / "b.npz", [9.0, 9.0], [4.0, 4.0])
    assert storage.drift(reference, other) == pytest.approx(0.2)
    assert storage.drift(reference, reference) == 0.0
    assert storage.drift(reference, tmp_path / "none.npz") is None
    still = weights(tmp_path / "c.npz", [1.0], [1.0])
    assert storage.drift(still, still) is None
    assert storage.drift(reference, still) is None


def bare_run(policy, **given):
    run = made_evidence.run(policy, 0, **given)
    return replace(run, weights_drift=None, drift_from="")


def test_drift_is_added_to_all_but_the_reference(tmp_path):
    job = Job("t", ("auto", "float32"), (0,), 1)
    runs = [bare_run(policy) for policy in job.policies]
    weights(tmp_path / "float32_seed0.npz", [0.0], [2.0])
    weights(tmp_path / "auto_seed0.npz", [0.0], [1.0])
    found = storage.add_drift(tmp_path, runs, "float32")
    assert [run.weights_drift for run in found] == [0.5, None]
    written = json.loads((tmp_path / "auto_seed0.json").read_text())
    assert written["weights_drift"] == 0.5


def test_drift_is_from_the_reference_that_the_report_names(started, tmp_path):
    policies = ("float32", "float32+xla", "auto")
    speeds = dict(zip(policies, (1.0, 2.0, 3.0), strict=True))
    for place, (policy, speed) in enumerate(speeds.items()):
        started[1][policy, 0] = bare_run(policy, speed=speed)
        weights(tmp_path / f"{file_name(policy, 0)}.npz", [0.0], [2.0 - 0.5 * place])
    found = tfamp.compare(build_nothing, policies=policies, seeds=1, directory=tmp_path)
    assert found.reference == "float32+xla"
    # It ended at 1.5, the others 0.5 away from there.
    drifts = [run.weights_drift for run in found.runs]
    assert drifts == [pytest.approx(1 / 3), None, pytest.approx(1 / 3)]
    assert {run.drift_from for run in found.runs} == {"float32+xla", ""}


def test_drift_from_a_former_reference_is_not_shown_as_one_from_the_new(tmp_path):
    job = Job("t", ("float32", "float32+xla", "auto"), (0,), 1)
    runs = [
        replace(
            made_evidence.run(policy, 0),
            weights_drift=None if policy == "float32" else 0.25,
            drift_from="" if policy == "float32" else "float32",
        )
        for policy in job.policies
    ]
    kept = storage.add_drift(tmp_path, runs, "float32")
    assert [run.weights_drift for run in kept] == [None, 0.25, 0.25]
    # The weights of earlier runs are gone, so nothing can be measured anew.
    changed = storage.add_drift(tmp_path, runs, "float32+xla")
    assert [run.weights_drift for run in changed] == [None, None, None]


def test_a_finished_comparison_leaves_no_weights_behind(tmp_path):
    weights(tmp_path / "float32_seed0.npz", [0.0], [2.0])
    storage.end(tmp_path, is_complete=False)
    assert (tmp_path / "float32_seed0.npz").exists()
    storage.end(tmp_path, is_complete=True)
    assert not (tmp_path / "float32_seed0.npz").exists()


def test_operations_stand_beside_those_of_the_reference():
    seconds = {
        "float32": {"MatMul": 0.04, "Relu": 0.01},
        "auto": {"MatMul": 0.02, "Cast": 0.03},
    }
    assert measurements.side_by_side(seconds, "float32") == {
        "auto": (
            OperationTime("MatMul", 0.04, 0.02),
            OperationTime("Cast", 0.0, 0.03),
            OperationTime("Relu", 0.01, 0.0),
        )
    }
    assert measurements.side_by_side(seconds, "float32+xla") == {}


def concluded(policies, **options):
    runs = [
        made_evidence.run(policy, seed, speed=speed)
        for seed in range(3)
        for policy, speed in policies.items()
    ]
    job = Job("t", tuple(policies), (0, 1, 2), 1)
    runs = [replace(run, **options) for run in runs]
    settings = {"metric": None, "better": None, "tolerance": 0.005, "context": None}
    return conclude(job, runs, **settings)


def test_the_fastest_float32_is_named_as_the_reference():
    found = concluded({"float32": 1.0, "float32+xla": 1.5, "auto": 1.2})
    assert found.reference == "float32+xla"
    assert (
        "float32+xla is the reference, since it was the fastest float32 (faster than "
        "float32)." in found.notes
    )
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


def test_each_policy_is_searched_once(started, monkeypatch):
    asked = []

    def try_size(folder, size, *, timeout_seconds):
        policy = Settings.read(folder).policy
        asked.append(
            (policy, TrialSettings.from_json(folder / TrialSettings.FILE).allowed_bytes)
        )
        fits = size <= (100 if policy == "float32" else 200)
        return Trial(size, "fits" if fits else "killed")

    monkeypatch.setattr(batch_search, "try_size", try_size)
    found = tfamp.compare(build_nothing, seeds=2, max_memory_bytes=10**9)
    assert set(asked) == {("float32", 10**9), ("auto", 10**9)}
    ratio = found.ratio("largest_batch", "auto")
    assert 1.7 < ratio.estimate < 2.3


def test_a_search_that_fails_is_noted_and_the_comparison_goes_on(started, monkeypatch):
    def fail(folder, size, *, timeout_seconds):
        raise RuntimeError("A training step with a batch of 64 failed.")

    monkeypatch.setattr(batch_search, "try_size", fail)
    found = tfamp.compare(build_nothing, seeds=1, max_memory_bytes=10**9)
    assert {run.largest_batch for run in found.runs} == {None}
    assert "auto: A training step with a batch of 64 failed." in found.notes
