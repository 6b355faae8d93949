"""`tfamp.callbacks.Resume`: what is trained after a kill is what would have been."""

import errno
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.cluster_program import slurm_variables
from tests.halting import Halt
from tests.loops import same_bits
from tests.refusals import refused_arguments
from tests.replicas import two_replicas
from tests.resume_program import EVERY_STEPS, final_digest, newest_step
from tests.styles import assembled
from tfamp.callbacks import Resume
from tfamp.stepping import snapshot_files, snapshots

ROOT = Path(__file__).parents[1]
PROGRAM = (sys.executable, "-m", "tests.resume_program")
X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
Y = X[:, :1].copy()
MANY = 30  # epochs, for all kills to come in
# What is waited for is an event: one worker is lost, then the other has ended. Only
# where that never comes does a clock end the test.
HANGS_SECONDS = 1200


class Draws(keras.callbacks.Callback):
    """Draws of Python's and NumPy's generators at each step, since it was made."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def on_train_batch_begin(self, batch, logs=None):
        self.drawn.append([random.random(), np.random.random()])

    def on_train_end(self, logs=None):
        self.model.drawn = np.array(self.drawn).tolist()


def model_of(optimizer=None, **compile_options):
    """Weights, moving statistics, dropout's random state, a metric."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    options = {"metrics": ["mae"], "run_eagerly": True, **compile_options}
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", **options)
    return model


def arrays():
    return {"x": X, "y": Y, "batch_size": 4}


def dataset():
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return {"x": data.shuffle(22).batch(4)}


def unknown_length():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=1)
    return {"x": data.batch(4).filter(lambda x, y: True)}


def one_iterator():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22).repeat().batch(4)
    return {"x": data, "steps_per_epoch": 5}


def accumulating():
    inner = keras.optimizers.SGD(0.1, momentum=0.5)
    return model_of(tfamp.LossScaleOptimizer(inner, accumulation_steps=4))


def half():
    with tfamp.scope("mixed_float16"):
        return model_of()


