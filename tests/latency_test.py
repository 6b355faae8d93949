"""Latencies of models and servers: what counts, from when, and what is told."""

import contextlib
import http.server
import json
import threading
import time

import keras
import numpy as np
import pytest

import tfamp

X = np.ones((2, 3), np.float32)
METADATA = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]}


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # all may come at once


@contextlib.contextmanager
def answering(reply):
    """Yields the address of a server that answers the status that `reply` gives."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments):
            pass

        def answer(self, status, body=b"{}"):
            head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n"
            self.wfile.write(head.encode() + body)

        def do_GET(self):
            self.answer(200, json.dumps(METADATA).encode())

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(reply(self.headers, body))

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v2/models/m"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_stall_counts_for_all_that_were_due_in_it():
    served = []
    lock = threading.Lock()

    def reply(headers, body):
        with lock:  # one at a time, as a model is run
            served.append(body)
            if len(served) == 40:  # ten to warm up, and thirty more
                time.sleep(0.3)
        return 200

    with answering(reply) as url:
        found = tfamp.latency_check(url, X, rate=200, seconds=0.5)
    assert found.errors == {} and (found.rate, found.clients) == (200, None)
    # A fifth of them and more were due in the stall, and most of these waited long;
    # clients that wait would have seen a few slow answers.
    assert found.p90 > 0.1
    # Exponential gaps: 100 are due, give or take three times the root.
    assert 70 <= found.num_answers <= 130


def test_errors_are_counted_by_what_they_are_and_are_no_answers():
    asked = []

    def reply(headers, body):
        asked.append(body)
        return 503 if len(asked) > 10 and len(asked) % 2 else 200

    with answering(reply) as url:
        found = tfamp.latency_check(url, X, rate=100, seconds=0.3)
    assert found.errors["503"] == pytest.approx(found.num_answers, abs=1)
    assert f"{found.errors['503']} times 503" in str(found)


def test_tensors_go_as_the_protocol_has_it_with_a_token():
    asked = []

    def reply(headers, body):
        asked.append((headers, body))
        return 200

    with answering(reply) as url:
        tfamp.latency_check(url, X, seconds=0.05, token="secret")
    headers, body = asked[-1]
    assert headers["Authorization"] == "Bearer secret"
    length = int(headers["Inference-Header-Content-Length"] or len(body))
    (entry,) = json.loads(body[:length])["inputs"]
    assert (entry["name"], entry["datatype"], entry["shape"]) == ("x", "FP32", [2, 3])
    np.testing.assert_array_equal(np.frombuffer(body[length:], "<f4"), X.ravel())


def test_a_keras_model_and_an_export_are_measured_as_a_server_is(tmp_path):
    model = keras.Sequential([keras.Input((3,), name="x"), keras.layers.Dense(2)])
    tfamp.export(model, tmp_path / "m", format="saved_model")
    for each, how in ((model, {"clients": 2}), (tmp_path / "m", {"rate": 100})):
        found = tfamp.latency_check(each, X, seconds=0.2, **how)
        assert found.errors == {} and found.num_answers > 1
        assert 0 < found.p50 < 1
    restored = tfamp.Latency.from_json(found.to_json())
    assert restored == found


def test_what_cannot_be_asked_is_told(tmp_path):
    with pytest.raises(OSError, match="cannot be reached"):
        tfamp.latency_check("http://127.0.0.1:9/v2/models/m", X)
    with answering(lambda headers, body: 400) as url:
        with pytest.raises(ValueError, match="answers 400 to `x`"):
            tfamp.latency_check(url, X)
        with pytest.raises(ValueError, match="is of shape"):
            tfamp.latency_check(url, X[:, :2])
    with pytest.raises(FileNotFoundError, match="no folder"):
        tfamp.latency_check(str(tmp_path / "nowhere"), X)
