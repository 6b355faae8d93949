"""Load tests: moments that do not wait, latencies from them, the table and the page."""

import asyncio
import contextlib
import gc
import socket
import time

import numpy as np
import pytest

from tfamp.cli import main as cli
from tfamp.serving import load_test
from tfamp.serving.load_test import result, target
from tfamp.serving.load_test.clients import Clients
from tfamp.serving.load_test.result import Burst, Load, LoadTest

LARGE = 2**23
METADATA = (
    b'{"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]}'
)


def answering(status=200, *, stall=None, body=METADATA, head=None):
    """Returns a server that stalls once, for `stall` seconds, and what it is asked.

    `head` are other headers in the place of the length of the body.
    """
    headers = b"Content-Length: %d" % len(body) if head is None else head
    asked = []

    async def serve(reader, writer):
        try:
            while True:
                came = await reader.readuntil(b"\r\n\r\n")
                _, found, rest = came.lower().partition(b"content-length:")
                length = int(rest.split(b"\r\n")[0]) if found else 0
                asked.append(await reader.readexactly(length))
                if stall is not None and len(asked) == 30:
                    time.sleep(stall)
                writer.write(b"HTTP/1.1 %d x\r\n%s\r\n\r\n" % (status, headers))
                writer.write(body[:2])
                if head is not None:  # so that the rest is a packet of its own
                    await asyncio.sleep(0.001)
                writer.write(body[2:])
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    return serve, asked


def measured(serve, rate, seconds, timeout_seconds=5.0, body=b""):
    """Returns what a server of this event loop came to at a rate."""

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        one = target.Target("m", "127.0.0.1", port, b"GET / HTTP/1.1\r\n\r\n" + body)
        due = load_test.moments(rate, seconds, seed=0)
        with contextlib.closing(Clients(one, 8, timeout_seconds)) as clients:
            burst = await asyncio.to_thread(load_test.ask_at, clients, due)
        server.close()
        await asyncio.sleep(0.05)  # Its side of the connections ends.
        return burst, due

    return asyncio.run(main())


def test_a_stall_counts_for_all_that_were_due_in_it():
    serve, _ = answering(stall=0.3)
    burst, due = measured(serve, rate=200, seconds=0.5)
    assert (len(burst.latencies), burst.errors) == (len(due), {})
    # About sixty were due in the 0.3 s; one that waits would have seen one slow answer.
    during = sum(due[29] <= moment < due[29] + 0.2 for moment in due)
    assert sum(np.array(burst.latencies) > 0.1) >= during > 20


def test_errors_are_counted_by_what_they_were():
    serve, _ = answering(503)
    burst, due = measured(serve, rate=100, seconds=0.2)
    assert (burst.latencies, burst.errors) == ((), {"503": len(due)})


def test_garbage_is_not_looked_for_while_requests_are_due():
    enabled = []
    serve, _ = answering()

    async def noting(reader, writer):
        enabled.append(gc.isenabled())
        await serve(reader, writer)

    measured(noting, rate=100, seconds=0.1)
    assert set(enabled) == {False} and gc.isenabled()