def own_class():
    """A model that its first batch builds, and whose head its first call tells."""
    parts = [keras.layers.Dense(3), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    with tfamp.scope("mixed_float16"):
        model = assembled(parts, "subclassed", None)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def drawing():
    """A callback that draws random numbers."""
    return {**arrays(), "callbacks": [Draws()]}


class TwoPlayers(keras.Model):
    """A train step over two networks, which only it builds, with an optimizer each."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([keras.layers.Dense(4)])
        self.critic = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        self.noise = keras.random.SeedGenerator(3)

    def compile(self, maker, critic):
        super().compile(run_eagerly=True)
        self.of_maker, self.of_critic = maker, critic

    def call(self, x):
        return self.maker(x)

    def train_step(self, data):
        x = data[0]
        for network, optimizer in (
            (self.critic, self.of_critic),
            (self.maker, self.of_maker),
        ):
            noise = keras.random.normal(tf.shape(x), seed=self.noise)
            with tf.GradientTape() as tape:
                made = self.critic(self.maker(noise))
                losses = tf.square(self.critic(x) - 1.0) + tf.square(made)
                loss = tf.reduce_mean(losses)
            weights = network.trainable_weights
            gradients = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


def two_players():
    with tfamp.scope("mixed_float16"):
        model = TwoPlayers()
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01))
    return model


def on_replicas(steps=1):
    with two_replicas().scope():
        return model_of(run_eagerly=False, steps_per_execution=steps)


def stream():
    return tfamp.data.Pipeline.from_dataset(tf.data.Dataset.from_tensor_slices((X, Y)))


def rows():
    return tfamp.data.Pipeline.from_arrays(X, Y)


def noisy(x, strength, seed):
    return x + strength * tf.random.stateless_normal(tf.shape(x), seed)


def is_large(x, y):
    return y[0] > 0.5


# Stages that draw at random or count epochs.
PIPELINES = {
    "noise": lambda: rows().augment(noisy, ramp_epochs=8, seed=4),
    "balance on a stream": lambda: stream().balance(is_large, seed=2).shuffle(seed=3),
    "weights": lambda: rows().weights(np.arange(1.0, 23.0), seed=5),
    "filter, shuffle": lambda: stream().filter(lambda x, y: y[0] < 2).shuffle(seed=7),
    "everything": lambda: (
        rows()
        .subset(0.9, seed=1)
        .balance(is_large, seed=2)
        .cache("memory")
        .shuffle(seed=3)
        .augment(noisy, ramp_epochs=8, seed=4)
    ),
}


def piped(name):
    return lambda: {"x": PIPELINES[name]().batch(4).build(), "epochs": 5}


everything = piped("everything")
CASES = {
    "dataset, first epoch": (model_of, dataset, 4),
    "a dataset of unknown length": (model_of, unknown_length),
    "one iterator": (model_of, one_iterator),
    "random numbers": (model_of, drawing, 9),
    "accumulation": (accumulating, dataset),
    "three steps an execution": (
        lambda: model_of(run_eagerly=False, steps_per_execution=3),
        *(dataset, 3),
    ),
    "mixed_float16": (half, arrays),
    "a class of its own": (own_class, arrays),
    "two replicas": (on_replicas, dataset),
    "networks that a step builds": (two_players, arrays),
    **{name: (model_of, piped(name), 17) for name in PIPELINES},
    # In the first epoch, at the end of one, behind it, and in the last.
    **{f"everything, {at}": (model_of, everything, at) for at in (2, 5, 6, 24)},
    "everything on replicas": (lambda: on_replicas(3), everything, 5),
}


def train(build, data, *callbacks, epochs=2):
    """Returns the model and the history of a training that begins as always."""
    keras.utils.set_random_seed(0)
    model = build()
    arguments = data()
    # In front of the others, which Resume has to see through to the end of a step.
    callbacks = [*callbacks, *arguments.pop("callbacks", ())]
    arguments = {"epochs": epochs, "verbose": 0, **arguments}
    model.fit(**arguments, callbacks=callbacks)
    return model


UNSEEDED = {
    "shuffle": lambda: rows().shuffle(),
    "balance": lambda: rows().balance(is_large),
    "weights": lambda: rows().weights(np.arange(22.0)),
    "augment": lambda: rows().augment(noisy),
}


@pytest.mark.quick("shuffle")
@pytest.mark.parametrize("make", UNSEEDED.values(), ids=UNSEEDED)
def test_a_stage_without_a_seed_is_said_not_to_be_to_the_bit(make, tmp_path):
    resume = Resume(tmp_path)
    model_of().fit(make().batch(8).build(), verbose=0, callbacks=[resume])
    assert any("to the bit" in note for note in resume.notes)


@pytest.mark.filterwarnings(
    "ignore:Your input ran out of data",
    "ignore:'mixed_float16' will be slow",
    "ignore:.*does not have a `build",
)
@pytest.mark.quick("everything, 2")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_training_goes_on_to_the_bit(tmp_path, case):
    build, data, at = (*case, 8)[:3]
    wanted = train(build, data)
    resume = Resume(tmp_path, every_steps=2)
    with pytest.raises(KeyboardInterrupt):
        train(build, data, resume, Halt(at))
    assert resume.resumed_at is None
    again = Resume(tmp_path, every_steps=2)
    found = train(build, data, again)
    # What ended before anything was saved begins anew.
    assert (again.resumed_at is not None) == (at > 2)
    assert same_bits(snapshots.take(found), snapshots.take(wanted))
    drawn = getattr(found, "drawn", [])
    assert drawn == getattr(wanted, "drawn", [])[-len(drawn) or 0 :][: len(drawn)]
    assert found.history.epoch == wanted.history.epoch
    assert found.history.history == wanted.history.history


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with a training that was killed."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.raises(KeyboardInterrupt):
        train(model_of, arrays, Resume(folder, every_steps=2), Halt(8))
    return folder


@pytest.fixture
def copied(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "copied")


@pytest.fixture(scope="module")
def wanted():
    """The state that the training would have come to."""
    return snapshots.take(train(model_of, arrays))


def test_a_training_that_is_over_trains_its_last_step_again(copied, wanted):
    first, again = (train(model_of, arrays, Resume(copied)) for _ in range(2))
    for found in (first, again):
        assert same_bits(snapshots.take(found), wanted)
    assert again.history.history == first.history.history


def test_a_half_written_file_is_passed_over_with_one_warning(copied, wanted, caplog):
    newest = max(copied.glob("*.npz"))
    content = newest.read_bytes()
    newest.write_bytes(content[: len(content) // 2])
    (copied / f"{newest.name}.writing").write_bytes(content[:9])
    resume = Resume(copied, every_steps=2)
    found = train(model_of, arrays, resume)
    assert resume.resumed_at == (0, 4)
    assert same_bits(snapshots.take(found), wanted)
    (line,) = [each for each in caplog.messages if "Passed over" in each]
    assert newest.name in line and "which is not whole" in line
    assert not list(copied.glob("*.writing"))


def test_a_full_disk_ends_no_training(copied, wanted, monkeypatch):
    before = {path: path.read_bytes() for path in copied.iterdir()}

    def full(state):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(snapshot_files, "archive", full)
    resume = Resume(copied, every_steps=1)
    found = train(model_of, arrays, resume)
    assert same_bits(snapshots.take(found), wanted)
    assert {path: path.read_bytes() for path in copied.iterdir()} == before
    (line,) = resume.notes
    assert re.search("could not be written to .*No space left on device.*goes on", line)


def wide():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5)])
    model.compile("sgd", "mse", run_eagerly=True)
    return model


def in_bfloat16():
    with tfamp.scope("mixed_bfloat16"):
        return model_of()


BACKUP = keras.callbacks.BackupAndRestore("/nowhere")
# What another training changes, and what is said of it.
WRONG = {
    "another model": (wide, {}, "another model than 'sequential': it has sequential/"),
    "another policy": (in_bfloat16, {}, "was under another policy: a layer computed"),
    "another batch size": (
        *(model_of, {"batch_size": 8}),
        "had num_batches 6, and now 3, batch_size 4, and now 8",
    ),
    "fewer epochs": (
        *(model_of, {"epochs": 1}),
        "is in epoch 1 (from 0), and `epochs` is 1; expected the same program",
    ),
    "a backup beside it": (
        *(model_of, {"callbacks": [BACKUP]}),
        "Resume and BackupAndRestore are in the same `fit`; expected one",
    ),
}


@pytest.mark.quick("another model", "another batch size", "fewer *", "a backup *")
@pytest.mark.filterwarnings("ignore:'mixed_bfloat16' will be slow")
@pytest.mark.parametrize("build, changed, message", WRONG.values(), ids=WRONG)
def test_another_training_is_refused_before_a_step(begun, build, changed, message):
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    before = sorted(begun.iterdir())
    with pytest.raises(ValueError, match=re.escape(message)):
        train(build, lambda: arrays() | changed, Resume(begun), count)
    assert steps == []
    assert sorted(begun.iterdir()) == before


test_arguments_are_checked = refused_arguments(
    lambda **given: Resume(**{"directory": "folder", **given}),
    ("directory", None, ", of type", TypeError),
    ("every_steps", 0, "; expected"),
)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_lose_at_most_every_steps_each(tmp_path):
    draws = random.Random(0)
    kill(MANY, tmp_path, "save", 3, 900)
    assert newest_step(tmp_path) == 2 * EVERY_STEPS
    assert len(list(tmp_path.glob("*.writing"))) == 1
    for _ in range(19):
        before = newest_step(tmp_path)
        kind = draws.choice(["step", "save", "rename"])
        number = draws.randint(3, 9) if kind == "step" else draws.randint(1, 2)
        kill(MANY, tmp_path, kind, number, draws.randint(0, 8000))
        if kind == "step":
            assert newest_step(tmp_path) >= before + number - EVERY_STEPS
    assert newest_step(tmp_path) > 40
    assert final_digest(MANY, tmp_path) == final_digest(MANY)


def kill(*arguments):
    """Runs the program until it kills itself."""
    command = [*PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


@pytest.mark.slow("it waits half a minute for TensorFlow to give the worker up")
def test_a_worker_whose_other_is_killed_ends_and_says_how_to_go_on(tmp_path):
    with socket.socket() as one, socket.socket() as other:
        one.bind(("", 0))
        other.bind(("", 0))
        ports = ",".join(str(s.getsockname()[1]) for s in (one, other))
    logs, workers = [tmp_path / f"{index}.log" for index in range(2)], []
    command = [*PROGRAM, "3", str(tmp_path), "worker", "5"]
    try:
        for index, path in enumerate(logs):
            with path.open("w") as log:
                workers.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env={**os.environ, **slurm_variables(index, 2, ports)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        hangs = time.monotonic() + HANGS_SECONDS
        statuses = [each.wait(hangs - time.monotonic()) for each in workers[::-1]]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    log = logs[0].read_text()
    assert statuses == [-signal.SIGKILL, 1], log[-3000:]
    assert "Resume: another worker does not answer any more" in log
    assert "Start all workers again: they go on at the newest step that all" in log
