"""What two workers run in `resume_workers_test.py`; the second is killed at a step.

`python -m tests.resume_worker_program FOLDER`, as a task of a faked Slurm step.
"""

import os
import signal
import sys

import tfamp

KILLED_AT = 5


def main(folder):
    """Trains with states in a folder."""
    strategy = tfamp.distribute.strategy()
    import keras
    import numpy as np

    class Kill(keras.callbacks.Callback):
        left = KILLED_AT

        def on_train_batch_end(self, batch, logs=None):
            self.left -= 1
            if not self.left and strategy.cluster_resolver.task_id == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.01))
        model.compile(optimizer, "mse")
    x = np.ones((24, 4), "float32")
    callbacks = [tfamp.callbacks.Resume(folder, every_steps=2), Kill()]
    how = {"batch_size": 8, "shuffle": False, "epochs": 3, "verbose": 0}
    model.fit(x, x[:, :1], callbacks=callbacks, **how)


if __name__ == "__main__":
    main(sys.argv[1])
