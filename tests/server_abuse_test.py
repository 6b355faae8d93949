"""The server's process under what no client should do, and under what happens to it."""

import contextlib
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

import tfamp

pytest.importorskip("starlette", reason="needs tfamp[serve]")

from tests import served_models
from tests.server_process_test import (
    DEADLINE,
    PATH,
    asked_for,
    connect,
    predict,
    serving,
)

ROWS = [[1.0, 2.0, 3.0]]
BODY = asked_for(ROWS).encode()
LENGTH = len(BODY)
# Of libraries, arenas and buffers, whatever is asked.
MAX_GROWTH = 30e6
RECOVERED_SECONDS = 5


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of one model, "m", that doubles: its process and its address."""
    folder = served_models.write(tmp_path_factory.mktemp("served") / "m", 2)
    with serving(folder, deadline=300) as found:
        yield found


def place(address):
    host, port = address.removeprefix("http://").split(":")
    return host, int(port)


def raw(address, data):
    """Returns the status of an answer to bytes, None where the server hung up."""
    with socket.create_connection(place(address), timeout=DEADLINE) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while part := connection.recv(65536):
                answer += part
        except OSError:
            return None
    return int(answer.split()[1]) if answer else None


def head(line=f"POST {PATH}", length=LENGTH, *others):
    lines = [f"{line} HTTP/1.1", "Host: a"]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, *others, "", ""]).encode("latin-1")


MALFORMED = {
    "no head": b"\r\n\x00\xff\r\n\r\n",
    "large header": head("GET /v2", None, "X: " + "a" * 10**6),
    "many headers": head("GET /v2", None, *(f"X{n}: a" for n in range(20_000))),
    "long path": head("GET /" + "a" * 10**6, None),
    "path that is no text": b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
    "name that is no text": head("GET /v2/models/%ff%fe", None),
    "other method": head("PUT " + PATH) + BODY,
    "no method": head("ASK /", None),
    "length that is no number": head(length="abc") + BODY,
    "negative length": head(length=-1) + BODY,
    "two lengths": head("POST " + PATH, 25, "Content-Length: 3") + BODY,
    "length and chunks": head("POST " + PATH, 25, "Transfer-Encoding: chunked")
    + BODY
    + b"\r\n",
    "wrong chunks": head("POST " + PATH, None, "Transfer-Encoding: chunked")
    + b"zz\r\n",
    "too large": head(length=2**40),
    "length of JSON that is no text": head(
        *("POST /v2/models/m/infer", LENGTH),
        "Inference-Header-Content-Length: \xb2",
    )
    + BODY,
    "body that is no text": head(length=3) + b'"\xff"',
    "compressed": head("POST " + PATH, 3, "Content-Encoding: gzip") + b"abc",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_bytes_that_are_no_request_are_refused(server, data):
    status = raw(server[1], data)
    # A packet that the server did not read may turn its answer into a reset.
    assert status is None and len(data) > 2**17 or status in range(400, 500)
    with contextlib.closing(connect(server[1])) as connection:
        assert predict(connection, ROWS)[0] == 200


def resident(process):
    """Returns the bytes that a process holds."""
    statm = Path(f"/proc/{process.pid}/statm")
    if not statm.exists():
        pytest.skip("needs /proc")
    return int(statm.read_text().split()[1]) * 4096


@pytest.mark.slow("tests/server_batching_test.py::test_a_full_queue_refuses")
def test_ten_times_too_many_requests_are_refused_at_once_and_forgotten(tmp_path):
    # At most 200 a second: a run takes 5 ms and no batch is made.
    folder = served_models.write(tmp_path / "m", 2, seconds=0.005)
    flags = ("--max_batch_size=1", "--max_queue=20")
    with serving(folder, *flags) as (process, address):
        with contextlib.closing(connect(address)) as connection:
            predict(connection, ROWS)
            before = resident(process)
            found = tfamp.latency_check(
                f"{address}/v2/models/m", np.array(ROWS, np.float32), rate=2000
            )
            ended = time.monotonic()
            while predict(connection, ROWS)[0] != 200:
                assert time.monotonic() - ended < RECOVERED_SECONDS
            connection.request("POST", PATH, BODY)
            assert connection.getresponse().status == 200
        assert set(found.errors) == {"503"}
        assert found.errors["503"] > found.num_answers > 100
        assert resident(process) - before < MAX_GROWTH


@pytest.mark.slow("tests/server_protocol_test.py::test_a_slow_body_is_given_up")
def test_clients_that_are_slow_hold_up_no_other(tmp_path):
    folder = served_models.write(tmp_path / "m", 2)
    flags = ("--timeout_seconds=2",)
    with contextlib.ExitStack() as stack:
        process, address = stack.enter_context(serving(folder, *flags))
        before = resident(process)
        slow = [
            stack.enter_context(socket.create_connection(place(address)))
            for _ in range(200)
        ]
        for number, each in enumerate(slow):
            # Of the head a part, of the body a part, or all and the answer unread.
            each.sendall((head() + BODY)[: (10, -5, None)[number % 3]])
        with contextlib.closing(connect(address)) as connection:
            for _ in range(200):
                assert predict(connection, ROWS)[0] == 200
        began = time.monotonic()
        late = [each.recv(100).split()[1] for each in slow[1::3]]
        assert set(late) == {b"408"} and time.monotonic() - began < 10
        assert resident(process) - before < MAX_GROWTH
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
