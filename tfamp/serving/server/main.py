"""`serve`: models, limits and an address, from the start to the last answer.

`application` is the same without the process around it, for servers that bring theirs.
"""

import contextlib
import dataclasses
import functools
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfamp.records import checks
from tfamp.records.record import TableRecord
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.serving.server.models import Limits, Models, named_places

if TYPE_CHECKING:
    from tfamp.serving.server.app import App

_LOCAL = ("127.0.0.1", "::1", "localhost")


@dataclasses.dataclass(frozen=True)
class Served(TableRecord):
    """What a server did from its start to its end.

    Args:
        address: Where it was asked, such as "http://127.0.0.1:8000".
        models: The names of its models.
        seconds: How long it served.
        answers: Protocol and status, such as "v2 200" -> number of answers.
    """

    address: str
    models: tuple[str, ...]
    seconds: float
    answers: dict[str, int]

    def table(self) -> str:
        """Returns a line."""
        counts = ", ".join(f"{n:,} of {what}" for what, n in self.answers.items())
        return f"Served {self.seconds:,.0f} s: {counts or 'no requests'}."


def serve(
    paths: Sequence[str],
    *,
    threads: int | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: str | None = None,
    max_batch_size: int | None = None,
    max_queue: int = 256,
    max_body: int = 64 * 2**20,
    timeout_seconds: float = 10.0,
    reload_seconds: float = 2.0,
    load: Callable[..., LoadedModel] | None = None,
    on_start: Callable[[str], None] | None = None,
) -> Served:
    """Serves exported models over HTTP until SIGTERM or SIGINT.

    Args:
        paths: Exported folders, or folders of numbered versions; "name=path" names one.
        threads: Threads that a run of a model may use; None takes all cores.
        host: Address to listen at; other machines reach "0.0.0.0".
        port: Port to listen at; 0 takes a free one.
        token_file: File with what requests have to bear as a token; None asks for none.
        max_batch_size: Examples in one run of a model; None takes 64 where the answer
            to one does not depend on the others of a batch, else 1.
        max_queue: Requests of a model that may wait; more are answered by 503.
        max_body: Bytes of the largest request.
        timeout_seconds: How long an answer, and a body on its way, may take.
        reload_seconds: How often to look for changed, new and removed versions; 0 never
            does.
        load: Reads an exported folder in the place of `tfamp.load_exported`.
        on_start: Called with the address when it can be asked.

    Returns:
        What was answered.

    Raises:
        FileNotFoundError: A path holds no exported model.
        ImportError: uvicorn or orjson is not installed.
        OSError: The address is in use.
        ValueError: An argument is out of its range, or a name came twice.
    """
    checks.require("uvicorn", extra="serve", purpose="`tfamp serve`")
    if not 0 <= port < 2**16:
        raise ValueError(
            f"`port` is {port}; expected 0 to 65535. Pass 0 for a free one."
        )
    if reload_seconds:
        checks.positive("reload_seconds", reload_seconds)
    token = None if token_file is None else _token(Path(token_file))
    limits = Limits(max_batch_size, max_queue, timeout_seconds, max_body)
    app = _unloaded(paths, limits, threads=threads, token=token, load=load)
    from tfamp.serving.server.process import Process

    logging.basicConfig(format="tfamp serve: %(message)s")
    listener = _bound(host, port)
    address = _address(listener)
    if token is None and host not in _LOCAL:
        logging.getLogger("tfamp.serve").warning(
            "Everybody who reaches %s may ask. Ask for a token with --token_file.",
            address,
        )
    server = Process(
        app,
        on_start=lambda: on_start and on_start(address),
        reload_seconds=reload_seconds,
        answer_seconds=2 * timeout_seconds,
    )
    start = time.monotonic()
    with listener, _stopped_by_signals():
        app.models.load_all()
        with _kept_from_collections():
            server.run(sockets=[listener])
    app.models.stop()
    counts: dict[str, int] = {}
    for (_, _, protocol, status), count in app.models.metrics.requests.values.items():
        key = f"{protocol} {status}"
        counts[key] = counts.get(key, 0) + int(count)
    seconds = time.monotonic() - start
    return Served(address, tuple(app.models.names), seconds, counts)


def application(
    paths: Sequence[str],
    *,
    threads: int | None = None,
    token: str | None = None,
    max_batch_size: int | None = None,
    max_queue: int = 256,
    max_body: int = 64 * 2**20,
    timeout_seconds: float = 10.0,
    load: Callable[..., LoadedModel] | None = None,
) -> "App":
    """Returns exported models as an ASGI application, for a process that is not ours.

    Ray Serve, gunicorn and others run it; `serve` has its own process, which closes
    connections that hang and takes up changed models, too.

    Args:
        paths: As `serve` takes them; loaded here, and not again when they change.
        threads: As for `serve`, like those below.
        token: What requests have to bear; None asks for nothing.
        max_batch_size: Examples in one run of a model.
        max_queue: Requests of a model that may wait.
        max_body: Bytes of the largest request.
        timeout_seconds: How long an answer may take.
        load: Reads an exported folder.

    Raises:
        FileNotFoundError: A path holds no exported model.
        ImportError: orjson is not installed.
        RuntimeError: A model cannot be loaded.
        ValueError: An argument is out of its range, or a name came twice.
    """
    limits = Limits(max_batch_size, max_queue, timeout_seconds, max_body)
    app = _unloaded(paths, limits, threads=threads, token=token, load=load)
    app.models.load_all()
    return app


def _unloaded(
    paths: Sequence[str],
    limits: Limits,
    *,
    threads: int | None,
    token: str | None,
    load: Callable[..., LoadedModel] | None,
) -> "App":
    """Returns the application, its arguments checked, its models still to be loaded."""
    checks.require("orjson", extra="serve", purpose="`tfamp serve`")
    from tfamp.serving.runtimes import load_exported
    from tfamp.serving.server.app import App

    if limits.max_batch_size is not None:
        checks.positive_int("max_batch_size", limits.max_batch_size)
    checks.positive_int("max_queue", limits.max_queue)
    checks.positive_int("max_body", limits.max_body)
    checks.positive("timeout_seconds", limits.timeout_seconds)
    if load is None:
        load = functools.partial(load_exported, threads=threads)
    return App(Models(named_places(paths), load, limits), token=token)


def _token(path: Path) -> str:
    """Returns the token in a file."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"`token_file` {str(path)!r} cannot be read ({error}); expected a line of "
            "letters and digits. Write one with `openssl rand -hex 32`."
        ) from error
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError(
            f"`token_file` {str(path)!r} holds no token; expected a line of letters "
            "and digits. Write one with `openssl rand -hex 32`."
        )
    return token


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket at an address, which nobody reaches before it listens."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"`host` is {host!r}, which is no address of this machine ({error}); "
            "expected one such as '127.0.0.1', '::1' or '0.0.0.0'. Correct it."
        ) from error
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


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.contextmanager
def _kept_from_collections() -> Iterator[None]:
    """Has Python look for garbage in what comes from now on alone.

    What stands stays: looking through it takes milliseconds. Where somebody has frozen
    objects already, theirs could not be told from these afterwards.
    """
    is_mine = gc.get_freeze_count() == 0
    if is_mine:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if is_mine:
            gc.unfreeze()


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Lets signals that the server has taken for its end not end the process, too.

    uvicorn ends at SIGTERM and SIGINT and then raises them again, for whoever had a
    handler before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, _ended_while_loading)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    except _Ended:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ended(BaseException):
    """A signal came while nothing listened."""


def _ended_while_loading(number: int, frame: object) -> None:
    raise _Ended
