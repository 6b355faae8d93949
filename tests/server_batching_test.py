"""Batches of the server: what shares a run, what does not, whose answer is whose."""

import asyncio
import json
import logging
import threading

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs tfamp[serve]")

from tests import served_models
from tests.served_models import Scaled, ask, numbers
from tfamp.serving.runtimes.signature import TensorSpec
from tfamp.serving.server.main import application

OPEN = TensorSpec("x", (None, None), "float32")
INFER = "/v2/models/m/infer"


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


def served(folder, model, **limits):
    served_models.write(folder, 2)
    return application([f"m={folder}"], load=lambda _: model, **limits)


def asked_for(x):
    entry = {"name": "x", "datatype": "FP32", "shape": list(x.shape)}
    return {"inputs": [{**entry, "data": x.ravel().tolist()}]}


def queued(folder, model, inputs, **limits):
    """Returns statuses and outputs of requests that came while a first was computed."""
    app = served(folder, model, **limits)
    model.hold()

    async def waiting(number):
        name = 'tfamp_queue_requests{model="m"}'
        while True:
            await asyncio.sleep(0)
            _, _, text = await ask(app, "/metrics")
            if numbers(text.decode())[name] == number:
                return

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

    return [
        (
            status,
            np.reshape(answer["outputs"][0]["data"], answer["outputs"][0]["shape"]),
        )
        if status == 200
        else (status, answer["error"])
        for status, answer in asyncio.run(main())
    ]


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
    model = Held()
    model.is_by_example = False
    with caplog.at_level(logging.WARNING, "tfamp.serve"):
        queued(tmp_path, model, rows(1, 1))
    assert model.batches == [1, 1, 1]
    (message,) = caplog.messages
    assert "answers requests one by one, as an answer would depend" in message
