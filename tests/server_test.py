"""The server, asked as an ASGI application: protocol, limits, errors and batches."""

import asyncio
import json
import logging
import struct
import threading

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs tfamp[serve]")

from tests.served_models import Scaled, ask, numbers, served
from tfamp.serving.runtimes.signature import TensorSpec

ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.5]]
INFER = "/v2/models/m/infer"


@pytest.fixture
def app(tmp_path):
    return served(tmp_path, Scaled())


def said(app, path, body=None, **how):
    """Returns the status and the JSON of an answer."""
    status, _, text = asyncio.run(ask(app, path, body, **how))
    return status, json.loads(text)


def tensor(data=ROWS, **changes):
    entry = {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": data}
    entry |= changes
    return {"inputs": [{k: v for k, v in entry.items() if v is not None}]}


@pytest.mark.parametrize("data", [ROWS, [*ROWS[0], *ROWS[1]]], ids=["nested", "flat"])
def test_infer_answers_json_nested_or_flat(app, data):
    status, found = said(app, INFER, {**tensor(data), "id": "seven"})
    output = {"name": "y", "datatype": "FP32", "shape": [2, 3]}
    output["data"] = [2.0, 4.0, 6.0, 8.0, 10.0, 13.0]
    assert status == 200
    assert found == {
        **{"model_name": "m", "model_version": "1", "id": "seven"},
        "outputs": [output],
    }


def binary(raw, size=None, **changes):
    """Returns the body and the headers of a request with raw bytes."""
    parameters = {"binary_data_size": len(raw) if size is None else size}
    content = tensor(None, parameters=parameters, **changes)
    content["parameters"] = {"binary_data_output": True}
    head = json.dumps(content).encode()
    return head + raw, [("Inference-Header-Content-Length", str(len(head)))]


def test_infer_takes_and_gives_raw_bytes(app):
    body, headers = binary(np.array(ROWS, np.float32).tobytes())
    status, found, text = asyncio.run(ask(app, INFER, body, headers=headers))
    length = int(found["inference-header-content-length"])
    entry = json.loads(text[:length])["outputs"][0]
    assert (status, entry["parameters"]) == (200, {"binary_data_size": 24})
    assert "data" not in entry
    answered = np.frombuffer(text[length:], "<f4").reshape(2, 3)
    np.testing.assert_array_equal(answered, 2 * np.array(ROWS, np.float32))


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_what_is_not_finite_comes_and_goes_as_words(app, word):
    body = json.dumps(tensor([[float(word), 0, 0], [0.5, 1, 2]])).encode()
    assert f"[{word}, 0, 0]" in body.decode()
    _, _, text = asyncio.run(ask(app, INFER, body))
    assert f'"data": [{word}, 0.0, 0.0, 1.0, 2.0, 4.0]' in text.decode()


def test_texts_are_taken_as_json_and_as_bytes(tmp_path):
    specs = [TensorSpec(name, (None,), "string") for name in "xy"]
    model = Scaled(1, inputs=specs[:1], outputs=specs[1:])
    model.run = lambda inputs: {"y": inputs["x"]}
    app, given = served(tmp_path, model), {"datatype": "BYTES", "shape": [2]}
    answer = said(app, INFER, tensor(["a", "é"], **given))[1]
    assert answer["outputs"][0]["data"] == ["a", "é"]
    texts = [text.encode() for text in ("a", "é")]
    raw = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    body, headers = binary(raw, **given)
    assert asyncio.run(ask(app, INFER, body, headers=headers))[2].endswith(raw)


MALFORMED = {
    "no JSON": (INFER, b"{", 400, "The body is not JSON"),
    "no inputs": (INFER, {}, 400, "is JSON of another form"),
    "other name": (
        *(INFER, tensor(name="X"), 400),
        "There is no input 'X'; expected 'x'. Did you mean 'x'?",
    ),
    "dtype": (INFER, tensor(datatype="FP64"), 400, "is of datatype 'FP64', not 'FP32'"),
    "shape": (INFER, tensor(shape=[2, -3]), 400, "of shape [2, 3], and says [2, -3]"),
    "ragged": (INFER, tensor([[1], [1, 2]]), 400, "does not fit"),
    "null": (INFER, tensor([[1, 2, None]] * 2), 400, "of dtype object; expected float"),
    "too large": (INFER, tensor([[1e300, 0, 0]] * 2), 400, "expected float32"),
    "twice": (INFER, {"inputs": tensor()["inputs"] * 2}, 400, "'x' came twice"),
    "no data": (INFER, tensor(None), 400, "of another form (KeyError: 'data')"),
    "no model": ("/v2/models/n/infer", {}, 404, "no model 'n'; expected 'm'"),
    "method": ("/v2", {}, 405, "There is no 'POST' at '/v2'; expected"),
    "deep": (INFER, b'{"inputs":' + b"[" * 9999 + b"NaN", 400, "body is not JSON"),
    "refused": (
        *(INFER, tensor([[-1e6, 0, 0]] * 2), 400),
        "does not take these inputs: RuntimeError: minus a million is more than",
    ),
}


@pytest.mark.parametrize(
    "path, body, status, message", MALFORMED.values(), ids=MALFORMED
)
def test_what_is_malformed_is_told_what_is_wrong(app, path, body, status, message):
    found, answer = said(app, path, body)
    assert (found, list(answer)) == (status, ["error"])
    assert message in answer["error"]


WRONG_BYTES = {
    "too many": (24, 25, "24 bytes are left", None),
    "too few": (28, 24, "4 bytes follow the last `binary_data_size`", None),
    "negative": (24, -1, "`binary_data_size` -1, where", None),
    "no number": (24, 24, "Content-Length is 'x'; expected", "x"),
}


@pytest.mark.parametrize(
    "sent, size, message, length", WRONG_BYTES.values(), ids=WRONG_BYTES
)
def test_wrong_raw_bytes_are_told_what_is_wrong(app, sent, size, message, length):
    body, headers = binary(bytes(sent), size)
    if length:
        headers = [(headers[0][0], length)]
    status, answer = said(app, INFER, body, headers=headers)
    assert status == 400 and message in answer["error"]


def test_inputs_are_told_apart_by_name_and_come_in_one_batch(tmp_path):
    specs = [TensorSpec(name, (None, 3), "float32") for name in "ab"]
    app = served(tmp_path, Scaled(inputs=specs))  # which answers by the first
    (a,), (b,) = (tensor([n] * 6, name=x)["inputs"] for x, n in (("a", 1), ("b", 5)))
    (output,) = said(app, INFER, {"inputs": [b, a]})[1]["outputs"]
    assert output["data"] == [2] * 6
    short = {**b, "shape": [1, 3], "data": [5] * 3}
    status, answer = said(app, INFER, {"inputs": [a, short]})
    assert status == 400 and "inputs have {'a': 2, 'b': 1} examples" in answer["error"]


def test_a_body_is_held_to_its_limit(tmp_path):
    app = served(tmp_path, Scaled(), max_body=200)
    length = [("Content-Length", "201")]
    for how in ({"headers": length}, {"parts": [b" " * 160, b" " * 160]}):
        status, headers, text = asyncio.run(ask(app, INFER, b"", **how))
        assert (status, headers["connection"]) == (413, "close")
        assert b"expected at most 200" in text
    assert said(app, INFER, tensor())[0] == 200


@pytest.mark.parametrize("over", [0, 1])
def test_json_is_held_to_a_limit_of_its_own(tmp_path, over):
    size = len(json.dumps(tensor()))
    app = served(tmp_path, Scaled(), max_json=size - over)
    status, answer = said(app, INFER, tensor())
    assert status == (413 if over else 200), answer
    assert f"has {size} bytes" in str(answer) or not over


def test_a_slow_body_is_given_up(tmp_path):
    app = served(tmp_path, Scaled(), timeout_seconds=0.01)
    status, answer = said(app, INFER, parts=[b"{", None])
    assert (status, "did not come within 0.01 s" in answer["error"]) == (408, True)


def test_a_token_is_asked_for_everywhere_but_of_health(tmp_path):
    app = served(tmp_path, Scaled(), token="secret")
    for headers in ([], [("Authorization", "Bearer secre")]):
        status, found, _ = asyncio.run(ask(app, "/v2/models/m", headers=headers))
        assert (status, found["www-authenticate"]) == (401, "Bearer")
        assert said(app, "/metrics", headers=headers)[0] == 401
    given = [("Authorization", "Bearer secret")]
    assert said(app, INFER, tensor(), headers=given)[0] == 200
    assert said(app, "/v2/health/live") == (200, {"live": True})
    assert said(app, "/v2/health/ready") == (200, {"ready": True})


def test_metrics_count_answers_and_no_name_that_a_client_made_up(app):
    said(app, INFER, tensor())
    said(app, INFER, {"inputs": []})
    said(app, "/v2/models/made-up/infer", {})
    status, headers, text = asyncio.run(ask(app, "/metrics"))
    assert (status, "text/plain" in headers["content-type"]) == (200, True)
    found = numbers(text.decode())
    assert found['tfamp_requests_total{model="m",status="200"}'] == 1
    assert found['tfamp_requests_total{model="m",status="400"}'] == 1
    assert found['tfamp_requests_total{model="",status="404"}'] == 1
    assert found['tfamp_batch_examples_count{model="m"}'] == 1
    assert found['tfamp_batch_examples_bucket{le="1.0",model="m"}'] == 0
    assert found['tfamp_batch_examples_bucket{le="+Inf",model="m"}'] == 1
    assert found['tfamp_queue_requests{model="m"}'] == 0
    assert found["process_resident_memory_bytes"] > 1e6
    assert b"made-up" not in text


def test_servers_of_others_start_and_stop_it_whether_or_not_it_has_a_token(tmp_path):
    app = served(tmp_path, Scaled(), token="secret")
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent = []

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message["type"])

    asyncio.run(app({"type": "lifespan", "state": {}}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


OPEN = TensorSpec("x", (None, None), "float32")


def asked_for(x):
    return tensor(x.ravel().tolist(), shape=list(x.shape))


class Held(Scaled):
    """Waits in each run while it is held, so that requests queue up."""

    def __init__(self, **options):
        super().__init__(**options)
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()

    def hold(self):
        self.batches.clear()
        self.begun.clear()
        self.go.clear()

    def run(self, inputs):
        self.begun.set()
        assert self.go.wait(20)
        return super().run(inputs)


def queued(folder, model, inputs, **limits):
    """Returns statuses and outputs of requests that came while a first was computed."""
    app = served(folder, model, **limits)
    model.hold()

    async def waiting(number):
        found = -1
        while found != number:
            await asyncio.sleep(0)
            _, _, text = await ask(app, "/metrics")
            found = numbers(text.decode())['tfamp_queue_requests{model="m"}']

    async def main():
        one = np.zeros((1, 3), np.float32)
        asked = [asyncio.create_task(ask(app, INFER, asked_for(one)))]
        await asyncio.to_thread(model.begun.wait, 20)
        for number, each in enumerate(inputs, 2):
            asked.append(asyncio.create_task(ask(app, INFER, asked_for(each))))
            await waiting(number)
        model.go.set()
        found = await asyncio.gather(*asked)
        await waiting(0)
        return [(status, json.loads(text)) for status, _, text in found[1:]]

    found = []
    for status, answer in asyncio.run(main()):
        if status == 200:
            (output,) = answer["outputs"]
            found.append((status, np.reshape(output["data"], output["shape"])))
        else:
            found.append((status, answer["error"]))
    return found


def rows(*lengths, width=3):
    rng = np.random.default_rng(0)
    return [rng.integers(-99, 99, (n, width)).astype(np.float32) for n in lengths]


WAITING = {
    # The fifth fits into what the fourth has left, and no run is larger than eight.
    "one shape": ({}, rows(1, 2, 1, 3, 1, 2), [1, 8, 2]),
    "more than a batch": ({}, rows(1, 20, 1), [1, 2, 20]),
    "other shapes": (
        {"inputs": (OPEN,)},
        [*rows(1, 1), *rows(1, 2, width=5), *rows(1)],
        [1, 3, 3],
    ),
}


@pytest.mark.parametrize("how, inputs, batches", WAITING.values(), ids=WAITING)
def test_what_waits_shares_a_run_and_each_gets_its_own(how, inputs, batches, tmp_path):
    model = Held(**how)
    found = queued(tmp_path, model, inputs, max_batch_size=8)
    assert model.batches == batches
    for x, (status, answer) in zip(inputs, found, strict=True):
        assert status == 200
        np.testing.assert_array_equal(answer, 2 * x)


ENDS = {
    "memory": (MemoryError("Unable to allocate"), 503, "There is no memory for 2"),
    "an error": (RuntimeError("lost"), 400, "RuntimeError: lost"),
    "exit": (SystemExit("done"), 400, "does not take these inputs: SystemExit"),
    "no more": (StopIteration(), 400, "does not take these inputs"),
}


@pytest.mark.parametrize("end, status, said", ENDS.values(), ids=ENDS)
def test_whatever_a_run_raises_the_others_are_answered(end, status, said, tmp_path):
    model = Held()
    run = model.run

    def failing(inputs):
        if (inputs["x"] == 7).any() or len(inputs["x"]) > 2:
            raise end
        return run(inputs)

    model.run = failing
    inputs = rows(1, 2, 1)
    inputs[1][:] = 7
    found = queued(tmp_path, model, inputs)
    assert found[1][0] == status and said in found[1][1]
    for which in (0, 2):
        np.testing.assert_array_equal(found[which][1], 2 * inputs[which])


def test_a_full_queue_refuses_and_says_when_to_come_back(tmp_path):
    model = Held()
    app = served(tmp_path, model, max_queue=2)
    body = asked_for(rows(1)[0])
    model.hold()

    async def main():
        first = [asyncio.create_task(ask(app, INFER, body)) for _ in range(2)]
        await asyncio.to_thread(model.begun.wait, 20)
        refused = await ask(app, INFER, body)
        model.go.set()
        return refused, [(await one)[0] for one in first], await ask(app, INFER, body)

    (status, headers, text), first, after = asyncio.run(main())
    assert (status, headers["retry-after"]) == (503, "1")
    assert b"2 requests wait already" in text
    assert first == [200, 200] and after[0] == 200


def test_what_has_run_out_of_time_is_told_and_not_computed(tmp_path):
    model = Held()
    app = served(tmp_path, model, timeout_seconds=0.1)
    model.hold()

    async def main():
        asked = [ask(app, INFER, asked_for(rows(1)[0])) for _ in range(2)]
        late = await asyncio.gather(*asked)
        ready = await ask(app, "/v2/health/ready")
        model.go.set()
        found = await ask(app, INFER, asked_for(rows(1)[0]))
        return [each[0] for each in late], ready[0], found[0]

    # A run that does not end is not ready.
    assert asyncio.run(main()) == ([504, 504], 503, 200)
    assert len(model.batches) == 2


def test_requests_share_no_run_where_answers_depend_on_it(tmp_path, caplog):
    model = Held(is_by_example=False)
    with caplog.at_level(logging.WARNING, "tfamp.serve"):
        queued(tmp_path, model, rows(1, 1))
    assert model.batches == [1, 1, 1]
    (message,) = caplog.messages
    assert "answers requests one by one, as an answer would depend" in message
