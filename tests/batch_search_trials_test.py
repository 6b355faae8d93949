"""`tfamp.find_batch_size` with real trials; a process for each takes some seconds."""

import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.replicas import two_replicas
from tfamp.memory.batch_search import find_batch_size
from tfamp.trials import processes, worker

pytest.importorskip("cloudpickle")
MIB = 2**20
X = np.random.default_rng(0).normal(size=(160, 16)).astype("float32")
Y = X[:, :1]
# Values that a layer of `wide` makes of one example: 128 MiB of float32.
WIDTH = 32 * MIB
# A process takes some 700 MiB before it trains and 200 for each example: 2300 for 8,
# 2700 for the next size that two replicas share. 0.9 of the limit lies between.
LIMIT = 2778 * MIB


def wide():
    """Takes much memory for the activations of an example, and little arithmetic."""
    inputs = keras.Input((16,))
    spread = keras.layers.UpSampling1D(WIDTH // 16)(
        keras.layers.Reshape((16, 1))(inputs)
    )
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.ReLU()(spread))
    model = keras.Model(inputs, keras.layers.Dense(1)(mean))
    model.compile("sgd", "mse")
    return model


def limited():
    """The same, with little room for addresses once it is built."""
    import resource

    model = wide()
    with open("/proc/self/status") as status:
        sizes = dict(line.split(":", 1) for line in status)
    now = 1024 * int(sizes["VmSize"].split()[0])
    most = now + 1536 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return model


def killed_above_16():
    """Is killed in the middle of a step, as by the kernel."""

    class Deadly(keras.layers.Layer):
        def call(self, inputs):
            def end(size):
                import os
                import signal

                if size > 16:
                    os.kill(os.getpid(), signal.SIGKILL)
                return size

            tf.py_function(end, [tf.shape(inputs)[0]], tf.int32)
            return inputs

    model = keras.Sequential([keras.Input((16,)), Deadly(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def of_batch_8():
    inputs = keras.Input(batch_shape=(8, 16))
    reshaped = keras.ops.reshape(inputs, (8, 4, 4))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(reshaped)))
    model.compile("sgd", "mse")
    return model


def not_compiled():
    return keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])


def replicated():
    with two_replicas().scope():
        return wide()


class Enough(Exception):
    pass


def first_trial(build_model, size, **options):
    """Returns the trial of one size, in a search that ends with it."""
    found = []

    def stop(trial):
        found.append(trial)
        raise Enough

    with pytest.raises(Enough):
        find_batch_size(
            build_model, (X, Y), start=size, verbose=False, on_trial=stop, **options
        )
    return found[0]


@pytest.mark.slow
def test_the_answer_fits_the_next_size_does_not_and_what_is_in_force_holds():
    before = keras.config.dtype_policy().name, tf.random.get_global_generator()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(20)
    limit = {"max_memory_bytes": LIMIT, "min_gain": None, "start": 7}
    with tfamp.scope("mixed_bfloat16", keep_float32="none"):
        found = find_batch_size(replicated, data, verbose=False, **limit)
    assert (found.stopped_by, found.replicas) == ("memory", 2)
    # Of 7 examples two replicas make 8; each trial is a process of its own.
    outcomes = [(trial.batch_size, trial.outcome) for trial in found.trials]
    assert outcomes == [(8, "fits"), (16, "over the limit")]
    assert found.batch_size == found.largest_that_fits == 8
    assert found.per_replica_batch_size == 4
    assert found.chosen.peak_bytes <= found.allowed_bytes == int(LIMIT * 0.9)
    assert (found.policy, found.data_batch_size) == ("mixed_bfloat16", 20)
    after = keras.config.dtype_policy().name, tf.random.get_global_generator()
    assert after == before
    assert not tf.distribute.has_strategy()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads proc and limits addresses")
def test_a_real_lack_of_memory_is_recognised(monkeypatch):
    # The allocator of oneDNN waits 10 s before it says so.
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    trial = first_trial(limited, 128)
    assert trial.outcome == "ResourceExhaustedError"
    assert "OOM when allocating tensor" in trial.detail


@pytest.mark.slow("batch_search_test kills a process that trains nothing")
def test_a_process_that_the_system_kills_did_not_fit():
    trial = first_trial(killed_above_16, 24)
    assert (trial.batch_size, trial.outcome) == (24, "killed")
    assert trial.began_training


@pytest.mark.parametrize(
    ("build_model", "message"),
    [
        (of_batch_8, "The trial of batch size 16 failed, and not for want of memory: "),
        (not_compiled, "; expected a compiled `keras.Model`. Call `model.compile`"),
    ],
)
def test_a_fault_of_the_users_is_raised(build_model, message, monkeypatch):
    def in_this_process(module, words, log, **how):
        log.touch()
        return worker.main(words)

    monkeypatch.setattr(processes, "run", in_this_process)
    monkeypatch.setattr(worker, "_watch", lambda *given: None)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        find_batch_size(build_model, (X, Y), start=16, verbose=False)
