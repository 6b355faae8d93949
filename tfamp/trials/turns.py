"""Turns of the runs of a seed: who goes on, and what processes tell and wait for.

Turns last about a second, so that what slows the machine down slows all policies alike.
A process that has had its turn says so and waits.
"""

import collections
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, Protocol, TypeVar

from tfamp.records import checks

TURN, MEETING = "turn", "meet"
# Of Linux's prctl: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
# What is free has to hold so many times the largest process that waits.
_ROOM = 1.5


class Line:
    """A run's way to tell how far it is and to wait for its turn.

    It writes to a file descriptor, None for nothing; where `answers` end, so does this
    process.
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
    """Passes parts on, and returns the other words: what the process waits for."""
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


class Player(Protocol):
    """What can take turns; it `has_met` while it waits until all others come as far."""

    has_met: bool

    def go_on(self) -> bool:
        """Goes on until its turn is over (True) or it has ended (False)."""

    def end(self) -> None:
        """Ends it before its time."""


PlayerType = TypeVar("PlayerType", bound=Player)


def in_turns(
    players: Iterable[PlayerType],
    *,
    has_room: Callable[[Sequence[PlayerType]], bool],
) -> Iterator[PlayerType]:
    """Yields players as they end; those that wait go on in a circle.

    The next player starts as soon as those before it wait and there is room for it;
    where there is none, it starts when they have ended. Who waits for the others stands
    back until all of those that have begun do.
    """
    pending = collections.deque(players)
    waiting: collections.deque[PlayerType] = collections.deque()
    try:
        while pending or waiting:
            can_start = pending and (not waiting or has_room(waiting))
            player = pending.popleft() if can_start else _next(waiting)
            waiting.append(player)  # so that it is ended if it is interrupted
            if not player.go_on():
                waiting.remove(player)
                yield player
    finally:
        for player in waiting:
            player.end()


def _next(waiting: collections.deque[PlayerType]) -> PlayerType:
    """Returns the player that has waited longest and does not wait for others."""
    if all(player.has_met for player in waiting):
        for player in waiting:
            player.has_met = False
    while waiting[0].has_met:
        waiting.rotate(-1)
    return waiting.popleft()


def memory_has_room(pids: Sequence[int | None]) -> bool:
    """Whether memory has room for one more process like those of these numbers."""
    psutil = checks.require("psutil", extra="report", purpose="`tfamp.compare`")
    sizes = [0]
    for pid in pids:
        try:
            sizes.append(psutil.Process(pid).memory_info().rss)
        except psutil.Error:
            continue  # it has just ended
    free = psutil.virtual_memory().available
    return bool(free >= _ROOM * max(sizes))
