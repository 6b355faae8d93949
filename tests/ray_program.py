"""What `ray_loop_test.py` trains on two workers of a local Ray cluster."""

import json
import os
import signal
from pathlib import Path

# What the worker's environment said when this module was imported there.
LEGACY = os.environ.get("TF_USE_LEGACY_KERAS")


def train(strategy, callbacks, out, kill_at=0, kill_in_save=0, epochs=3, num_rows=24):
    """Trains, and writes for each worker what came of it.

    Args:
        strategy: Of the cluster.
        callbacks: What `ray_loop` gives.
        out: A folder.
        kill_at: The step behind which worker 1 kills itself in its first life.
        kill_in_save: The save in which it does.
        epochs: To train.
        num_rows: Examples.
    """
    import keras

    import tfamp
    from tests.resume_worker_program import build, dataset
    from tfamp.stepping import snapshots

    out = Path(out)
    index = getattr(strategy.cluster_resolver, "task_id", 0)
    mark = out / "killed"

    def kill():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations.numpy()) == kill_at:
                kill()

    if index == 1 and not mark.exists():
        callbacks = [*callbacks, *([Kill()] if kill_at else [])]
        if kill_in_save:
            _kill_in_save(kill_in_save, kill)
    keras.utils.set_random_seed(0)
    tfamp.enable("mixed_bfloat16")
    with strategy.scope():
        model = build()
    history = model.fit(dataset(), epochs=epochs, verbose=0, callbacks=callbacks)
    (resume, *_) = callbacks
    results = {
        "digest": snapshots.digest(snapshots.take(model)),
        "loss": history.history["loss"],
        "resumed at": resume.resumed_at,
        "notes": resume.notes,
        "legacy": LEGACY,
        "keras": keras.__version__,
        "replicas": strategy.num_replicas_in_sync,
        "dtypes": sorted({layer.compute_dtype for layer in model.layers}),
    }
    (out / f"{index}.json").write_text(json.dumps(results))


def train_slowly(strategy, callbacks, out, epochs):
    """Trains, with time to lose a worker where there are two, and notes each step."""
    import time

    import keras

    from tests.resume_worker_program import build, dataset

    num_replicas = strategy.num_replicas_in_sync

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            step = int(self.model.optimizer.iterations.numpy())
            row = json.dumps([num_replicas, step, callbacks[0].notes])
            with (Path(out) / "steps").open("a") as file:
                file.write(f"{row}\n")
            time.sleep(0.3 * (num_replicas - 1))

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build()
    model.fit(dataset(), epochs=epochs, verbose=0, callbacks=[*callbacks, Steps()])


def _kill_in_save(number, kill):
    """Kills the process when its save of this number is half written to Ray."""
    import ray.train

    original, saves = ray.train.report, []

    def report(metrics, checkpoint=None, **keywords):
        saves.extend([1] if checkpoint else [])
        if len(saves) == number:
            kill()
        return original(metrics, checkpoint=checkpoint, **keywords)

    ray.train.report = report
