"""`tfamp.compare`: what it refuses, measures, tells and leaves, by real trainings."""

import dataclasses
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.refusals import refusals
from tfamp.keras_hooks.optimizers import in_xla
from tfamp.trials import runner, worker
from tfamp.trials.run_records import Run

pytest.importorskip("cloudpickle", reason="needs the extra `report`")
pytest.importorskip("psutil", reason="needs the extra `report`")

ROOT = Path(__file__).parents[1]
POLICIES = ("float32", "mixed_bfloat16+xla")
X = np.random.default_rng(0).normal(size=(192, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


def compiled(y, outputs):
    """A metric: 1 where XLA compiles it, 0 elsewhere."""
    return tf.fill(tf.shape(outputs)[:1], float(in_xla()))


def build(seed=0):
    model = keras.Sequential(
        [keras.layers.Dense(16, "relu"), keras.layers.Dense(2, "softmax")], name="net"
    )
    metrics = ["accuracy", compiled]
    model.compile("adam", "sparse_categorical_crossentropy", metrics=metrics)
    return model


def shuffled(seed):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    return data.shuffle(4, seed=seed)


def refuse():
    raise RuntimeError("the data are lost")


ENDLESS = tf.data.Dataset.from_tensors((X, Y)).repeat()
REFUSED = {
    "one policy": ({"policies": ("auto",)}, "at least two different ones"),
    "no such plan": ({"policies": ("float32", "p.json")}, "there is none"),
    "seeds": ({"seeds": [1, 1]}, "or different ones"),
    "direction": ({"metric": "gain"}, "expected 'max' or 'min'"),
    "model": ({"build_model": build()}, "Pass the function, not what", TypeError),
    "read once": ({"train": iter([(X, Y)])}, "can be read once only", TypeError),
    "endless": ({"train": ENDLESS}, "has no end"),
}


def compare(changes):
    given = {"build_model": build, "train": (X, Y), "on_run": refuse}
    return tfamp.compare(**{**given, **changes})


test_arguments_are_checked_before_any_run = refusals(REFUSED, compare)


def test_a_first_run_that_fails_ends_it_with_its_log(tmp_path):
    def broken(seed):
        raise ZeroDivisionError("no model today")

    with pytest.raises(RuntimeError, match="ZeroDivisionError: no model today"):
        tfamp.compare(broken, (X, Y), directory=tmp_path)


def test_a_folder_with_runs_is_not_taken_by_mistake(compared):
    settings = {"epochs": 3, "directory": compared[1]}
    with pytest.raises(ValueError, match="runs of an earlier comparison"):
        tfamp.compare(build, shuffled, **settings)
    with pytest.raises(ValueError, match="runs of other settings"):
        tfamp.compare(build, shuffled, **{**settings, "epochs": 2}, resume=True)


SETTINGS = {"policies": POLICIES, "seeds": 2, "epochs": 3, "tolerance": 0.2}


def test_a_comparison_goes_on_with_the_runs_that_are_there(compared):
    found, folder, told = compared
    given = {"directory": folder, "resume": True, "on_run": refuse, **SETTINGS}
    again = tfamp.compare(build, shuffled, (X[:96], Y[:96]), **given)
    assert again.runs == found.runs and again.verdicts == found.verdicts


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison of two policies from two seeds, its folder and what was told.

    The second seed's runs are the first one's, told anew: one process a policy will do.
    """
    folder, told = tmp_path_factory.mktemp("runs"), []

    def do(folder, task, **how):
        if task.seed == 0:
            return runner_do(folder, task, **how)
        before = dataclasses.replace(task, seed=0)
        for path in folder.glob(f"{before.name}.*"):
            shutil.copy(path, folder / path.name.replace(before.name, task.name))
        run = Run.from_json(folder / f"{before.name}.json")
        run = dataclasses.replace(run, seed=task.seed)
        run.to_json(folder / f"{task.name}.json")
        return run

    runner_do, given = runner.do, {"directory": folder, "command": "the command"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "do", do)
        given |= {"on_run": told.append, **SETTINGS}
        found = tfamp.compare(build, shuffled, (X[:96], Y[:96]), **given)
    return found, folder, told


def test_policies_take_turns_and_each_goes_first(compared):
    first, second = POLICIES
    turns = [(run.policy, run.seed) for run in compared[2]]
    assert turns == [(first, 0), (second, 0), (second, 1), (first, 1)]
    pairs = [(run.policy, run.seed) for run in compared[0].runs]
    assert pairs == [(policy, seed) for seed in (0, 1) for policy in POLICIES]


def test_a_run_has_every_figure(compared):
    for run in compared[0].runs:
        resolved = run.policy.removesuffix("+xla")
        assert (run.status, run.resolved_policy) == ("finished", resolved)
        assert (run.batch_size, run.num_steps, run.num_epochs) == (16, 36, 3)
        assert run.num_parameters == 6 * 16 + 16 + 16 * 2 + 2
        assert set(run.final_metrics) == {"loss", "accuracy", "compiled"}
        assert run.final_metrics["compiled"] == run.policy.endswith("+xla")
        assert len(run.history["val_loss"]) == 3
        assert run.num_examples == 96
        assert run.losses[-1][0] == 36
        assert {each.batch_size for each in run.latencies} == {1, 16}
        assert run.step_seconds > 0 and run.first_step_seconds > 0
        assert (run.skipped_steps, run.num_nonfinite_weights) == (0, 0)
        assert ("bfloat16" in run.layers.values()) == (run.policy != "float32")
        assert run.notes == ()


def test_the_answer_is_told_with_the_figures(compared):
    found, _, _ = compared
    verdict = found.verdicts[POLICIES[1]]
    known = (found.reference, found.metric, found.better)
    assert known == ("float32", "accuracy", "max")
    assert found.verdict == verdict.answer
    assert verdict.num_examples == 96
    low, high = (
        np.mean([r.final_metrics["accuracy"] for r in found.finished(policy)])
        for policy in POLICIES
    )
    assert verdict.quality.estimate == pytest.approx(high - low, abs=1e-6)
    table = found.table()
    assert max(map(len, table.splitlines())) <= 110
    for words in ("training (examples/s)", "accuracy, validation", "Verdict: "):
        assert words in table
    assert found.context.command == "the command"
    again = tfamp.Comparison.from_json(found.to_json())
    assert again == found


@pytest.mark.slow
def test_a_policy_that_fails_is_left_out_and_told():
    def build_in_float32():
        if keras.config.dtype_policy().name != "float32":
            raise TypeError("no such kernel")
        return build()

    found = tfamp.compare(build_in_float32, (X, Y), policies=POLICIES, seeds=2)
    errors = [run.error for run in found.runs if not run.is_finished]
    assert errors[0].startswith("TypeError: no such kernel")
    assert errors[1].startswith("left out")
    assert found.verdict == "undecided"
    assert "2 of 4 runs failed" in found.table()


PROGRAM = """
    import os, signal, sys
    import numpy as np
    import tfamp
    from tests.compare_test import build, X, Y

    def on_run(run):
        print("run", run.policy, run.seed, flush=True)
        if run.seed == 1:
            os.kill(os.getpid(), signal.SIGINT)

    found = tfamp.compare(build, (X, Y), policies=("float32", "keras:float32"), seeds=9,
                          on_run=on_run)
    print(len(found.runs), found.verdict)
"""


@pytest.mark.slow
def test_ctrl_c_keeps_what_can_be_compared_and_leaves_no_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("run ")]) == 3
    assert (done.returncode, lines[-1].split()[0]) == (0, "3")
    assert "Stopped after 3 of 18 runs" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_the_trace_of_a_smaller_last_batch_is_no_step_of_a_short_run():
    window = worker.Window
    first, middle = window(0, 1, 1, 2.0, None), window(0, 43, 42, 0.42, None)
    last = window(0, 44, 1, 1.0, None)
    assert worker._seconds_per_step([first, middle, last]) == pytest.approx(0.01)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    clock = worker.Clock(3, lambda _: None)
    x = np.zeros((40, 2), "float32")
    model.fit(x, x[:, :1], batch_size=16, verbose=0, callbacks=[clock])
    assert (clock.windows[-1].steps, clock.windows[-1].last_step) == (1, 3)
