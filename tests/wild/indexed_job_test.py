"""Pods of an indexed Kubernetes job that are no cluster: each is one machine."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

X = np.arange(32, dtype="float32").reshape(16, 2)
OTHERS = ("TF_CONFIG", "SLURM_JOB_ID")


@pytest.fixture(params=["0", "3"])
def pod(request, monkeypatch):
    """Makes this process a pod of a sweep, as `completionMode: Indexed` starts it."""
    for name in OTHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", request.param)
    return int(request.param)


def numbers(dataset):
    return sorted(int(n) for x, _ in dataset for n in np.ravel(x))


def test_a_pod_trains_as_one_machine(pod):
    strategy = tfamp.distribute.strategy()
    assert strategy is tf.distribute.get_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-4 * (1 + pod)), "mse")
    pipeline = tfamp.data.Pipeline.from_arrays((X, X[:, :1]))
    pipeline = pipeline.shard("auto").shuffle().batch(4)
    losses = model.fit(pipeline.build(), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("shard", [True, False], ids=["auto", "none"])
@pytest.mark.parametrize("source", ["arrays", "dataset"])
def test_a_pod_reads_all_of_its_data(pod, source, shard):
    data = (X, X)
    pipeline = (
        tfamp.data.Pipeline.from_arrays(data)
        if source == "arrays"
        else tfamp.data.Pipeline.from_dataset(tf.data.Dataset.from_tensor_slices(data))
    )
    pipeline = pipeline.shard("auto") if shard else pipeline
    pipeline = pipeline.shuffle().batch(4)
    assert numbers(pipeline.build()) == list(range(32))


def test_a_pod_is_the_one_that_writes(pod):
    cluster = tfamp.distribute.cluster()
    assert (cluster.num_workers, cluster.index) == (1, 0)
    assert cluster.to_tf_config() == {}
