"""What the process of a run tells the one that started it, and waits for.

Runs of a seed take turns of about a second, so that what slows the machine down slows
all policies alike. A process that has had its turn says so and waits.
"""

import ctypes
import os
import signal
import sys
from typing import IO, Any

TURN, MEETING = "turn", "meet"
# Of Linux's prctl: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


class Line:
    """A run's way to tell how far it is and to wait for its turn.

    Args:
        descriptor: File descriptor to write to; None tells nothing.
        answers: Where the other side answers; the end of it ends this process.
        takes_turns: Whether to wait when asked to.
    """

    def __init__(
        self,
        descriptor: int | None = None,
        answers: IO[str] | None = None,
        *,
        takes_turns: bool = False,
    ) -> None:
        self._descriptor = descriptor
        self._answers: IO[str] = answers or sys.stdin
        self.takes_turns = takes_turns and descriptor is not None

    def tell(self, part: float) -> None:
        """Tells which part of the training is done, in [0, 1]."""
        self._write(f"{part:.4f}")

    def wait_for_turn(self) -> None:
        """Lets the others have theirs, and returns when it is this run's again.

        Raises:
            SystemExit: The process that started this one is gone.
        """
        if not self.takes_turns:
            return
        self._write(TURN)
        if not self._answers.readline():
            raise SystemExit("The comparison that this run belongs to has ended.")

    def wait_for_others(self) -> None:
        """Waits until the others have come as far, as for the timing of latencies.

        Raises:
            SystemExit: The process that started this one is gone.
        """
        if self.takes_turns:
            self._write(MEETING)
            self.wait_for_turn()

    def _write(self, word: str) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, f"{word}\n".encode())


def read(words: str, on_progress: Any) -> set[str]:
    """Passes parts on, and returns the other words: what the process waits for.

    Example:
        >>> sorted(read("0.25 0.50 meet turn", print))
        0.25
        0.5
        ['meet', 'turn']
    """
    found = set()
    for word in words.split():
        if word in (TURN, MEETING):
            found.add(word)
        else:
            on_progress(float(word))
    return found


def end_with_parent() -> None:
    """Ends this process with the one that started it, where it is stopped as well.

    A process that waits for its turn is stopped, so it cannot see its parent go. Other
    systems than Linux have no such request, and there nothing is stopped.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None, use_errno=True)
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
