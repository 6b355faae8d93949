"""`tfamp.find_batch_size` with real processes, each of which takes some seconds."""

import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.batch_search import find_batch_size

pytest.importorskip("cloudpickle")
pytestmark = pytest.mark.slow
MIB = 2**20
X = np.random.default_rng(0).normal(size=(6000, 16)).astype("float32")
Y = X[:, :1]
# Values that a layer of `wide` makes of one example: 32 MiB of float32.
WIDTH = 8 * MIB


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
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


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


def test_the_answer_is_confirmed_and_the_next_size_fails():
    limit = {"max_memory_bytes": 1225 * MIB}
    found = find_batch_size(
        wide, (X, Y), start=8, min_gain=None, verbose=False, **limit
    )
    assert found.stopped_by == "memory"
    assert found.batch_size == found.largest_that_fits
    assert found.chosen.peak_bytes <= found.allowed_bytes == int(1225 * MIB * 0.9)
    failed = min(trial.batch_size for trial in found.trials if not trial.fits)
    assert (
        found.batch_size < failed <= max(1.125 * found.batch_size, found.batch_size + 8)
    )
    # Fresh processes, which know nothing of the search.
    assert first_trial(wide, found.batch_size, **limit).outcome == "fits"
    assert first_trial(wide, failed, **limit).outcome == "over the limit"


@pytest.mark.skipif(sys.platform != "linux", reason="reads proc and limits addresses")
def test_a_real_lack_of_memory_is_recognised():
    trial = first_trial(limited, 128)
    assert trial.outcome == "ResourceExhaustedError"
    assert "OOM when allocating tensor" in trial.detail


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
def test_a_fault_of_the_users_is_raised(build_model, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        find_batch_size(build_model, (X, Y), start=16, verbose=False)


def test_replicas_share_a_batch_and_what_is_in_force_holds():
    before = keras.config.dtype_policy().name, tf.random.get_global_generator()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(20)
    with tfamp.scope("mixed_bfloat16", keep_float32="none"):
        found = find_batch_size(
            replicated, data, start=21, target_batch_size=22, verbose=False
        )
    assert found.replicas == 2
    assert [trial.batch_size for trial in found.trials] == [22]
    assert (found.batch_size, found.per_replica_batch_size) == (22, 11)
    assert (found.policy, found.data_batch_size) == ("mixed_bfloat16", 20)
    after = keras.config.dtype_policy().name, tf.random.get_global_generator()
    assert after == before
    assert not tf.distribute.has_strategy()
