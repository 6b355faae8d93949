"""What each process of `multi_worker_test.py` runs; writes what came out as JSON.

`python -m tests.worker_program OUT [--whole]`, with `TF_CONFIG` set in each of them.
"""

import hashlib
import json
import random
import sys

import keras
import numpy as np
import tensorflow as tf

from tests.clocks import Ticks
from tests.linear_training import X, Y, inner, linear, spoiled

GLOBAL_BATCH = 8
UNEVEN = 41  # rows: the last batch has one, and none on the second worker
# Batch -> rows of it that are not finite: of worker 1, of worker 0, of both.
BAD_ROWS = {1: [5], 3: [2], 4: [0, 7]}
SMALL_BAD_ROWS = {1: [2], 4: [1]}  # of batches of 4


def failure_of(do):
    """Returns the name and the text of the error that `do` raises, or None."""
    try:
        do()
    except Exception as error:
        return [type(error).__name__, str(error)[:1000]]
    return None


def state_of(model):
    """Returns all that has to be the same on every worker."""
    optimizer = model.optimizer
    slots = [np.asarray(v.value) for v in optimizer.variables]
    # Moving statistics too, of which Keras keeps those of each replica apart.
    weights = [np.asarray(v.value) for v in model.weights]
    return {
        "weights": [w.tolist() for w in weights],
        "slots": hashlib.sha256(b"".join(s.tobytes() for s in slots)).hexdigest(),
        "scale": optimizer.scale,
        "applied": optimizer.applied_steps,
        "skipped": optimizer.skipped_steps,
        "iterations": int(np.asarray(optimizer.iterations.value)),
    }


def fit(strategy, x, *, model=linear, batch_size=GLOBAL_BATCH, steps=1, **options):
    """Returns the state and the losses after `fit` of one epoch, and the model."""
    import tfamp

    with strategy.scope():
        made = model()
        optimizer = tfamp.LossScaleOptimizer(inner(), **options)
        made.compile(optimizer, "mse", steps_per_execution=steps)
    history = made.fit(x, Y[: len(x)], batch_size=batch_size, shuffle=False, verbose=0)
    return {"losses": history.history["loss"], **state_of(made)}, made


def stopped(strategy):
    """Returns the error of a training that cannot go on, and the weights after it."""
    import tfamp

    with strategy.scope():
        model = linear()
        optimizer = tfamp.LossScaleOptimizer(inner(), max_consecutive_skips=3)
        model.compile(optimizer, "mse")
    error = failure_of(lambda: model.fit(X * np.inf, Y, batch_size=8, verbose=0))
    return {"error": error, **state_of(model)}


def mask(strategy):
    """Returns the dropout mask that this worker draws."""
    import tfamp

    with strategy.scope(), tfamp.scope("float32"):
        layer = keras.layers.Dropout(0.5, seed=1)
        layer.build((1, 1024))
    drawn = strategy.run(lambda: layer(tf.ones((1, 1024)), training=True))
    return (drawn.numpy() > 0).ravel().tolist()


class Watched(keras.Model):
    """Notes the examples that it trains on."""

    def __init__(self):
        super().__init__()
        self.seen, self.dense = [], keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        note = tf.numpy_function(self.note, [data[0]], tf.float32)
        with tf.control_dependencies([note]):
            return super().train_step(data)

    def note(self, x):
        self.seen += x[:, 0].astype(int).tolist()
        return np.float32(0.0)


def shuffled(strategy):
    """Returns the examples of each of two epochs."""
    import tfamp

    x = np.arange(41.0)[:, None]
    epochs = []
    with strategy.scope():
        model = Watched()
        model.compile(tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.0)), "mse")

    def end(epoch, logs):
        epochs.append(list(model.seen))
        model.seen.clear()

    callback = keras.callbacks.LambdaCallback(on_epoch_end=end)
    options = {"batch_size": 8, "epochs": 2, "verbose": 0}
    model.fit(x, x, callbacks=[callback], **options)
    return epochs


def reduced(strategy, policy, **reduction):
    """Returns the state after `fit` of a model whose gradients go in half precision.

    Those of the embedding are sparse.
    """
    import tfamp

    with strategy.scope(), tfamp.scope(policy):
        keras.utils.set_random_seed(0)
        words = keras.Input((3,), dtype="int32")
        h = keras.layers.Embedding(16, 4)(words)
        h = keras.layers.Dense(8, activation="tanh")(keras.layers.Flatten()(h))
        model = keras.Model(words, keras.layers.Dense(1)(h))
        optimizer = tfamp.LossScaleOptimizer(inner(), 1024.0, **reduction)
        model.compile(optimizer, "mse")
    x = np.random.default_rng(0).integers(0, 16, (48, 3))
    model.fit(x, Y / 16, batch_size=GLOBAL_BATCH, shuffle=False, verbose=0)
    return state_of(model)


def rate(strategy):
    """Returns the examples a second, where each call of the step takes one."""
    import tfamp

    with strategy.scope(), tfamp.scope("float32"):
        model = linear()
        model.compile("sgd", "mse")
    x, callback = X[:UNEVEN], tfamp.callbacks.Throughput(clock=Ticks())
    options = {"batch_size": GLOBAL_BATCH, "verbose": 0, "callbacks": [callback]}
    return model.fit(x, Y[:UNEVEN], **options).history["examples_per_second"]


def main(out, is_whole):
    """Runs everything in turn: a process can make the strategy once."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    results = {}
    results["uneven"], _ = fit(strategy, X[:UNEVEN], steps=4)
    results["fit"], model = fit(strategy, X)
    results["evaluate"] = model.evaluate(X, Y, batch_size=GLOBAL_BATCH, verbose=0)
    results["predict"] = model.predict(X, batch_size=GLOBAL_BATCH, verbose=0).tolist()
    # 12 batches, 2 of them bad: two windows, and the last 2 flushed.
    small = {"batch_size": 4, "accumulation_steps": 4}
    x = spoiled(X, SMALL_BAD_ROWS, 4)
    results["accumulation"], _ = fit(strategy, x, **small)
    results["stopped"] = stopped(strategy)
    results["mask"] = mask(strategy)
    results["rate"] = rate(strategy)
    index = strategy.cluster_resolver.task_id
    random.seed(index)
    results["shuffled"] = shuffled(strategy)
    tf.random.set_seed(index)
    results["shuffled by seeds"] = shuffled(strategy)
    results["sums"] = reduced(strategy, "mixed_float16", reduce_dtype="float16")
    if is_whole:
        bad = spoiled(X, BAD_ROWS, GLOBAL_BATCH)
        results["fit, overflows"], _ = fit(strategy, bad)
    with open(out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(sys.argv[1], "--whole" in sys.argv)
