"""`tfamp.callbacks.Resume`: what is trained after a kill is what would have been."""

import errno
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import same_bits
from tests.refusals import refused_arguments
from tests.replicas import two_replicas
from tests.resume_program import EVERY_STEPS, final_digest, newest_step
from tfamp.callbacks import Resume
from tfamp.stepping import snapshot_files, snapshots
from tfamp.stepping.snapshots import optimizers_of

ROOT = Path(__file__).parents[1]
X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
Y = X[:, :1].copy()
MANY = 30  # epochs, for all kills to come in


class Killed(Exception):
    pass


class Kill(keras.callbacks.Callback):
    """Ends a training behind a step, as a crash would; nothing is told of it."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def on_train_batch_end(self, batch, logs=None):
        steps = [int(o.iterations.numpy()) for o in optimizers_of(self.model)]
        if max(steps) >= self.at:
            raise Killed


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


def on_replicas():
    with two_replicas().scope():
        return model_of(run_eagerly=False)


CASES = {
    "dataset, first epoch": (model_of, dataset, 4),
    "a dataset of unknown length": (model_of, unknown_length),
    "one iterator": (model_of, one_iterator),
    "random numbers": (model_of, drawing, 9),
    "accumulation": (accumulating, dataset, 2),
    "three steps an execution": (
        lambda: model_of(run_eagerly=False, steps_per_execution=3),
        dataset,
    ),
    "mixed_float16": (half, arrays),
    "two replicas": (on_replicas, dataset),
    "networks that a step builds": (two_players, arrays),
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


@pytest.mark.filterwarnings(
    "ignore:Your input ran out of data",
    "ignore:'mixed_float16' will be slow",
    "ignore:.*does not have a `build",
)
@pytest.mark.quick(
    "dataset, first epoch", "random numbers", "networks that a step builds"
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_training_goes_on_to_the_bit(tmp_path, case):
    build, data, at = (*case, 8)[:3]
    wanted = train(build, data)
    resume = Resume(tmp_path, every_steps=2)
    with pytest.raises(Killed):
        train(build, data, resume, Kill(at))
    assert resume.resumed_at is None
    again = Resume(tmp_path, every_steps=2)
    found = train(build, data, again)
    assert again.resumed_at is not None
    assert same_bits(snapshots.take(found), snapshots.take(wanted))
    drawn = getattr(found, "drawn", [])
    assert drawn == getattr(wanted, "drawn", [])[-len(drawn) or 0 :][: len(drawn)]
    assert found.history.epoch == wanted.history.epoch
    assert found.history.history == wanted.history.history
    # The training is over: once more, and its last step is trained again.
    last = train(build, data, Resume(tmp_path))
    assert same_bits(snapshots.take(last), snapshots.take(wanted))
    assert last.history.history == wanted.history.history


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with a training that was killed."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.raises(Killed):
        train(model_of, arrays, Resume(folder, every_steps=2), Kill(8))
    return folder


@pytest.fixture
def copied(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "copied")


@pytest.fixture(scope="module")
def wanted():
    """The state that the training would have come to."""
    return snapshots.take(train(model_of, arrays))


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


def fewer():
    return {**arrays(), "batch_size": 8}


def backed_up():
    backup = keras.callbacks.BackupAndRestore("/nowhere")
    return {**arrays(), "callbacks": [backup]}


WRONG = {
    "another model": (
        wide,
        arrays,
        "is of another model than 'sequential': it has sequential/",
    ),
    "another policy": (
        in_bfloat16,
        arrays,
        "was under another policy: a layer computed as",
    ),
    "another batch size": (
        model_of,
        fewer,
        "had num_batches 6, and now 3, batch_size 4, and now 8",
    ),
    "fewer epochs": (
        model_of,
        lambda: {**arrays(), "epochs": 1},
        "is in epoch 1 (from 0), and `epochs` is 1; expected the same program",
    ),
    "a backup beside it": (
        model_of,
        backed_up,
        "Resume and BackupAndRestore are in the same `fit`; expected one",
    ),
}


@pytest.mark.quick(
    "another model", "another batch size", "fewer epochs", "a backup beside it"
)
@pytest.mark.filterwarnings("ignore:'mixed_bfloat16' will be slow")
@pytest.mark.parametrize("build, data, message", WRONG.values(), ids=WRONG)
def test_another_training_is_refused_before_a_step(begun, build, data, message):
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    before = sorted(begun.iterdir())
    with pytest.raises(ValueError, match=re.escape(message)):
        train(build, data, Resume(begun), count)
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
    command = [sys.executable, "-m", "tests.resume_program", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
