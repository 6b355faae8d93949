"""What each of two workers runs in `resume_workers_test.py`: trained, killed, resumed.

`python -m tests.resume_worker_program OUT FOLDER KILL_AT`: worker 1 kills itself behind
the step KILL_AT, 0 for never. The workers are tasks of a faked Slurm step.
"""

import json
import os
import signal
import sys

import tfamp


def build():
    """Returns a model with moving statistics and random states, compiled."""
    import keras

    layers = [
        keras.layers.Dense(3),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "mse")
    return model


def dataset():
    """Returns batches of 8 in an order that a seed decides, three an epoch."""
    import numpy as np
    import tensorflow as tf

    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return data.shuffle(24, seed=1).batch(8).with_options(options)


def main(out, folder, kill_at):
    """Trains three epochs."""
    strategy = tfamp.distribute.strategy()
    import keras

    from tfamp.stepping import snapshots

    keras.utils.set_random_seed(0)
    resume = tfamp.callbacks.Resume(folder, every_steps=2)

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations.numpy()) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    with strategy.scope():
        model = build()
    is_killed = kill_at and strategy.cluster_resolver.task_id == 1
    callbacks = [resume, Kill()] if is_killed else [resume]
    history = model.fit(dataset(), epochs=3, verbose=0, callbacks=callbacks)
    results = {
        "digest": snapshots.digest(snapshots.take(model)),
        "resumed at": resume.resumed_at,
        "loss": history.history["loss"],
        "notes": resume.notes,
    }
    with open(out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
