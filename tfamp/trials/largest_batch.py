"""The largest batch whose training step fits, by trials in processes of their own."""

import json
import math
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tfamp.machine.out_of_memory import is_out_of_memory
from tfamp.trials import processes

# The answer lies within this part below the largest that fits.
_PRECISION = 1 / 8
_MAX_BATCH = 2**20
_TIMEOUT_SECONDS = 600
MODULE = "tfamp.trials.run.batch_trial"


def largest(fits: Callable[[int], bool], start: int) -> int | None:
    """Returns about the largest batch size that fits, and never one that was not tried.

    It doubles, or halves, until sizes on both sides of the limit are known, and then
    narrows them down to multiples of 8.

    Args:
        fits: Tries a size.
        start: The size to begin with.

    Returns:
        None where not even one example fits.

    Example:
        >>> largest(lambda size: size <= 1000, 64)
        960
        >>> largest(lambda size: size <= 30, 64), largest(lambda size: False, 64)
        (30, None)
    """
    good, bad = 0, 0
    size = start
    while not good or not bad:
        if fits(size):
            good = size
            size *= 2
            if size > _MAX_BATCH:
                return good
        else:
            bad = size
            size //= 2
            if size < 1:
                return None
    return narrowed(fits, good, bad)


def narrowed(
    fits: Callable[[int], bool], good: int, bad: int, *, multiple: int = 1
) -> int:
    """Returns about the largest size that fits, between one that does and one not.

    Args:
        fits: Tries a size.
        good: A size that fits.
        bad: A larger one that does not.
        multiple: What sizes are multiples of.

    Example:
        >>> narrowed(lambda size: size <= 1000, 512, 1024)
        960
        >>> narrowed(lambda size: size <= 1000, 510, 1020, multiple=3)
        936
    """
    while bad - good > max(multiple, _PRECISION * good):
        middle = (good + bad) // 2
        # Tensor cores and vector units like multiples of 8.
        for unit in (math.lcm(8, multiple), multiple):
            rounded = middle - middle % unit
            if rounded > good:
                break
        else:
            return good
        if fits(rounded):
            good = rounded
        else:
            bad = rounded
    return good


def trial(folder: Path, policy: str, seed: int, batch_size: int) -> bool:
    """Whether a training step with a batch of this size fits, in a fresh process.

    A process that the system kills, whose log ends with want of memory, or that takes
    longer than ten minutes is one where it did not fit; what it printed goes to a log.

    Raises:
        RuntimeError: The process ended for another reason, which says nothing of
            memory.
    """
    log = folder / f"batch_{batch_size}.log"
    arguments = [str(folder), policy, str(seed), str(batch_size)]
    answer = folder / "batch.json"
    answer.unlink(missing_ok=True)
    is_late = False
    with open(log, "wb") as output:
        process = subprocess.Popen(
            processes.command(MODULE, arguments),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=processes.environment(),
            start_new_session=True,
        )
        try:
            process.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            is_late = True
            output.write(b"It was ended, as it took too long.\n")
        finally:
            process.kill()
            status = process.wait()
    if answer.is_file():
        found = json.loads(answer.read_text())
        log.unlink()
        return bool(found["fits"])
    if is_late or status == -signal.SIGKILL:
        return False
    end = processes.tail(log)
    if is_out_of_memory(RuntimeError(end)):
        return False
    raise RuntimeError(
        f"A training step with a batch of {batch_size} failed, and not for want of "
        f"memory: {processes.why_ended(status)}. Expected it to train; mend what its "
        f"log ends with:\n{end}"
    )
