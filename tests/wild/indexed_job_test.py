"""Pods of an indexed Kubernetes job that are no cluster: each is one machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

ROOT = Path(__file__).parents[2]
X = np.arange(32, dtype="float32").reshape(16, 2)
OTHERS = ("TF_CONFIG", "SM_HOSTS", "SM_CURRENT_HOST", "SLURM_JOB_ID", "TFAMP_HOSTS")


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
    assert (cluster.num_workers, cluster.is_chief) == (1, True)
    assert cluster.to_tf_config() == {}


def test_the_log_says_how_pods_would_train_together(pod, caplog):
    with caplog.at_level("INFO", logger="absl"):
        tfamp.distribute.strategy()
        told = [each for each in caplog.messages if "TFAMP_HOSTS" in each]
        assert len(told) == 1
        assert f"JOB_COMPLETION_INDEX is '{pod}'" in told[0]
        tfamp.distribute.strategy(cluster=None)  # needs no advice
        assert sum("TFAMP_HOSTS" in each for each in caplog.messages) == 1


def test_pods_whose_hosts_are_named_are_a_cluster(pod, monkeypatch):
    monkeypatch.setenv("TFAMP_HOSTS", "train-[0-3].train")
    cluster = tfamp.distribute.cluster()
    assert (cluster.num_workers, cluster.index) == (4, pod)
    pipeline = tfamp.data.Pipeline.from_arrays((X, X)).shard("auto")
    assert f"part {pod} of 4" in pipeline.describe()


def test_a_pod_that_lacks_its_index_is_told_so(monkeypatch):
    for name in OTHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    monkeypatch.setenv("TFAMP_HOSTS", "train-[0-3].train")
    with pytest.raises(ValueError, match="JOB_COMPLETION_INDEX is not set"):
        tfamp.distribute.strategy()


def test_doctor_advises_and_finds_no_error():
    environ = {k: v for k, v in os.environ.items() if k not in OTHERS}
    done = subprocess.run(
        [sys.executable, "-m", "tfamp", "doctor", "--json=-"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environ, "JOB_COMPLETION_INDEX": "3"},
    )
    assert done.returncode == 0, done.stderr
    (told,) = [f for f in json.loads(done.stdout)["findings"] if "JOB_" in str(f)]
    assert told["message"].startswith("JOB_COMPLETION_INDEX is '3'")
    assert "TFAMP_HOSTS" in told["remedy"]
