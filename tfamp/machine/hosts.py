"""Whether the hosts that train together can be reached."""

import concurrent.futures
import socket
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
    """Returns for each "host:port", of the first 32, what came of a connection."""
    asked = list(addresses[:_MAX_ASKED])
    with concurrent.futures.ThreadPoolExecutor(len(asked) or 1) as threads:
        found = threads.map(lambda address: _ask(address, seconds), asked)
        return dict(zip(asked, found, strict=True))


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
