"""`serve`: models, limits and an address, from the start to the last answer.

`application` is the same without the process around it, for servers that bring theirs.
"""

import functools
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfamp.records import checks
from tfamp.serving.runtimes.signature import LoadedModel

if TYPE_CHECKING:
    from tfamp.serving.server.app import App

_LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(
    paths: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: str | None = None,
    max_connections: int | None = None,
    on_start: Callable[[str], object] = lambda address: None,
    **options: Any,
) -> None:
    """Serves exported models over HTTP until SIGTERM or SIGINT.

    Args:
        paths: Exported folders, or folders of several; "name=path" names one.
        host: Address to listen at; other machines reach "0.0.0.0".
        port: Port to listen at; 0 takes a free one.
        token_file: File with what requests have to bear as a token; None asks for none.
        max_connections: Connections at a time; a new one takes the place of the one
            that was idle for longest. None takes 1,000, or what the process may open.
        on_start: Called with the address when it can be asked.
        **options: As for `application`.

    Raises:
        OSError: The address is in use.
        ValueError: An argument is out of its range.
    """
    if not 0 <= port < 2**16:
        raise ValueError(
            f"`port` is {port}; expected 0 to 65535. Pass 0 for a free one."
        )
    if max_connections is not None:
        checks.positive_int("max_connections", max_connections)
    token = None if token_file is None else _token(Path(token_file))
    logging.basicConfig(format="tfamp serve: %(message)s")
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if is_main else None
    try:
        with _bound(host, port) as listener:
            name, number = listener.getsockname()[:2]
            address = f"http://{f'[{name}]' if ':' in name else name}:{number}"
            app = application(paths, token=token, **options)
            if token is None and host not in _LOCAL:
                logging.getLogger("tfamp.serve").warning(
                    "Everybody who reaches %s may ask. Ask for a token with "
                    "--token_file.",
                    address,
                )
            from tfamp.serving.server.process import Process

            # Looking through what stands for garbage would take milliseconds.
            gc.collect()
            gc.freeze()
            Process(app, max_connections, on_start=lambda: on_start(address)).run(
                sockets=[listener]
            )
    except KeyboardInterrupt:  # uvicorn has ended, and raises its signal again.
        pass
    finally:
        gc.unfreeze()
        if is_main:
            signal.signal(signal.SIGTERM, before)


def application(
    paths: Sequence[str],
    *,
    threads: int | None = None,
    token: str | None = None,
    load: Callable[..., LoadedModel] | None = None,
    max_batch_size: int | None = None,
    max_queue: int = 256,
    max_body: int = 64 * 2**20,
    max_json: int = 4 * 2**20,
    timeout_seconds: float = 10.0,
) -> "App":
    """Returns exported models as an ASGI application, for a process that is not ours.

    Ray Serve, gunicorn and others run it; `serve` has its own process, which bounds
    connections, too.

    Args:
        paths: Exported folders, or folders of several; "name=path" names one.
        threads: Threads that a run of a model may use; None takes all cores.
        token: What requests have to bear; None asks for none.
        load: Reads an exported folder in the place of `tfamp.load_exported`.
        max_batch_size: Examples in one run of a model; None takes 64 where the answer
            to one does not depend on the others of a batch, else 1.
        max_queue: Requests of a model that may wait; more are answered by 503.
        max_body: Bytes of the largest request.
        max_json: Bytes of the largest JSON; tensors may come as bytes behind it.
        timeout_seconds: How long an answer, and a body on its way, may take.

    Raises:
        FileNotFoundError: A path holds no exported model.
        ImportError: A package of tfamp[serve] is not installed.
        RuntimeError: A model cannot be loaded.
        ValueError: An argument is out of its range, or a name came twice.
    """
    for package in ("starlette", "uvicorn", "orjson", "prometheus_client"):
        checks.require(package, extra="serve", purpose="`tfamp serve`")
    from tfamp.serving.runtimes import load_exported
    from tfamp.serving.server.app import App
    from tfamp.serving.server.models import Limits, Served, named_folders

    limits = Limits(max_batch_size, max_queue, max_body, max_json, timeout_seconds)
    read = load or functools.partial(load_exported, threads=threads)
    models = {
        name: Served(name, folder, read, limits)
        for name, folder in named_folders(paths).items()
    }
    return App(models, limits, token=token)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _token(path: Path) -> str:
    """Returns the token in a file."""
    why = "holds no token"
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        token, why = "", f"cannot be read ({error})"
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError(
            f"`token_file` {str(path)!r} {why}; expected a line of letters and "
            "digits. Write one with `openssl rand -hex 32`."
        )
    return token


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket at an address, which nobody reaches before it listens."""
    try:
        kinds = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"`host` is {host!r}, which is no address of this machine ({error}); "
            "expected one such as '127.0.0.1', '::1' or '0.0.0.0'. Correct it."
        ) from error
    family, kind, protocol, _, where = kinds[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(where)
    except OSError as error:
        found.close()
        raise OSError(
            f"Port {port} of {host!r} cannot be had: {error.strerror}. Pass another "
            "`port`, or 0 for a free one."
        ) from error
    return found
