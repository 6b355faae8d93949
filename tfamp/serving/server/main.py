"""`serve`: models, limits and an address, from the start to the last answer.

`application` is the same without the process around it, for servers that bring theirs.
"""

import contextlib
import functools
import gc
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfamp.records import checks
from tfamp.records.checks import short_error
from tfamp.serving.runtimes import load_exported
from tfamp.serving.runtimes.signature import LoadedModel

if TYPE_CHECKING:
    from tfamp.serving.server.app import App

log = logging.getLogger("tfamp.serve")
_LOCAL = ("127.0.0.1", "::1", "localhost")
_IDLE_SECONDS = 75
_READING_SECONDS = 30.0  # that a client may take to read an answer
# New connections wait in the kernel; asyncio takes so many at a time, three times over
# before it has closed those that had to go.
_WAITING, _BACKLOG = 4096, 128
_MAX_CONNECTIONS, _OTHER_FILES = 1000, 48


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
        paths: As for `application`.
        host: Address to listen at; other machines reach "0.0.0.0".
        port: Port to listen at; 0 takes a free one.
        token_file: File with what requests have to bear; None asks for none.
        max_connections: At a time, of which the one that was idle for longest gives
            way. None takes 1,000, or what the process may open.
        on_start: Called with the address when it can be asked.
        **options: As for `application`.
    """
    if max_connections is not None:
        checks.positive_int("max_connections", max_connections)
    if not 0 <= port < 2**16:
        raise ValueError(f"`port` is {port}; expected 0 to 65535. 0 takes a free one.")
    token, source = None, Path(token_file or "")
    if token_file is not None:
        token = source.read_text(encoding="utf-8").strip() if source.is_file() else ""
        if not token or not token.isascii() or not token.isprintable():
            told = f"`token_file` {token_file!r} holds no token; expected letters and"
            raise ValueError(f"{told} digits, as of `openssl rand -hex 32`.")
    logging.basicConfig(format="tfamp serve: %(message)s")
    app = application(paths, token=token, **options)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        # asyncio sets it where a socket says TCP, which this one leaves to the system:
        # the body of an answer would wait for the client to acknowledge the head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, UnicodeError) as error:
        told = f"`port` {port} of `host` {host!r} cannot be had: {error}. Pass another."
        raise OSError(told) from error
    name, number = listener.getsockname()[:2]
    address = f"http://{f'[{name}]' if ':' in name else name}:{number}"
    if token is None and host not in _LOCAL:
        text = "Everybody who reaches %s may ask. Ask for a token with --token_file."
        log.warning(text, address)
    gc.freeze()  # looking through what stands for garbage would take milliseconds
    if threading.current_thread() is threading.main_thread():
        # Once it has ended, uvicorn raises the signals that it got again.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with listener, contextlib.suppress(KeyboardInterrupt):
        _server(app, max_connections, lambda: on_start(address)).run([listener])


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

    Args:
        paths: Exported folders, or folders of several; "name=path" names one.
        threads: Threads that a run of a model may use; None takes all cores.
        token: What requests have to bear; None asks for none.
        load: Reads an exported folder in the place of `tfamp.load_exported`.
        max_batch_size: Examples in a run; None takes 64, or 1 where answers depend on
            the others of a batch.
        max_queue: Requests of a model that may wait; more are answered by 503.
        max_body: Bytes of the largest request.
        max_json: Bytes of the largest JSON; tensors may come as bytes behind it.
        timeout_seconds: How long an answer, and a body on its way, may take.
    """
    for package in ("starlette", "uvicorn", "orjson", "prometheus_client"):
        checks.require(package, extra="serve", purpose="`tfamp serve`")
    from tfamp.serving.server.app import App
    from tfamp.serving.server.models import Served, named_folders

    seconds = checks.positive("timeout_seconds", timeout_seconds)
    queue: dict[str, Any] = {"max_batch_size": max_batch_size, "max_queue": max_queue}
    sizes: dict[str, Any] = {"max_body": max_body, "max_json": max_json}
    for name, value in {**queue, **sizes}.items():
        if value is not None:
            checks.positive_int(name, value)
    read = load or functools.partial(load_exported, threads=threads)
    models = {}
    for name, folder in named_folders(paths).items():
        try:
            model = read(folder)
            models[name] = Served(name, model, timeout_seconds=seconds, **queue)
        except Exception as error:
            told = f"Model {name!r} in {str(folder)!r} cannot be loaded: "
            raise RuntimeError(told + short_error(error)) from error
    return App(models, token=token, timeout_seconds=seconds, **sizes)


def _server(
    app: "App", max_connections: int | None, on_start: Callable[[], object]
) -> Any:
    """Returns uvicorn, in which idle connections go where there are too many.

    A client may open connections and send nothing, a part of a head, or not read its
    answer. Where none is idle uvicorn answers 503.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    backlog = max(1, min(_BACKLOG, files // 8))
    room = min(_MAX_CONNECTIONS, files - 3 * backlog - _OTHER_FILES)
    most = max_connections or max(1, room)
    seconds = 2 * app.timeout_seconds  # a body and an answer may take so long each

    class Connection(H11Protocol):
        since = 0.0  # when something was heard of it

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.since = time.monotonic()
            idle = [x for x in self.connections if x is not self and x.is_idle()]
            if len(self.connections) > most and idle:
                oldest = min(idle, key=lambda each: each.since)
                self.connections.discard(oldest)
                oldest.transport.abort()

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
            limit_concurrency=most + 1,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=int(seconds) + 1,
        )
    )
