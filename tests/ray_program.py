"""What `ray_workers_test.py` trains on two workers of a local Ray cluster."""

import json
import os
import signal
from pathlib import Path


def train(config):
    """Trains on one worker as `docs/scale.md` says, and writes what came of it.

    The configuration has a folder, "out", and where worker 1 is to kill itself in its
    first life the step behind which it does, "kill_at".
    """
    os.environ.pop("TF_USE_LEGACY_KERAS", None)

    import keras

    import tfamp
    from tests.loops import digest
    from tests.resume_worker_program import build, dataset

    strategy = tfamp.distribute.strategy()
    out, kill_at = Path(config["out"]), config.get("kill_at", 0)
    callbacks = [tfamp.callbacks.Resume(str(out / "states"), every_steps=2)]
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
        callbacks += [Kill()] if kill_at else []
    keras.utils.set_random_seed(0)
    tfamp.enable("mixed_bfloat16")
    with strategy.scope():
        model = build()
    history = model.fit(dataset(), epochs=3, verbose=0, callbacks=callbacks)
    (resume, *_) = callbacks
    results = {
        "digest": digest(model),
        "loss": history.history["loss"],
        "resumed at": resume.resumed_at,
        "notes": resume.notes,
        "keras": keras.__version__,
        "replicas": strategy.num_replicas_in_sync,
        "dtypes": sorted({layer.compute_dtype for layer in model.layers}),
    }
    (out / f"{index}.json").write_text(json.dumps(results))