def test_a_request_larger_than_a_socket_takes_at_once_is_sent_whole():
    lengths = []

    async def serve(reader, writer):
        while await reader.read(1):
            await reader.readuntil(b"\r\n\r\n")
            lengths.append(len(await reader.readexactly(LARGE)))
            writer.write(b"HTTP/1.1 200 x\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    burst, due = measured(serve, rate=40, seconds=0.1, body=bytes(LARGE))
    assert (len(burst.latencies), burst.errors) == (len(due), {})
    assert lengths == [LARGE] * len(due)


def test_a_name_with_several_addresses_is_asked_where_the_server_listens(monkeypatch):
    plain = socket.getaddrinfo

    def both(host, port, *args, **options):
        elsewhere = plain("127.0.0.2", port, *args, **options)
        return elsewhere + plain(host, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", both)
    serve, _ = answering()
    burst, due = measured(serve, rate=100, seconds=0.1)
    assert (len(burst.latencies), burst.errors) == (len(due), {})


CHUNKS = b"3\r\nabc\r\n0\r\n\r\n"
ENDS = {
    # As a server of tensors as bytes writes it, with a length before the length.
    "two lengths": (
        b"Inference-Header-Content-Length: 2\r\nContent-Length: 9",
        *(b'{"a": 1}x', "200"),
    ),
    "chunks": (b"Transfer-Encoding: chunked", CHUNKS, "200"),
    "close": (b"content-length: 2\r\nConnection: close", b"ab", "200"),
    "no length": (b"x: y", b"ab", "an answer of unknown length"),
}


@pytest.mark.parametrize("head, body, expected", ENDS.values(), ids=ENDS)
def test_answers_are_read_to_their_end(head, body, expected):
    serve, asked = answering(head=head, body=body)
    burst, due = measured(serve, rate=200, seconds=0.2)
    assert len(asked) == len(due)
    if expected == "200":
        assert (len(burst.latencies), burst.errors) == (len(due), {})
    else:
        assert burst.errors == {expected: len(due)}


def test_servers_that_hang_up_or_never_answer_are_counted():
    async def hang_up(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    burst, due = measured(hang_up, rate=100, seconds=0.1)
    assert burst.errors == {"hung up": len(due)}

    async def sleep(reader, writer):
        await reader.read()
        writer.close()

    burst, due = measured(sleep, rate=100, seconds=0.1, timeout_seconds=0.05)
    assert burst.errors == {"timeout": len(due)}


def test_moments_are_those_of_a_poisson_process_and_repeat():
    due = load_test.moments(1000.0, 20.0, seed=3)
    gaps = np.diff(due)
    # Of 20,000 exponential gaps, mean and spread are within 5 standard errors.
    assert abs(gaps.mean() * 1000 - 1) < 5 / np.sqrt(len(gaps))
    assert abs(gaps.std() * 1000 - 1) < 0.1
    assert due == load_test.moments(1000.0, 20.0, seed=3)


def load(name, rate, latencies, errors=None):
    burst = Burst(1.0, tuple(latencies), (1e-4,) * len(latencies), errors or {})
    return Load.of(name, rate, burst)


def test_percentiles_are_told_where_there_are_requests_beyond_them():
    even = [n / 1000 for n in range(1, 1001)]
    found = load("m", 10, even)
    assert (found.p50, found.p99, found.p999) == pytest.approx(
        (0.5005, 0.99001, 0.999001)
    )
    assert load("m", 10, even[:999]).p999 is None
    assert load("m", 10, even[:99]).p99 is None
    assert load("m", 10, []).p50 is None


def made():
    """A load test of two servers, one with errors and a name that is no HTML."""
    fast = [load("a:1 m", rate, [1e-3 + rate * 1e-6] * 1000) for rate in (100, 900)]
    slow = [load("<b>:2 m", rate, [0.02] * 500, {"503": 7}) for rate in (100, 900)]
    # The second rate was asked the other way round.
    return LoadTest("binary", 1, 5.0, (fast[0], slow[0], slow[1], fast[1]))


def test_the_table_and_the_page_have_each_server_at_each_rate():
    test = made()
    lines = test.table().splitlines()
    rows = [line.strip("│").split() for line in lines if " m " in line]
    assert [(row[0], row[2]) for row in rows] == [
        *(("100", "a:1"), ("100", "<b>:2"), ("900", "a:1"), ("900", "<b>:2")),
    ]
    assert sum("7 503" in line for line in lines) == 2
    page = result.to_html(test)
    assert "<b>:2" not in page and "&lt;b&gt;:2 m" in page
    assert page.count("<polyline") == 6 and page.count("<circle") == 10
    assert LoadTest.from_json(test.to_json()) == test


def test_two_models_are_asked_in_turns(tmp_path, capsys):
    serve, asked = answering()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        urls = [f"http://127.0.0.1:{port}/v2/models/{name}" for name in "ab"]
        flags = ["--rates=50,100", "--seconds=0.1", "--protocol=json"]
        flags += [f"--out={tmp_path / 'page.html'}"]
        argv = ["bench_serve", *urls, *flags]
        status = await asyncio.to_thread(cli.main, argv)
        server.close()
        await asyncio.sleep(0.05)  # Its side of the connections ends.
        return status

    assert asyncio.run(main()) == 0
    out = capsys.readouterr().out
    assert out.count(" a │") == out.count(" b │") == 2 and "page.html" in out
    assert b'"data": [' in asked[-1] and (tmp_path / "page.html").exists()


WRONG = {
    "no model": ("http://localhost:1", "names no model; expected an address such as"),
    "no http": ("ftp://localhost/v2/models/m", "expected http://host:port"),
    "nobody": ("http://127.0.0.1:9/v2/models/m", "cannot be reached"),
}


@pytest.mark.parametrize("url, message", WRONG.values(), ids=WRONG)
def test_a_wrong_address_is_told(url, message):
    with pytest.raises((ValueError, OSError), match=message):
        load_test.bench_serve([url])
