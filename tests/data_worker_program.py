"""What each process of `data_workers_test.py` runs; writes what came out as JSON.

`python -m tests.data_worker_program OUT FOLDER` with `TF_CONFIG` set, in every worker
alike; `FOLDER` holds TFRecord files of the numbers from 0 to 26.
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


def given(folder):
    """Returns a pipeline of a dataset whose files TensorFlow would divide itself."""
    files = sorted(tf.io.gfile.glob(f"{folder}/*.tfrecord"))
    examples = tf.data.TFRecordDataset(files).map(
        lambda record: tf.io.parse_single_example(record, FEATURES)["x"]
    )
    return Pipeline.from_dataset(examples)


def cases(strategy, folder):
    """Returns the pipelines to distribute, by name."""
    index = strategy.cluster_resolver.task_id
    return {
        "arrays": arrays().shuffle(seed=1),
        "arrays, odd batch": arrays().shuffle(seed=1),
        "arrays, no remainder": arrays().shuffle(seed=1),
        "balance": arrays().balance(seed=1).shuffle(seed=2),
        "records": records(folder).shuffle(seed=1),
        "records, file cache": records(folder).cache(f"{folder}/one").shuffle(seed=1),
        "dataset, file cache": given(folder).cache(f"{folder}/two"),
        "filter": records(folder).filter(lambda x: x % 3 > 0).shuffle(seed=1),
        "shard of arrays": arrays().shard(2, index).shuffle(),
        "shard of records": records(folder).shard(2, index).shuffle(),
        "shard, file cache": records(folder)
        .shard(2, index)
        .cache(f"{folder}/three")
        .shuffle(),
        "shard, odd batch": arrays().shard(2, index).shuffle(),
        "shards of unequal steps": Pipeline.from_dataset(tf.data.Dataset.range(9))
        .shard(2, index)
        .shuffle(),
    }


def batches(name, pipeline):
    """Returns the dataset of a case."""
    if "odd" in name:
        return pipeline.batch(7).build()
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


def main(out, folder):
    """Runs everything in turn: a process can make the strategy once."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    results = {}
    for name, pipeline in cases(strategy, folder).items():
        distributed = strategy.experimental_distribute_dataset(batches(name, pipeline))
        results[name] = [epoch_of(strategy, distributed) for _ in range(2)]

    def from_context(context):
        size = context.get_per_replica_batch_size(GLOBAL_BATCH)
        pipeline = arrays().shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return pipeline.shuffle().batch(size).build()

    distributed = strategy.distribute_datasets_from_function(from_context)
    results["from a function"] = [epoch_of(strategy, distributed) for _ in range(2)]
    x = np.arange(NUM, dtype=np.float32)[:, None]
    columns = Pipeline.from_arrays(x, 0 * x)
    index = strategy.cluster_resolver.task_id
    results["fit"] = {
        "shuffled": fit(strategy, columns.shuffle(seed=1)),
        "shard": fit(
            strategy, columns.shard(2, index).cache("memory").shuffle().prefetch()
        ),
        # 13 and 12 examples: three steps of 4 each, then 1 on one worker alone.
        "shards of unequal steps": fit(
            strategy, columns.subset(25).shard(2, index).shuffle()
        ),
        "part of a batch on one worker": fit(
            strategy, columns.subset(25).shuffle(seed=1)
        ),
    }
    results["subset"] = [float(x[0]) for x, _ in columns.subset(25).build()]
    results["errors"] = {
        "shuffle": failure_of(arrays().shuffle()),
        "balance": failure_of(arrays().balance().shuffle(seed=1)),
        "weights": failure_of(records(folder).weights([1.0] * NUM)),
    }
    with open(out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
