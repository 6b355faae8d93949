"""Whether the hosts that train together can be reached."""

import socket
import threading
import time
from collections.abc import Sequence

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


def answers(addresses: Sequence[str], *, seconds: float = 3.0) -> dict[str, str]:
    """Returns for each "host:port", of the first 32, what came of a connection to it.

    A name server may keep a thread for minutes: those are left to themselves.
    """
    found = dict.fromkeys(addresses[:_MAX_ASKED], SILENT)

    def ask(address: str) -> None:
        found[address] = _ask(address, seconds)

    threads = [threading.Thread(target=ask, args=(a,), daemon=True) for a in found]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


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
