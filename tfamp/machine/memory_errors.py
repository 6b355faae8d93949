"""Tells errors that mean "out of memory" from all others, without TensorFlow."""

# Names of error classes that mean it by themselves, whoever raises them.
_EXHAUSTED = frozenset({"ResourceExhaustedError"})
# Those that may mean it; their text decides. Under XLA, in oneDNN and in the libraries
# of a GPU a failed allocation comes as one of these.
_PERHAPS = frozenset(
    {"InternalError", "UnknownError", "AbortedError", "XlaRuntimeError", "RuntimeError"}
)
_SIGNS = (
    "out of memory",
    "out_of_memory",
    "resource_exhausted",
    "resourceexhausted",
    "failed to allocate",
    "alloc_failed",
    "oom when allocating",
    "bad_alloc",
    "memoryerror",
    # What oneDNN calls `dnnl_out_of_memory`.
    "exception:status: 1,",
)
# Something else that is exhausted: a disk, a message of the network, open files.
_OTHER_RESOURCES = (
    "no space left",
    "disk quota",
    "too many open files",
    "message larger than max",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory could not be had.

    It is judged by the names of the error's classes and by its text, so that it can be
    asked where TensorFlow is not loaded, and of what other libraries raise.

    Args:
        error: What was caught.

    Example:
        >>> is_out_of_memory(MemoryError())
        True
        >>> is_out_of_memory(RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"))
        True
        >>> is_out_of_memory(RuntimeError("an illegal memory access was encountered"))
        False
    """
    if isinstance(error, MemoryError):
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error).lower()
    if names & _EXHAUSTED:
        return not any(other in text for other in _OTHER_RESOURCES)
    return bool(names & _PERHAPS) and any(sign in text for sign in _SIGNS)
