"""How a trial ended, told by its error, its exit status and its log."""

import errno
import re
import signal

import tensorflow as tf

from tfamp.machine.out_of_memory import is_out_of_memory
from tfamp.memory.batch_search.records import Outcome

# TensorFlow's allocator tells so of memory that it can do without.
_HARMLESS = "not a failure"
# A thread whose stack finds no room, as under `ulimit -v`.
_NO_STACK = re.compile(r"pthread_create(\(\))? failed")
_XLA = re.compile(r"\bxla|hlo|while trying to allocate", re.IGNORECASE)


def of_error(error: BaseException) -> Outcome | None:
    """Returns how a trial that raised this ended, None if not for want of memory.

    Args:
        error: What came out of building or training; its causes are looked at too.

    Example:
        >>> of_error(MemoryError())
        'MemoryError'
        >>> of_error(RuntimeError("XLA: out of memory while trying to allocate"))
        'XLA out of memory'
        >>> of_error(ValueError("shapes do not match")) is None
        True
    """
    seen: BaseException | None = error
    while seen is not None:
        found = _of_one(seen)
        if found is not None:
            return found
        seen = seen.__cause__
    return None


def _of_one(error: BaseException) -> Outcome | None:
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "MemoryError"
    if not is_out_of_memory(error):
        return None
    if isinstance(error, MemoryError):
        return "MemoryError"
    if _XLA.search(str(error)):
        return "XLA out of memory"
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return "ResourceExhaustedError"
    return "out of memory"


def of_status(status: int, log: str) -> Outcome | None:
    """Returns how a process without an answer ended, None if not for want of memory.

    The kernel kills by SIGKILL. C++ ends a process by SIGABRT or SIGSEGV for many
    reasons, so there the log has to speak of memory.

    Args:
        status: Of the process; below 0 if a signal ended it.
        log: What it printed last.

    Example:
        >>> of_status(-9, ""), of_status(-6, "what():  std::bad_alloc")
        ('killed', 'killed')
        >>> of_status(-11, "Segmentation fault") is None
        True
    """
    if status == -signal.SIGKILL:
        return "killed"
    lines = [line for line in log.splitlines() if _HARMLESS not in line]
    if any(_speaks_of_memory(line) or _NO_STACK.search(line) for line in lines):
        return "killed" if status < 0 else "out of memory"
    return None


def _speaks_of_memory(line: str) -> bool:
    return is_out_of_memory(RuntimeError(line))
