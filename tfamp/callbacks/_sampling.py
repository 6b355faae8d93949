"""A thread that takes samples while a model trains, and ends with it."""

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

# As long as a sample may take to end before the thread is left to itself.
_JOIN_SECONDS = 5.0


class Owner(Protocol):
    """What samples are taken for."""

    def sample(self) -> bool:
        """Takes a sample; False ends the thread."""
        ...


class Sampler:
    """Calls `sample` of an object now and then, beside everything else.

    The thread is a daemon and holds the object by a weak reference: it ends with the
    object and with the program.

    Args:
        owner: Has `sample`.
        interval_seconds: Between two samples.
        wait: Waits so many seconds or until stopped, and states whether it was.
    """

    def __init__(
        self,
        owner: Owner,
        interval_seconds: float,
        *,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(owner), self._stopped, interval_seconds, wait),
            name="tfamp-device-stats",
            daemon=True,
        )
        # At the end of the program too, before what is sampled goes away.
        weakref.finalize(owner, self.stop)

    def start(self) -> None:
        """Begins to take samples, the first one at once."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for its last sample; a second time does nothing."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    @property
    def is_running(self) -> bool:
        """Whether the thread takes samples."""
        return self._thread.is_alive()


def _run(
    owner: "weakref.ref[Any]",
    stopped: threading.Event,
    interval_seconds: float,
    wait: Callable[[threading.Event, float], bool],
) -> None:
    while not stopped.is_set():
        held = owner()
        if held is None or not held.sample():
            return
        del held  # or it would live as long as the thread
        if wait(stopped, interval_seconds):
            return
