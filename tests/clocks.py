"""Clocks that tests hand in for the real one."""


class Ticks:
    """A clock that goes on a little whenever it is read."""

    def __init__(self, tick: float = 1.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now
