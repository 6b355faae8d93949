"""One worker of `tfamp.data.Service`: `python -m tfamp.data.service_worker`.

On another machine: `--host NAME --port 5000 --worker_port 5001`, and then
`tfamp.data.Service.at(["NAME:5000"])` where the model trains.

Imports nothing of the package: a worker that starts by path is up in the time that
TensorFlow takes to load.
"""

import os
import sys
import threading
import time
from collections.abc import Sequence

READY = "ready "
_PARENT_POLL_SECONDS = 1.0


def main(argv: Sequence[str]) -> int:
    """Serves until it is stopped, or until the process that started it is gone.

    Each worker brings its own dispatcher, so that it hands out its own share only,
    in order, and is alive or dead as a whole.

    Args:
        argv: The program's name and its flags.

    Returns:
        0, once the servers have ended.
    """
    from absl import flags

    values = flags.FlagValues()
    flags.DEFINE_string(
        "host", "localhost", "Name that clients reach it by.", flag_values=values
    )
    flags.DEFINE_integer(
        "port", 0, "Port that clients name; 0 for a free one.", flag_values=values
    )
    flags.DEFINE_integer(
        "worker_port", 0, "Port of the elements; 0 for a free one.", flag_values=values
    )
    flags.DEFINE_integer(
        "parent", 0, "Process to end with; 0 for none.", flag_values=values
    )
    values(list(argv))
    if values.parent:
        # Before TensorFlow loads, so that a parent may die meanwhile too.
        for wait in (_wait_for_end_of_input, _wait_for_new_parent):
            threading.Thread(target=wait, args=(values.parent,), daemon=True).start()

    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=values.port))
    port = dispatcher.target.rpartition(":")[2]
    worker = service.WorkerServer(
        service.WorkerConfig(
            dispatcher_address=f"localhost:{port}",
            worker_address=f"{values.host}:%port%",
            port=values.worker_port,
        )
    )
    print(f"{READY}{values.host}:{port}", flush=True)
    worker.join()
    return 0


def _wait_for_end_of_input(parent: int) -> None:
    """Ends this process when the pipe from its parent closes."""
    sys.stdin.buffer.read()
    os._exit(0)


def _wait_for_new_parent(parent: int) -> None:
    """Does so too where a copy of the parent holds the pipe open."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
