"""The server as a process of its own, asked by clients as they come."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs tfamp[serve]")

from tests import served_models

ROOT = Path(__file__).parents[1]
DEADLINE = 60


@contextlib.contextmanager
def serving(*arguments, program=("-m", "tests.served_models"), deadline=DEADLINE):
    """Yields the process of a server and its address; kills it at the deadline."""
    process = subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(deadline, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
        if "http://" not in line:
            process.kill()
            pytest.fail(f"no server: {line}{process.stderr.read()}")
        yield process, line[line.index("http://") :].split()[0].rstrip(".;")
    finally:
        process.kill()
        process.communicate()
        timer.cancel()


def end(process):
    """Sends SIGTERM and returns the status and what was printed."""
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=DEADLINE)
    return process.returncode, out, err


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
    host, port = address.removeprefix("http://").split(":")
    return http.client.HTTPConnection(host, int(port), timeout=DEADLINE)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server of one model, "m", that doubles."""
    folder = served_models.write(tmp_path_factory.mktemp("served") / "m", 2)
    with serving(folder) as (_, address):
        yield address


def test_a_client_of_triton_is_answered(server):
    client_of = pytest.importorskip("tritonclient.http", reason="needs tritonclient")
    client = client_of.InferenceServerClient(server.removeprefix("http://"))
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("m", "1")
    assert client.get_server_metadata()["name"] == "tfamp"
    assert client.get_model_metadata("m")["inputs"][0]["shape"] == [-1, 3]
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    for binary in (True, False):
        given = client_of.InferInput("x", x.shape, "FP32")
        given.set_data_from_numpy(x, binary_data=binary)
        wanted = client_of.InferRequestedOutput("y", binary_data=binary)
        found = client.infer("m", [given], outputs=[wanted], request_id="seven")
        np.testing.assert_array_equal(found.as_numpy("y"), 2 * x)
        assert found.get_response()["id"] == "seven"
    with pytest.raises(client_of.InferenceServerException, match="no model 'other'"):
        client.infer("other", [given])
    client.close()


def asked_by_clients(server, num_clients, num_requests):
    """Asks with inputs that no two share; returns the answers that were another's."""

    def ask(number):
        rng = np.random.default_rng(number)
        wrong = []
        with contextlib.closing(connect(server)) as connection:
            for _ in range(num_requests):
                rows = rng.integers(-1000, 1000, (rng.integers(1, 4), 3)) + number / 4
                found = predict(connection, rows.tolist())
                if found != (200, (2 * rows).tolist()):
                    wrong.append((rows, found))
        return wrong

    with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
        return [each for some in pool.map(ask, range(num_clients)) for each in some]


def test_no_client_gets_anothers_answer(server):
    assert asked_by_clients(server, num_clients=8, num_requests=25) == []


@pytest.mark.slow("test_no_client_gets_anothers_answer")
def test_no_client_of_32_gets_anothers_answer_in_100_000(tmp_path):
    with serving(served_models.write(tmp_path / "m", 2), deadline=600) as (_, address):
        assert asked_by_clients(address, num_clients=32, num_requests=3125) == []


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


def statuses_of_malformed(server, count):
    found, rng = {}, random.Random(0)
    with contextlib.closing(connect(server)) as connection:
        for _ in range(count):
            path, headers, body = mutated(rng)
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            message = json.loads(response.read())
            assert list(message) == ["error"], (path, headers, body, message)
            found[response.status] = found.get(response.status, 0) + 1
        assert predict(connection, [[1, 2, 3]]) == (200, [[2, 4, 6]])
    return found


def test_malformed_requests_are_refused_and_nothing_else(server):
    found = statuses_of_malformed(server, 200)
    assert set(found) <= {400, 404, 405} and found[400] > 100


@pytest.mark.slow("test_malformed_requests_are_refused_and_nothing_else")
def test_ten_thousand_malformed_requests_are_refused(server):
    found = statuses_of_malformed(server, 10_000)
    assert set(found) <= {400, 404, 405} and found[400] > 5_000


