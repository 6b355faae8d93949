"""Lets the runs of a seed take turns, as far as memory allows."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from tfamp.records import checks

# What is free has to hold so many times the largest process that waits.
_ROOM = 1.5


class Player(Protocol):
    """What can take turns.

    Attributes:
        has_met: Whether it waits until all others have come as far.
    """

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

    Args:
        players: In the order they start.
        has_room: Whether another one may start beside those that wait.
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
