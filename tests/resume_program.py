"""A training that `resume_test.py` kills, at a step or in the middle of a save.

`python -m tests.resume_program EPOCHS FOLDER step 7` kills itself behind the 7th step
that it trains; `save 2 900` in its second save, when 900 bytes of it are written;
`rename 2 0` when the second save has been written, and does not have its name yet;
`worker 5`, as a task of a faked Slurm step, behind the 5th step of the second worker.
"""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfamp
from tests.halting import Halt
from tests.loops import digest
from tfamp.callbacks import Resume

EVERY_STEPS = 4
X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_save(number, num_bytes):
    original, saves = tf.io.gfile.GFile.write, []

    def write(self, content):
        saves.append(1)
        if len(saves) == number:
            original(self, content[:num_bytes])
            self.flush()
            killed()
        return original(self, content)

    tf.io.gfile.GFile.write = write


def kill_before_rename(number):
    original, renames = tf.io.gfile.rename, []

    def rename(source, target, overwrite=False):
        renames.append(1)
        if len(renames) == number:
            killed()
        return original(source, target, overwrite)

    tf.io.gfile.rename = rename


def train(epochs, folder=None, *callbacks):
    """Returns the model and the callback after a training that begins as always."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(3), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).shuffle(22).batch(4)
    resume = folder and Resume(folder, every_steps=EVERY_STEPS)
    callbacks = [*([resume] if resume else []), *callbacks]
    model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
    return model, resume


def final_digest(epochs, folder=None):
    """Returns a checksum of all that training writes, and the losses of all epochs."""
    model, _ = train(epochs, folder)
    return digest(model), model.history.history["loss"]


def newest_step(folder):
    """Returns the number of steps behind the newest state in a folder."""
    return max([int(p.name[5:14]) for p in Path(folder).glob("step-*.npz")], default=0)


def train_as_worker(epochs, folder, killed_at):
    """Trains on two workers, of which the second is killed."""
    strategy = tfamp.distribute.strategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.01))
        model.compile(optimizer, "mse")
    callbacks = [Resume(folder, every_steps=2)]
    if strategy.cluster_resolver.task_id == 1:
        callbacks.append(Halt(killed_at, killed))
    x = np.ones((24, 4), "float32")
    how = {"batch_size": 8, "shuffle": False, "epochs": epochs, "verbose": 0}
    model.fit(x, x[:, :1], callbacks=callbacks, **how)


def main(epochs, folder, kind, number, num_bytes="0"):
    """Trains until it is killed."""
    epochs, number, callbacks = int(epochs), int(number), []
    if kind == "worker":
        train_as_worker(epochs, folder, number)
        return
    if kind == "step":
        callbacks = [Halt(number, killed)]
    elif kind == "save":
        kill_in_save(number, int(num_bytes))
    else:
        kill_before_rename(number)
    train(epochs, folder, *callbacks)


if __name__ == "__main__":
    main(*sys.argv[1:])