def test_sigterm_ends_it_in_order_without_tensorflow(tmp_path):
    with serving(served_models.write(tmp_path / "m", 2)) as (process, address):
        with contextlib.closing(connect(address)) as connection:
            assert predict(connection, [[1, 2, 3]]) == (200, [[2, 4, 6]])
            assert predict(connection, [[1, 2]])[0] == 400
        status, out, err = end(process)
    assert (status, out.splitlines()[-1]) == (0, "False"), err  # no TensorFlow


@pytest.mark.slow("test_sigterm_ends_it_in_order_without_tensorflow")
def test_what_was_asked_before_sigterm_is_answered(tmp_path):
    folder = served_models.write(tmp_path / "m", 2)
    with serving(folder) as (process, address):
        connection = connect(address)
        body = asked_for([[1, 2, 3]])
        connection.putrequest("POST", PATH)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:5].encode())
        with contextlib.closing(connect(address)) as other:
            other.request("GET", "/v2/health/ready")
            assert other.getresponse().status == 200
        process.send_signal(signal.SIGTERM)
        connection.send(body[5:].encode())
        response = connection.getresponse()
        assert json.load(response)["outputs"][0]["data"] == [2, 4, 6]
        connection.close()
        assert process.wait(DEADLINE) == 0


def test_a_port_in_use_is_told(tmp_path):
    from tfamp.serving.server.main import serve

    folder = served_models.write(tmp_path / "m", 2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"^Port {port} of '127.0.0.1' cannot be had"):
            serve([str(folder)], load=served_models.load, port=port)


WRONG = {
    "port": ({"port": 99_999}, "^`port` is 99999; expected 0 to 65535"),
    "host": ({"host": "not an address"}, "^`host` is 'not an address', which is no"),
    "token": ({"token_file": "nowhere"}, "^`token_file` 'nowhere' cannot be read"),
}


@pytest.mark.parametrize("wrong, message", WRONG.values(), ids=WRONG)
def test_what_cannot_be_listened_to_is_told(wrong, message, tmp_path):
    from tfamp.serving.server.main import serve

    folder = served_models.write(tmp_path / "m", 2)
    with pytest.raises(ValueError, match=message):
        serve([str(folder)], load=served_models.load, **{"port": 0, **wrong})


def test_only_this_machine_is_listened_to(server):
    assert server.startswith("http://127.0.0.1:")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder that `tfamp.export` wrote for onnxruntime, and its model."""
    pytest.importorskip("onnxruntime", reason="needs tfamp[onnx]")
    pytest.importorskip("tf2onnx", reason="needs tfamp[onnx]")
    import keras

    import tfamp

    model = keras.Sequential([keras.Input((8,), name="x"), keras.layers.Dense(3)])
    path = tmp_path_factory.mktemp("exported") / "digits"
    tfamp.export(model, path, format="onnx", write_failed=True)
    return path, model


@pytest.mark.slow("test_sigterm_ends_it_in_order_without_tensorflow")
def test_the_command_serves_an_export_without_tensorflow(exported):
    path, model = exported
    program = ("-X", "importtime", "-m", "tfamp", "serve")
    with serving(path, "--port=0", program=program) as (process, address):
        x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
        with contextlib.closing(connect(address)) as connection:
            connection.request("GET", "/v2/models/digits")
            (given,) = json.load(connection.getresponse())["inputs"]
            entry = {**given, "shape": [4, 8], "data": x.tolist()}
            body = json.dumps({"inputs": [entry]})
            connection.request("POST", "/v2/models/digits/infer", body)
            (output,) = json.load(connection.getresponse())["outputs"]
        found = np.reshape(output["data"], output["shape"])
        np.testing.assert_allclose(found, model(x), atol=1e-5)
        statm = Path(f"/proc/{process.pid}/statm")
        if statm.exists():
            held = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            assert held < 120 * 2**20
        status, out, err = end(process)
    assert status == 0
    # Of what `importlib` imports only the submodules are listed.
    names = (line.rpartition("|")[2].strip() for line in err.splitlines())
    loaded = {name.partition(".")[0] for name in names}
    assert "onnxruntime" in loaded
    assert not {"tensorflow", "keras"} & loaded
