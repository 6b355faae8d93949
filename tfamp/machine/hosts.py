"""Whether the hosts that train together can be reached."""

import queue
import socket
import threading
import time
from collections.abc import Sequence

_SECONDS = 3.0
_MAX_ASKED = 32
LISTENS = "listens"
REFUSED = "host answers, nothing listens yet"
UNKNOWN = "unknown host"
SILENT = "no answer"
# Before training starts nothing listens, which is as it should be.
REMEDIES = {
    UNKNOWN: "Correct the name, or wait until the worker's host is up.",
    SILENT: "Open the port between the hosts; a firewall drops what comes to it.",
}


def answers(addresses: Sequence[str], *, seconds: float = _SECONDS) -> dict[str, str]:
    """Returns for each "host:port" what came of a connection to it; it never hangs.

    A name server may keep a thread for minutes, so threads are left to themselves when
    the time is over. Of a large cluster, the first are asked.
    """
    asked = list(addresses[:_MAX_ASKED])
    found: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def ask(address: str) -> None:
        found.put((address, _ask(address, seconds)))

    for address in asked:
        threading.Thread(target=ask, args=(address,), daemon=True).start()
    result = dict.fromkeys(asked, SILENT)
    deadline = time.monotonic() + seconds
    for _ in asked:
        try:
            address, came = found.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        result[address] = came
    return result


def _ask(address: str, seconds: float) -> str:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except socket.gaierror:
        return UNKNOWN
    except ConnectionRefusedError:
        return REFUSED
    except OSError:
        return SILENT
    return LISTENS
