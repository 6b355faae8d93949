"""The server in a process of its own: photos of every size, odd and many clients.

What it refuses or survives keeps nobody else from being answered at once.
"""

import concurrent.futures
import contextlib
import http.client
import json
import random
import signal
import socket
import sys
import threading
import time

import keras
import numpy as np
import pytest

import tfamp
from tests.served_models import DEADLINE, Means, serving

pytest.importorskip("uvicorn", reason="needs tfamp[serve]")

from tfamp.serving.server.main import serve

PATH = "/v2/models/photos/infer"
# Means of numbers below 1 that were rounded to four places, summed in float32.
TOLERANCE = 1e-4
# Far more than a health check takes, far less than large JSON took: up to 21 s.
PATIENCE = 3.0


def served(folder, *flags, open_files=None):
    """Returns a block with a server of `Means` and its address."""
    command = [sys.executable, "-m", "tests.served_models", folder, *flags]
    if open_files is not None:
        limited = f'ulimit -n {open_files}; exec "$@"'
        command = ["bash", "-c", limited, "bash", *command]
    return serving(*command)


@pytest.fixture
def folder(tmp_path):
    return Means.written(tmp_path / "photos")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with served(Means.written(tmp_path_factory.mktemp("served") / "photos")) as (_, at):
        yield at


def connect(address):
    return contextlib.closing(http.client.HTTPConnection(address, timeout=DEADLINE))


def opened(address):
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE)


def photo(side, seed=0):
    return np.random.default_rng(seed).random((1, side, side, 3), np.float32)


def in_bytes(x):
    """Returns the headers and the body of a request that carries raw bytes."""
    entry = {"name": "photos", "datatype": "FP32", "shape": list(x.shape)}
    entry["parameters"] = {"binary_data_size": x.nbytes}
    head = json.dumps({"inputs": [entry]}).encode()
    return {"Inference-Header-Content-Length": str(len(head))}, head + x.tobytes()


def in_json(x):
    """Returns the headers and the body of a request that carries numbers."""
    entry = {"name": "photos", "datatype": "FP32", "shape": list(x.shape)}
    entry["data"] = np.round(x.ravel().astype(float), 4).tolist()
    body = json.dumps({"inputs": [entry]}).encode()
    return {"Content-Type": "application/json"}, body


SMALL = in_bytes(np.ones((1, 8, 8, 3), np.float32))


def asked(connection, path=PATH, given=None, **options):
    """Returns the status and the JSON of the answer to a request."""
    headers, body = given or ({}, None)
    method = "GET" if body is None else "POST"
    connection.request(method, path, body, headers, **options)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def ask(address, path=PATH, given=None):
    with connect(address) as connection:
        return asked(connection, path, given)


def works(address):
    return ask(address, PATH, SMALL)[0] == 200


def is_right(status, answer, x):
    means = x.mean((1, 2), dtype=np.float64).ravel()
    (output,) = answer["outputs"]
    return status == 200 and np.allclose(output["data"], means, atol=TOLERANCE)


# Bytes of a photo in float32: 12 for each of its pixels; as JSON, about 27.
FORMS = {
    "1 KB of bytes": (in_bytes, 9),
    "62 KB of bytes": (in_bytes, 72),
    "600 KB of bytes": (in_bytes, 224),
    "20 MB of bytes": (in_bytes, 1290),
    "50 KB of JSON": (in_json, 43),
    "80 KB of JSON": (in_json, 55),
    "3 MB of JSON": (in_json, 334),
}


