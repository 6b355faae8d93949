"""What `tfamp serve` refuses and survives: huge JSON, idle clients, odd numbers.

Each time others go on to be answered at once.
"""

import concurrent.futures
import contextlib
import json
import signal
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


def test_json_that_is_too_large_is_told_of_bytes_which_are_taken(address):
    x = np.random.default_rng(0).random((1, 1024, 1024, 3), np.float32)
    headers, body = served.in_json(x)
    status, answer = ask(address, PATH, body, headers)
    assert status == 413
    assert "binary_data_size" in answer["error"] and "--max_json" in answer["error"]
    headers, body = served.in_bytes(x)
    status, answer = ask(address, PATH, body, headers)
    assert status == 200
    np.testing.assert_allclose(served.numbers(answer), x.mean((1, 2)), rtol=1e-4)


def test_json_ahead_of_bytes_is_held_to_the_same_limit(address):
    body = json_body(repeated(b"0.5", 5 * 10**6))
    headers = {"Inference-Header-Content-Length": str(len(body))}
    status, answer = ask(address, PATH, body, headers)
    assert status == 413 and "binary_data_size" in answer["error"]


def test_more_json_is_taken_where_it_is_wanted(folder):
    x = np.random.default_rng(0).random((1, 1024, 1024, 3), np.float32)
    headers, body = served.in_json(x)
    with served.serving(folder, "--max_json=64MiB") as (_, address):
        assert ask(address, PATH, body, headers)[0] == 200


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


def test_a_burst_of_connections_waits_in_the_kernel(folder):
    # Where no room is left a client tries again after 1, 3, 7 seconds.
    with served.serving(folder, deadline=300) as (process, address):
        process.send_signal(signal.SIGSTOP)
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(opened(address, seconds=0.9))
            process.send_signal(signal.SIGCONT)
            assert works(address)


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
            with opened(address) as refused:
                answer = refused.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 503") and b"retry-after" in answer
            assert "connections" in json.loads(answer.split(b"\r\n\r\n")[1])["error"]
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


def test_a_chunk_of_a_length_that_is_no_number_is_refused(address):
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert raw(address, head.encode() + MANY.encode() + b"\r\n") == 400
    assert works(address)


PATHS = {
    "version of many digits": f"/v2/models/photos/versions/{MANY}/infer",
    "version that is no number": "/v2/models/photos/versions/%C2%B2/infer",
    "negative version": "/v2/models/photos/versions/-1/infer",
    "name of many letters": f"/v2/models/{MANY}/infer",
    "name that is no text": "/v2/models/%ff%fe/infer",
    "line in a name": "/v2/models/photos%0a/infer",
    "folder above": "/v2/models/../photos/infer",
    "folder above in code": "/v2/models/%2e%2e%2fphotos/infer",
    "no name": "/v2/models//infer",
    "nothing": "/",
    "percent": "/%",
}


@pytest.mark.quick("version of many digits")
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_path_that_names_nothing_is_not_found(address, path):
    headers, body = small()
    status, answer = ask(address, path, body, headers)
    assert (status, list(answer)) == (404, ["error"])
    assert len(answer["error"]) < 1000


def entry(**changes):
    found = {"name": "photos", "datatype": "FP32", "shape": [1, 1, 1, 3]}
    return found | {"data": [1.0, 2.0, 3.0]} | changes


LONG = int("9" * 4000)
CONTENTS = {
    "data of many digits": {"inputs": [entry(data=[LONG, 1, 2])]},
    "shape of many digits": {"inputs": [entry(shape=[LONG, 1, 1, 3])]},
    "shape of 65 dimensions": {"inputs": [entry(shape=[1] * 64 + [3])]},
    "shape of 100,000 large ones": {"inputs": [entry(shape=[2**47] * 100_000)]},
    "shape of a fraction": {"inputs": [entry(shape=[1.0, 1, 1, 3])]},
    "shape of true": {"inputs": [entry(shape=[True, 1, 1, 3])]},
    "data of 70 levels": {"inputs": [entry(data=json.loads("[" * 70 + "]" * 70))]},
    "size of many digits": {
        "inputs": [
            {**entry(), "parameters": {"binary_data_size": LONG}},
        ]
    },
    "name of a lone surrogate": {"inputs": [entry(name="\ud800")]},
    "id that is a number": {"inputs": [entry()], "id": 5},
    "outputs that are text": {"inputs": [entry()], "outputs": "means"},
    "outputs that are no objects": {"inputs": [entry()], "outputs": [["means"]]},
    "the same input twice": {"inputs": [entry(), entry()]},
}


@pytest.mark.quick("data of many digits")
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_json_that_is_no_request_is_refused_at_once(address, content):
    status, answer = ask(address, PATH, json.dumps(content).encode())
    assert (status, list(answer)) == (400, ["error"])
    assert len(answer["error"]) < 1000


SHAPES = {"70": [1] * 70, "1,000 large": [2**47] * 1000, "no examples": [0, 8, 8, 3]}


@pytest.mark.quick("70")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bytes_of_a_shape_that_is_none_are_refused(address, shape):
    content = entry(shape=shape, parameters={"binary_data_size": 4})
    del content["data"]
    head = json.dumps({"inputs": [content]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    assert ask(address, PATH, head + b"abcd", headers)[0] == 400


def test_an_id_that_is_no_utf8_comes_back_or_is_refused(address):
    content = {"inputs": [entry()], "id": "\ud800"}
    body = json.dumps(content).replace("1.0", "NaN").encode()
    assert ask(address, PATH, body)[0] in (200, 400)


NO_MEMORY = """
import numpy as np
concatenate = np.concatenate
def short_of_memory(arrays, *args, **options):
    if sum(each.nbytes for each in arrays) > 2**19:
        raise MemoryError("Unable to allocate")
    return concatenate(arrays, *args, **options)
np.concatenate = short_of_memory
"""


def test_a_batch_that_memory_has_no_room_for_is_not_the_end(folder):
    x = np.ones((1, 200, 200, 3), np.float32)
    headers, body = served.in_bytes(x)

    def statuses(_):
        with served.connect(address) as connection:
            asked = (served.answered(connection, PATH, body, headers) for _ in range(8))
            return [status for status, _ in asked]

    with served.serving(folder, "--timeout_seconds=5", before=NO_MEMORY) as (
        _,
        address,
    ):
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            found = {
                status for each in pool.map(statuses, range(16)) for status in each
            }
        assert found <= {200, 503} and 200 in found
        assert ask(address, "/v2/health/ready") == (200, {"ready": True})
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
