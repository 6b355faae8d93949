"""`serve`: models, limits and an address, from the start to the last answer.

`application` is the same without the process around it, for servers that bring theirs.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfamp.records import checks
from tfamp.serving.runtimes import load_exported
from tfamp.serving.runtimes.signature import LoadedModel

if TYPE_CHECKING:
    from tfamp.serving.server.app import App

_LOCAL = ("127.0.0.1", "::1", "localhost")
_IDLE_SECONDS = 75
# How long a client may take to read an answer.
_READING_SECONDS = 30.0
# New connections wait in the kernel, where there is room for so many; asyncio takes so
# many at a time, three times over before it has closed those that had to go.
_WAITING, _BACKLOG = 4096, 128
_MAX_CONNECTIONS, _OTHER_FILES = 1000, 48
_FULL = b'{"error": "All connections are in use. Try again, or ask another server."}'


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
    app = application(paths, token=token, **options)
    with _ending_at_sigterm(), _listening(host, port) as listener:
        name, number = listener.getsockname()[:2]
        address = f"http://{f'[{name}]' if ':' in name else name}:{number}"
        if token is None and host not in _LOCAL:
            logging.getLogger("tfamp.serve").warning(
                "Everybody who reaches %s may ask. Ask for a token with --token_file.",
                address,
            )
        # Looking through what stands for garbage would take milliseconds.
        gc.collect()
        gc.freeze()
        _server(app, max_connections, lambda: on_start(address)).run([listener])
    if any(model.is_stuck for model in app.models.values()):
        os._exit(1)  # Python would wait for the thread that never ends.


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
    from tfamp.serving.server.app import App
    from tfamp.serving.server.models import Limits, Served, named_folders

    limits = Limits(max_batch_size, max_queue, max_body, max_json, timeout_seconds)
    checks.positive("timeout_seconds", timeout_seconds)
    for name, value in zip(Limits._fields[:4], limits[:4], strict=True):
        if value is not None:
            checks.positive_int(name, value)
    read = load or functools.partial(load_exported, threads=threads)
    models = {
        name: Served(name, folder, read, limits)
        for name, folder in named_folders(paths).items()
    }
    return App(models, limits, token=token)


def _server(
    app: "App", max_connections: int | None, on_start: Callable[[], object]
) -> Any:
    """Returns uvicorn with a bound on connections, which it leaves to others.

    A client may open connections and send nothing, or a part of a head, and it need not
    read its answer; uvicorn waits for ever. Here they go where there are too many.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    backlog = max(1, min(_BACKLOG, files // 8))
    room = max(1, min(_MAX_CONNECTIONS, files - 3 * backlog - _OTHER_FILES))
    most = max_connections or room
    # A body and an answer may take so long each.
    seconds = 2 * app.limits.timeout_seconds

    class Connection(H11Protocol):
        since = 0.0  # when something was heard of it

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.since = time.monotonic()
            if len(self.connections) <= most:
                return
            idle = [each for each in self.connections if each.is_idle()]
            others = (each for each in idle if each is not self)
            oldest = min(others, key=lambda each: each.since, default=None)
            if oldest is not None:
                self.connections.discard(oldest)
                oldest.transport.abort()
                return
            head = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n"
            head += b"content-type: application/json\r\nconnection: close\r\n"
            transport.write(head + b"content-length: %d\r\n\r\n" % len(_FULL) + _FULL)
            self.connections.discard(self)
            # Closed at once, a request on its way would take the answer with it.
            transport.pause_reading()
            asyncio.get_running_loop().call_later(1, transport.close)

        def data_received(self, data: bytes) -> None:
            self.since = time.monotonic()
            super().data_received(data)

        def is_idle(self) -> bool:
            is_late = time.monotonic() - self.since > seconds + _READING_SECONDS
            return is_late or self.cycle is None or self.cycle.response_complete

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            for listening in sockets or ():
                listening.listen(_WAITING)  # asyncio has made it fewer
            on_start()

    return Server(
        uvicorn.Config(
            app,
            http=Connection,
            lifespan="off",
            ws="none",
            log_config=None,
            # A line for each malformed request would let clients fill the log.
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=backlog,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=int(seconds) + 1,
        )
    )


@contextlib.contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """Ends the block in order at SIGTERM as at Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, interrupt) if is_main else None
    try:
        yield
    except KeyboardInterrupt:  # uvicorn has ended, and raises its signal again.
        pass
    finally:
        gc.unfreeze()
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _token(path: Path) -> str:
    """Returns the token in a file."""
    why, token = "holds no token", ""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read ({error})"
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError(
            f"`token_file` {str(path)!r} {why}; expected a line of letters and "
            "digits. Write one with `openssl rand -hex 32`."
        )
    return token


def _listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        raise OSError(
            f"`port` {port} of `host` {host!r} cannot be had: {error}; expected a free "
            "one of this machine. Pass another, or 0 for any that is free."
        ) from error
