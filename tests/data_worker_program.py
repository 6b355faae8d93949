"""What each process of `data_workers_test.py` runs; writes what came out as JSON.

`python -m tests.data_worker_program OUT FOLDER CASE...` with `TF_CONFIG` set, in every
worker alike; `FOLDER` holds TFRecord files of the numbers from 0 to 26.
"""

import json
import sys

import tensorflow as tf

from tests.data_distribute_test import FEATURES, NUM, arrays, epoch_of
from tfamp.data import Pipeline

GLOBAL_BATCH = 8


def records(folder):
    """Returns the pipeline of the numbers in the files."""
    pipeline = Pipeline.from_tfrecord(f"{folder}/*.tfrecord", features=FEATURES)
    return pipeline.map(lambda example: example["x"])


def pipelines():
    """Returns what makes the pipelines to distribute, by name."""
    return {
        "arrays": lambda: arrays().shuffle(seed=1),
        "balance": lambda: arrays().balance(seed=1).shuffle(seed=2),
        "shard by the cluster": lambda: arrays().shard("auto").shuffle(),
    }


def failure_of(pipeline):
    """Returns the name and the text of what `build` raises, or None."""
    try:
        pipeline.batch(GLOBAL_BATCH).build()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


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
    makers, results = pipelines(), {}
    for name in names:
        if name == "errors":
            results[name] = errors(folder)
        else:
            dataset = makers[name]().batch(GLOBAL_BATCH).build()
            distributed = strategy.experimental_distribute_dataset(dataset)
            results[name] = [epoch_of(strategy, distributed) for _ in range(2)]
    with open(out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
