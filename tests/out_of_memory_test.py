"""Which errors mean that memory could not be had."""

import pytest
import tensorflow as tf

from tfamp.machine.out_of_memory import is_out_of_memory


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
    "without a text": _of(tf.errors.ResourceExhaustedError, ""),
    "XLA": _of(
        tf.errors.InternalError, "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"
    ),
    "driver": _of(
        tf.errors.InternalError, "Failed to call cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"
    ),
    "library": _of(tf.errors.UnknownError, "CUDNN_STATUS_ALLOC_FAILED"),
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
    "memory format": _of(tf.errors.UnknownError, "unsupported memory format"),
    "oneDNN": _of(
        tf.errors.AbortedError,
        "Operation received an exception:Status: 2, message: could not create a "
        "memory object",
    ),
    "shape": _of(tf.errors.InvalidArgumentError, "out of memory is not what it is"),
    "value": ValueError("out of memory"),
}


@pytest.mark.parametrize("error", MEMORY.values(), ids=MEMORY)
def test_errors_of_memory_are_told(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS.values(), ids=OTHERS)
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)
