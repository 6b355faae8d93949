"""The server as a process of its own, asked by clients as they come."""

import concurrent.futures
import contextlib
import http.client
import json
import random
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs tfamp[serve]")

from tests import served_models

DEADLINE = served_models.DEADLINE


def serving(*arguments):
    """Returns a block with a server of models of the tests' own, and its address."""
    program = (sys.executable, "-m", "tests.served_models")
    return served_models.serving(*program, *arguments)


PATH = "/v2/models/m/infer"


def asked_for(rows, **changes):
    """Returns the body of a request for rows of three numbers."""
    shape = [len(rows), 3]
    entry = {"name": "x", "datatype": "FP32", "shape": shape, "data": rows}
    return json.dumps({"inputs": [entry | changes]})


def predict(connection, rows, path=PATH):
    """Returns the status and the numbers of an answer, or what is wrong."""
    connection.request("POST", path, asked_for(rows))
    response = connection.getresponse()
    content = json.loads(response.read())
    if response.status != 200:
        return response.status, content
    (output,) = content["outputs"]
    return 200, np.reshape(output["data"], output["shape"]).tolist()


def connect(address):
    host, port = address.split(":")
    return http.client.HTTPConnection(host, int(port), timeout=DEADLINE)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server of one model, "m", that doubles."""
    folder = served_models.write(tmp_path_factory.mktemp("served") / "m", 2)
    with serving(folder) as (_, address):
        yield address


def test_no_client_gets_anothers_answer(server):
    def ask(number):
        rng = np.random.default_rng(number)
        wrong = []
        with contextlib.closing(connect(server)) as connection:
            for _ in range(25):
                rows = rng.integers(-1000, 1000, (rng.integers(1, 4), 3)) + number / 4
                found = predict(connection, rows.tolist())
                if found != (200, (2 * rows).tolist()):
                    wrong.append((rows, found))
        return wrong

    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # inputs that no two share
        assert [each for some in pool.map(ask, range(8)) for each in some] == []


def mutated(rng):
    """Returns the path, the headers and the body of a request with a mistake in it."""
    row = [rng.choice([1, 2.5, None, "a", [], {}, True, 1e400, -(2**70)])] * 3
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": row}
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


def test_malformed_requests_are_refused_and_nothing_else(server):
    found, rng = {}, random.Random(0)
    with contextlib.closing(connect(server)) as connection:
        for _ in range(200):
            path, headers, body = mutated(rng)
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            message = json.loads(response.read())
            assert list(message) == ["error"], (path, headers, body, message)
            found[response.status] = found.get(response.status, 0) + 1
        assert predict(connection, [[1, 2, 3]]) == (200, [[2, 4, 6]])
    assert set(found) <= {400, 404, 405} and found[400] > 100


def test_sigterm_ends_it_in_order_without_tensorflow(tmp_path):
    with serving(served_models.write(tmp_path / "m", 2)) as (process, address):
        with contextlib.closing(connect(address)) as connection:
            assert predict(connection, [[1, 2, 3]]) == (200, [[2, 4, 6]])
            assert predict(connection, [[1, 2]])[0] == 400
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE)
    # What it prints last is whether TensorFlow was loaded.
    assert (process.returncode, out.splitlines()[-1]) == (0, "False"), err


def test_a_run_that_never_ends_does_not_keep_the_process(tmp_path):
    folder = served_models.write(tmp_path / "m", 2, seconds=600)
    with serving(folder, "--timeout_seconds=0.5") as (process, address):
        with contextlib.closing(connect(address)) as connection:
            assert predict(connection, [[1, 2, 3]])[0] == 504
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_what_cannot_be_listened_to_is_told(tmp_path):
    from tfamp.serving.server.main import serve

    folder = served_models.write(tmp_path / "m", 2)
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
                serve([str(folder)], load=served_models.load, **{"port": 0, **how})


def test_the_command_starts_without_tensorflow_for_a_model_that_needs_none():
    code = (
        "import sys; from tfamp.cli.main import main; "
        "from tfamp.serving.server import main as server; "
        "server.serve = lambda *_, **__: print('tensorflow' in sys.modules); "
        "main(['serve', '.'])"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True).split() == ["False"]
