"""What each process of `data_workers_test.py` runs; writes what came out as JSON.

`python -m tests.data_worker_program OUT FOLDER CASE...` with `TF_CONFIG` set, in every
worker alike; `FOLDER` holds TFRecord files of the numbers from 0 to 26.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

from tests.data_distribute_test import FEATURES, NUM, arrays, epoch_of
from tfamp.data import Pipeline

GLOBAL_BATCH = 8


def records(folder):
    """Returns the pipeline of the numbers in the files."""
    pipeline = Pipeline.from_tfrecord(f"{folder}/*.tfrecord", features=FEATURES)
    return pipeline.map(lambda example: example["x"])


def pipelines(index, folder):
    """Returns what makes the pipelines to distribute, by name."""
    return {
        "arrays": lambda: arrays().shuffle(seed=1),
        "arrays, no remainder": lambda: arrays().shuffle(seed=1),
        "balance": lambda: arrays().balance(seed=1).shuffle(seed=2),
        "records, file cache": lambda: (
            records(folder).cache(f"{folder}/one").shuffle(seed=1)
        ),
        "filter": lambda: records(folder).filter(lambda x: x % 3 > 0).shuffle(seed=1),
        "shard by the cluster": lambda: arrays().shard("auto").shuffle(),
        "shards of unequal steps": lambda: (
            Pipeline.from_dataset(tf.data.Dataset.range(9)).shard(2, index).shuffle()
        ),
    }


def fitted(columns, index):
    """Returns the pipelines to fit to, by name."""
    few = columns.subset(25)
    return {
        "fit, shard": columns.shard("auto").cache("memory").shuffle().prefetch(),
        # 13 and 12 examples: three steps of 4 each, then 1 on one worker alone.
        "fit, shards of unequal steps": few.shard(2, index).shuffle(),
    }


def batches(name, pipeline):
    """Returns the dataset of a case."""
    return pipeline.batch(GLOBAL_BATCH, drop_remainder="no rem" in name).build()


def failure_of(pipeline):
    """Returns the name and the text of what `build` raises, or None."""
    try:
        pipeline.batch(GLOBAL_BATCH).build()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def fit(strategy, pipeline):
    """Returns what `fit` finds as the mean of twice the inputs, epoch by epoch."""
    import tfamp

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.0))
        model.compile(optimizer, loss="mse", metrics=["mae"])
        model.layers[0].kernel.assign([[2.0]])
    dataset = pipeline.batch(GLOBAL_BATCH).build()
    return model.fit(dataset, epochs=2, verbose=0).history["mae"]


def errors(folder):
    """Returns what orders of a worker's own raise, by stage."""
    return {
        "shuffle": failure_of(arrays().shuffle()),
        "balance": failure_of(arrays().balance().shuffle(seed=1)),
        "weights": failure_of(records(folder).weights([1.0] * NUM)),
    }


def main(out, folder, *names):
    """Runs the cases in turn: a process can make the strategy once."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    x = np.arange(NUM, dtype=np.float32)[:, None]
    columns = Pipeline.from_arrays(x, 0 * x)
    makers, fits = pipelines(index, folder), fitted(columns, index)
    results = {"subset": [float(x[0]) for x, _ in columns.subset(25).build()]}
    for name in names:
        if name == "errors":
            results[name] = errors(folder)
        elif name in fits:
            results[name] = fit(strategy, fits[name])
        else:
            dataset = batches(name, makers[name]())
            distributed = strategy.experimental_distribute_dataset(dataset)
            results[name] = [epoch_of(strategy, distributed) for _ in range(2)]
    with open(out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
