"""What each of two workers runs in `resume_workers_test.py`: trained, killed, resumed.

`python -m tests.resume_worker_program OUT FOLDER [WORKER KIND NUMBER]`: worker 1 is
killed behind step 5 with `1 step 5`, in its second save with `1 save 2`, before that
has its name with `1 rename 2`; with `1 freeze 5` it is stopped behind step 5. The
workers are tasks of a faked Slurm step.
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


def main(out, folder, worker="", kind="", number="0"):
    """Trains three epochs."""
    strategy = tfamp.distribute.strategy()
    import keras

    from tests import resume_program
    from tests.loops import digest

    keras.utils.set_random_seed(0)
    resume = tfamp.callbacks.Resume(folder, every_steps=2)

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations.numpy()) == int(number):
                how = signal.SIGSTOP if kind == "freeze" else signal.SIGKILL
                os.kill(os.getpid(), how)

    with strategy.scope():
        model = build()
    callbacks = [resume]
    if worker == str(strategy.cluster_resolver.task_id):
        if kind == "save":
            resume_program.kill_in_save(int(number), num_bytes=900)
        elif kind == "rename":
            resume_program.kill_before_rename(int(number))
        else:
            callbacks.append(Kill())
    history = model.fit(dataset(), epochs=3, verbose=0, callbacks=callbacks)
    results = {
        "digest": digest(model),
        "resumed at": resume.resumed_at,
        "loss": history.history["loss"],
        "notes": resume.notes,
    }
    with open(out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
