"""Which errors mean that memory could not be had, and what explains them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.machine.limits import GpuReading, MachineMemory, MemoryLimit
from tfamp.machine.out_of_memory import (
    explain,
    is_out_of_memory,
)

MIB, GIB = 2**20, 2**30
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


class _FromNumPy(MemoryError):
    """As NumPy's own, a subclass of Python's."""


def _of(cls, text):
    return cls(None, None, text)


MEMORY = {
    "Python": MemoryError(),
    "subclass": _FromNumPy("Unable to allocate 8.00 GiB for an array"),
    "allocator": _of(
        tf.errors.ResourceExhaustedError,
        "OOM when allocating tensor with shape[512,3] and type float on CPU:0",
    ),
    "XLA": _of(
        tf.errors.InternalError, "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"
    ),
    "driver": _of(
        tf.errors.InternalError, "Failed to call cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"
    ),
    "oneDNN": _of(
        tf.errors.AbortedError,
        "Operation received an exception:Status: 1, message: could not create a "
        "primitive",
    ),
    "allocation": _of(tf.errors.InternalError, "Failed to allocate 1024 bytes"),
    "RuntimeError": RuntimeError("std::bad_alloc"),
}
OTHERS = {
    "disk": _of(tf.errors.ResourceExhaustedError, "cache/x; No space left on device"),
    "network": _of(
        tf.errors.ResourceExhaustedError, "Received message larger than max (5 vs. 4)"
    ),
    "illegal access": _of(
        tf.errors.InternalError, "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"
    ),
    "oneDNN": _of(
        tf.errors.AbortedError,
        "Operation received an exception:Status: 2, message: could not create a "
        "memory object",
    ),
    "value": ValueError("out of memory"),
}


@pytest.mark.parametrize("error", MEMORY.values(), ids=MEMORY)
def test_errors_of_memory_are_told(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS.values(), ids=OTHERS)
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)


# As TensorFlow 2.21 raised it in `fit`, its stack of calls left out.
GRAPH = (
    "Graph execution error:\n\nDetected at node outer_1/inner_1/up_1/Repeat/Tile "
    "defined at (most recent call last):\nOOM when allocating tensor with shape"
    "[8,4096,1024,64] and type float on /job:localhost/replica:0/task:0/device:GPU:1 "
    "by allocator GPU_1_bfc\n\t [[{{node gradient_tape/outer_1/inner_1/up_1/Tile}}]]"
    "\nHint: ... [Op:__inference_multi_step_on_iterator_1104]"
)


def on_gpu():
    """GPU:1 of 16 GiB, which is full."""
    full = {"memory_used_bytes": 16 * GIB, "memory_total_bytes": 16 * GIB}
    return MachineMemory(
        (MemoryLimit(GIB, "cgroup v2", 0),), (GpuReading(1, "T4", **full),)
    )


def test_an_error_in_training_on_a_gpu_is_told_in_full():
    text = explain(
        GRAPH,
        held={"weights": 256 * MIB, "optimizer slots": 512 * MIB},
        memory=on_gpu(),
        largest_batch=lambda limit: limit // GIB - 3,
        computes_in="float32",
        environ={},
    )
    assert text.splitlines() == [
        "The model holds 768 MiB (weights 256 MiB and optimizer slots 512 MiB); the "
        "rest grows with the batch.",
        "What to do, in this order:",
        "1. A smaller batch: by its operations the largest step that fits is of about "
        "13; `tfamp.find_batch_size` tries it.",
        "2. The same update from smaller batches: `tfamp.find_batch_size(..., "
        "target_batch_size=...)` says how many to accumulate.",
        "3. Activations computed again in the backward pass: `tfamp.remat(model)`.",
        "4. Activations of half the size: `tfamp.apply(model, 'mixed_bfloat16')`, or "
        "what `tfamp doctor` recommends here.",
        "5. Set TF_GPU_ALLOCATOR=cuda_malloc_async before TensorFlow starts, which "
        "lessens fragmentation.",
        "6. End other processes on the GPU, which `nvidia-smi` lists, or set "
        "TF_FORCE_GPU_ALLOW_GROWTH=true for all that share it.",
    ]


def run_out(num):
    """Fails as an allocation does, without the ten seconds oneDNN waits for memory."""
    raise MemoryError(
        f"OOM when allocating tensor with shape[4194304,1048576,{num}] and type float "
        "on /job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu"
    )


class Exhausts(keras.layers.Layer):
    """Asks for more memory than any machine has, in training or always."""

    def __init__(self, always=True, **kwargs):
        super().__init__(**kwargs)
        self.always = always

    def call(self, x, training=False):
        if self.always or training:
            found = tf.numpy_function(run_out, [tf.shape(x)[0]], tf.float32)
            x = x + tf.cast(tf.ensure_shape(found, []), x.dtype)
        return x


def model_of(layer):
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def runs(model):
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    return {
        "fit": lambda: model.fit(x, y, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
    }


def notes_of(run):
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        run()
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("name", ["fit", "evaluate", "predict"])
def test_a_managed_models_error_keeps_its_type_and_gets_a_note(name, policy):
    with tfamp.scope(policy):
        model = model_of(Exhausts(name="hungry"))
    (note,) = notes_of(runs(model)[name])
    # A kernel of 4 and a bias of 1, in float32.
    assert "weights 20 bytes" in note
    assert ("optimizer slots" in note) == (name == "fit")
    assert ("target_batch_size" in note) == (name == "fit")
    assert ("mixed_bfloat16" in note) == (policy == "float32")


def test_plain_models_and_other_errors_are_let_be():
    with tfamp.scope("float32"):
        managed = model_of(keras.layers.Dense(4))
    plain = model_of(Exhausts())
    assert notes_of(runs(plain)["fit"]) == []
    with pytest.raises(ValueError) as caught:
        managed.fit(np.ones((8, 3), "float32"), np.ones((8, 1)), verbose=0)
    assert not hasattr(caught.value, "__notes__")
