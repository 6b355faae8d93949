"""What `tfamp serve` refuses and survives: huge JSON, idle clients, odd numbers.

Each time others go on to be answered at once.
"""

import concurrent.futures
import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from tests.wild import served

pytest.importorskip("uvicorn", reason="needs tfamp[serve]")
pytest.importorskip("tf2onnx", reason="needs tfamp[onnx]")

PATH = "/v2/models/photos/infer"
# Far more than a health check takes, far less than large JSON took: up to 21 s.
PATIENCE = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return served.export(tmp_path_factory.mktemp("served") / "photos")


@pytest.fixture(scope="module")
def address(folder):
    with served.serving(folder, deadline=600) as (_, found):
        yield found


def small():
    return served.in_bytes(np.ones((1, 8, 8, 3), np.float32))


def ask(address, path=PATH, body=None, headers=None):
    with served.connect(address) as connection:
        return served.answered(connection, path, body, headers)


def works(address):
    headers, body = small()
    return ask(address, PATH, body, headers)[0] == 200


@contextlib.contextmanager
def asking_for_health(address):
    """Asks again and again; yields the list of how long each answer took."""
    done, seconds = threading.Event(), []

    def run():
        while not done.is_set():
            start = time.perf_counter()
            ask(address, "/v2/health/live")
            seconds.append(time.perf_counter() - start)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run)
        try:
            yield seconds
        finally:
            done.set()
        asked.result()


def json_body(data):
    """Returns a body whose `data` is this text."""
    entry = b'{"name": "photos", "datatype": "FP32", "shape": [1, 8, 8, 3], "data": '
    return b'{"inputs": [' + entry + data + b"}]}"


def repeated(text, num_bytes):
    return b"[" + b",".join([text] * (num_bytes // (len(text) + 1))) + b"]"


TEXTS = {
    "numbers": b"0.123",
    "empty lists": b"[]",
    "words": b"NaN",
    "objects": b'{"x":1}',
    "rows of several lengths": b"[1,2],[3]",
    "long integers": b"1" * 100,
}


@pytest.mark.quick("3-numbers")
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("megabytes", [3, 50])
def test_large_json_keeps_nobody_waiting(address, text, megabytes):
    body = json_body(repeated(text, megabytes * 10**6))
    with asking_for_health(address) as seconds:
        status, answer = ask(address, PATH, body)
    assert status == (400 if megabytes == 3 else 413), answer
    assert max(seconds) < PATIENCE


def opened(address, seconds=served.DEADLINE):
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=seconds)


@pytest.mark.quick("nothing")
@pytest.mark.parametrize(
    "sent", [b"", b"POST /v2/mod", b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n"],
    ids=["nothing", "a part of a head", "a request"],
)  # fmt: skip
def test_idle_connections_shut_nobody_out(folder, sent):
    with served.serving(folder, open_files=256, deadline=300) as (_, address):
        with contextlib.ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(opened(address)).sendall(sent)
            assert works(address)
            assert ask(address, "/v2/health/ready")[0] == 200


def test_a_connection_in_use_is_not_closed_for_a_new_one(folder):
    headers, body = small()
    flags = ("--max_connections=4", "--timeout_seconds=30")
    with served.serving(folder, *flags) as (_, address):
        with contextlib.ExitStack() as stack:
            waiting = [stack.enter_context(served.connect(address)) for _ in range(4)]
            for each in waiting:
                each.putrequest("POST", PATH)
                given = {"Content-Length": len(body), "Expect": "100-continue"}
                for name, value in {**headers, **given}.items():
                    each.putheader(name, str(value))
                each.endheaders()
                # Now the server waits for the body.
                assert each.sock.recv(100).startswith(b"HTTP/1.1 100")
            assert raw(address, b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n") == 503
            for each in waiting:
                each.send(body)
                assert each.getresponse().status == 200
            assert works(address)


MANY = "9" * 5000
HEADERS = {
    f"{name}: {value[:8]!r}": {name: value}
    for name in ("Inference-Header-Content-Length", "Content-Length")
    for value in (MANY, "-" + MANY, "1e3", "+5", "0x10", "5.0", "1_0", "\xb2", "5, 6")
}


def raw(address, data):
    """Returns the status of the answer to bytes."""
    with opened(address) as connection:
        connection.sendall(data)
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.quick("Inference-Header-Content-Length: '-9999999'")
@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_is_no_length_is_refused(address, header):
    _, body = small()
    given = {"Host": "a", "Content-Length": len(body)} | header
    lines = [f"POST {PATH} HTTP/1.1", *(f"{n}: {v}" for n, v in given.items())]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    assert raw(address, head + body) == 400
    assert works(address)


LOST = """
import os, sys, onnxruntime
class Session(onnxruntime.InferenceSession):
    def run(self, *args, **options):
        if os.path.exists({path!r}):
            raise RuntimeError("the device is lost")
        return super().run(*args, **options)
onnxruntime.InferenceSession = Session
"""


def test_a_model_that_fails_is_not_ready_until_it_answers_again(folder, tmp_path):
    lost = tmp_path / "lost"
    headers, body = small()
    with served.serving(folder, before=LOST.format(path=str(lost))) as (_, address):
        assert works(address)
        lost.touch()
        status, answer = ask(address, PATH, body, headers)
        assert status == 500 and "the device is lost" in answer["error"]
        assert ask(address, "/v2/health/ready") == (503, {"ready": False})
        assert ask(address, "/v2/health/live")[0] == 200
        lost.unlink()
        assert ask(address, "/v2/health/ready") == (200, {"ready": True})
        assert works(address)