@pytest.mark.quick("1 KB of bytes", "600 KB of bytes", "80 KB of JSON")
@pytest.mark.parametrize("form, side", FORMS.values(), ids=FORMS)
def test_a_body_of_any_size_is_read_whole_in_chunks_and_slowly(address, form, side):
    with connect(address) as connection:
        for seed in range(5):
            x = photo(side, seed)
            assert is_right(*asked(connection, PATH, form(x)), x)
        headers, body = form(x)
        parts = [body[at : at + 50_000] for at in range(0, len(body), 50_000)]
        given = headers, iter(parts)
        assert is_right(*asked(connection, PATH, given, encode_chunked=True), x)
    with connect(address) as slow:
        slow.putrequest("POST", PATH)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            slow.putheader(name, str(value))
        slow.endheaders(body[: len(body) // 2])
        assert ask(address, "/v2/health/ready")[0] == 200
        slow.send(body[len(body) // 2 :])
        answer = slow.getresponse()
        assert is_right(answer.status, json.loads(answer.read()), x)


def test_no_client_gets_anothers_answer(address):
    def ask_some(number):
        rng = np.random.default_rng(number)
        wrong = []
        with connect(address) as connection:
            for _ in range(25):
                size = rng.integers(1, 4), 1, 1, 3
                x = rng.integers(-1000, 1000, size) + number / 4  # that no two share
                found = asked(connection, PATH, in_json(x))
                wrong += [] if is_right(*found, x) else [(x, found)]
        return wrong

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert [each for some in pool.map(ask_some, range(8)) for each in some] == []


def test_answers_on_an_open_connection_wait_for_no_acknowledgement(address):
    taken = []
    with connect(address) as connection:
        for _ in range(40):
            start = time.perf_counter()
            assert asked(connection, "/v2/health/live")[0] == 200
            taken.append(time.perf_counter() - start)
    assert min(taken[20:]) < 0.03  # Linux delays one by 40 ms


def mutated(rng):
    """Returns the path, the headers and the body of a request with a mistake in it."""
    row = [rng.choice([1, 2.5, None, "a", [], {}, True, 1e400, -(2**70)])] * 3
    entry = {"name": "photos", "datatype": "FP32", "shape": [1, 1, 1, 3], "data": row}
    entry[rng.choice(list(entry))] = rng.choice([None, 5, "z", [], {}, [None], -1])
    entry["parameters"] = rng.choice([{}, {"binary_data_size": rng.choice([-1, 7])}])
    contents = [
        *({"inputs": [entry]}, {"inputs": entry}, {"inputs": [row, 3]}),
        *({"inputs": {"x": row}}, {"inputs": [entry, entry]}, {"id": 3, "inputs": []}),
        *([row], "text", 3, None, {"instances": [[row]], "inputs": [row]}),
    ]
    body = json.dumps(rng.choice(contents)).encode()
    if rng.random() < 0.4:
        cut = rng.randrange(len(body))
        body = body[:cut] + rng.randbytes(rng.randrange(3)) + body[cut + 1 :]
        body = b"!" + body  # It would be right again now and then.
    headers = {}
    if rng.random() < 0.3:
        headers["Inference-Header-Content-Length"] = rng.choice(["0", "-3", "9" * 30])
    wrong = ["/v2/models//infer", "/v2/models/m", "/v1/models/m:predict", "/%00", "/a"]
    path = rng.choice(wrong) if rng.random() < 0.1 else PATH
    return path, headers, body


def test_malformed_requests_are_refused_and_nothing_else(address):
    found, rng = {}, random.Random(0)
    with connect(address) as connection:
        for _ in range(200):
            path, *given = mutated(rng)
            status, message = asked(connection, path, given)
            assert list(message) == ["error"], (path, given, message)
            found[status] = found.get(status, 0) + 1
        assert asked(connection, PATH, SMALL)[0] == 200
    assert set(found) <= {400, 404, 405} and found[400] > 100


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
        running = pool.submit(run)
        try:
            yield seconds
        finally:
            done.set()
        running.result()


TEXTS = {
    "numbers": b"0.123",
    "empty lists": b"[]",
    "objects": b'{"x":1}',
    "rows of several lengths": b"[1,2],[3]",
    "long integers": b"1" * 100,
}


@pytest.mark.quick("3-numbers")
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("megabytes", [3, 50])
def test_large_json_keeps_nobody_waiting(address, text, megabytes):
    data = b",".join([text] * (megabytes * 10**6 // (len(text) + 1)))
    entry = b'{"name": "photos", "datatype": "FP32", "shape": [1, 8, 8, 3], "data": ['
    with asking_for_health(address) as seconds:
        given = {}, b'{"inputs": [' + entry + data + b"]}]}"
        status, answer = ask(address, PATH, given)
    assert status == (400 if megabytes == 3 else 413), answer
    assert max(seconds) < PATIENCE


@pytest.mark.quick("nothing")
@pytest.mark.parametrize("sent", [b"", b"POST /v2/mod"], ids=["nothing", "half a head"])
def test_idle_connections_shut_nobody_out(folder, sent):
    with served(folder, open_files=256) as (_, address):
        with contextlib.ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(opened(address)).sendall(sent)
            assert works(address)
            assert ask(address, "/v2/health/ready")[0] == 200


def raw(address, data):
    """Returns the status of the answer to bytes."""
    with opened(address) as connection:
        connection.sendall(data)
        return int(connection.makefile("rb").readline().split()[1])


def test_a_connection_in_use_is_not_closed_for_a_new_one(folder):
    headers, body = SMALL
    flags = ("--max_connections=4", "--timeout_seconds=30")
    with served(folder, *flags) as (_, address), contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(connect(address)) for _ in range(4)]
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


LENGTHS = ("9" * 5000, "-" + "9" * 5000, "1e3", "+5", "0x10", "1_0", "\xb2", "5, 6")


@pytest.mark.parametrize("name", ["Inference-Header-Content-Length", "Content-Length"])
def test_a_header_that_is_no_length_is_refused(address, name):
    _, body = SMALL
    for value in LENGTHS:
        given = {"Host": "a", "Content-Length": len(body), name: value}
        lines = [f"POST {PATH} HTTP/1.1", *(f"{n}: {v}" for n, v in given.items())]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        assert raw(address, head + body) == 400, value[:8]
    assert works(address)


def test_a_model_that_fails_is_not_ready_until_it_answers_again(folder):
    with served(folder) as (_, address):
        assert works(address)
        (folder / "lost").touch()
        status, answer = ask(address, PATH, SMALL)
        assert status == 500 and "the device is lost" in answer["error"]
        assert ask(address, "/v2/health/ready") == (503, {"ready": False})
        assert ask(address, "/v2/health/live")[0] == 200
        (folder / "lost").unlink()
        assert ask(address, "/v2/health/ready") == (200, {"ready": True})
        assert works(address)


def test_a_run_that_never_ends_does_not_keep_the_process(folder):
    with served(folder, "--timeout_seconds=0.5") as (process, address):
        (folder / "stuck").touch()
        assert ask(address, PATH, SMALL)[0] == 504
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


COMMAND = """
import sys
from tfamp.cli.main import main
main(["serve", sys.argv[1], "--port=0"])
print("tensorflow" in sys.modules)
"""


def test_the_command_serves_an_export_to_its_end_without_tensorflow(folder):
    pytest.importorskip("tf2onnx", reason="needs tfamp[onnx]")
    photos = keras.Input((None, None, 3), name="photos")
    means = keras.layers.GlobalAveragePooling2D(name="means")(photos)
    (folder / "export.json").unlink()
    tfamp.export(keras.Model(photos, means), folder, format="onnx")
    with serving(sys.executable, "-c", COMMAND, folder) as (process, address):
        x = photo(72)
        assert is_right(*ask(address, PATH, in_bytes(x)), x)
        assert ask(address, PATH, ({}, b"{"))[0] == 400
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out.splitlines()[-1]) == (0, "False"), err


def test_what_cannot_be_listened_to_is_told(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = {
            "`port` is 99999; expected 0 to 65535": {"port": 99_999},
            f"`port` {port} of `host` '127.0.0.1' cannot be had": {"port": port},
            "`host` 'not an address' cannot be had": {"host": "not an address"},
            "`token_file` 'nowhere' holds no token": {"token_file": "nowhere"},
        }
        for message, how in wrong.items():
            with pytest.raises((OSError, ValueError), match=message):
                serve([str(folder)], load=Means, **{"port": 0, **how})
