"""Writes states to disk beside training, one at a time."""

import threading
import time
from collections.abc import Callable

from absl import logging

from tfamp.stepping.snapshots.slots import Slots
from tfamp.stepping.snapshots.state import State


class Background:
    """Saves states in a thread, so that training waits for no disk.

    The thread lives as long as a write does. A process that ends waits for it.

    Args:
        slots: Where to.
        clock: Gives seconds.

    Attributes:
        seconds: What the last write took, 0 before the first.
    """

    def __init__(
        self, slots: Slots, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds = 0.0
        self._slots, self._clock = slots, clock
        self._thread: threading.Thread | None = None
        self._state: State | None = None
        self._has_warned = False

    @property
    def is_busy(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def holds(self, state: State) -> bool:
        """Returns whether a state is being written, so that it must not change."""
        return self.is_busy and self._state is state

    def start(self, state: State) -> bool:
        """Begins to write a state.

        Args:
            state: It must not change until the write is over.

        Returns:
            False where the write before is still under way, and nothing was begun.
        """
        if self.is_busy:
            return False
        self._state = state
        self._thread = threading.Thread(target=self._write, args=(state,))
        self._thread.start()
        return True

    def finish(self) -> None:
        """Waits for the write that is under way, if there is one."""
        if self._thread is not None:
            self._thread.join()
        self._thread = self._state = None

    def _write(self, state: State) -> None:
        start = self._clock()
        try:
            self._slots.save(state)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logging.warning(
                    "A good snapshot could not be written to %r (%s). Training goes "
                    "on, and the next one is tried too. Free space there.",
                    str(self._slots.directory),
                    error,
                )
        self.seconds = self._clock() - start
