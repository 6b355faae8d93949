"""Batches of the server: what shares a run, what does not, whose answer is whose."""

import asyncio
import json
import logging
import threading

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs tfamp[serve]")

from tests import served_models
from tests.served_models import Scaled
from tfamp.serving.runtimes.signature import TensorSpec
from tfamp.serving.server.batching import Batcher, warm_up
from tfamp.serving.server.main import application
from tfamp.serving.server.models import named_places
from tfamp.serving.server.protocol import Refusal

OPEN = TensorSpec("x", (None, None), "float32")


class Held(Scaled):
    """Waits in its first run until `go` is set, so that requests queue up."""

    def __init__(self, **options):
        super().__init__(**options)
        self.begun, self.go = threading.Event(), threading.Event()

    def run(self, inputs):
        self.begun.set()
        assert self.go.wait(20)
        return super().run(inputs)


def batcher(model, **options):
    options = {"max_batch_size": 8, "max_queue": 100, "timeout_seconds": 20} | options
    return Batcher(model, **options)


def queued(model, inputs, **options):
    """Returns the answers to requests that came while a first one was computed."""

    async def main():
        one = batcher(model, **options)
        first = one.ask({"x": np.zeros((1, 3), np.float32)})
        await asyncio.to_thread(model.begun.wait, 20)
        futures = [one.ask({"x": each}) for each in inputs]
        model.go.set()
        found = await asyncio.gather(first, *futures, return_exceptions=True)
        one.stop()
        return found[1:], one.num_waiting

    return asyncio.run(main())


def rows(*lengths, width=3):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(n, width)).astype(np.float32) for n in lengths]


def test_what_is_queued_shares_a_run_and_each_gets_its_own():
    model = Held()
    inputs = rows(1, 2, 1, 3, 1, 2)
    found, left = queued(model, inputs)
    # The fifth fits into what the fourth has left, and no run is larger than eight.
    assert (model.batches, left) == ([1, 8, 2], 0)
    for x, answer in zip(inputs, found, strict=True):
        np.testing.assert_array_equal(answer["y"], 2 * x)


def test_a_request_of_more_than_a_batch_goes_alone():
    model = Held()
    found, _ = queued(model, rows(1, 20, 1))
    assert (model.batches, [len(each["y"]) for each in found]) == (
        *([1, 2, 20],),
        [1, 20, 1],
    )


def test_other_shapes_go_apart_and_nothing_is_padded():
    model = Held(inputs=(OPEN,))
    inputs = [*rows(1, 1), *rows(1, 2, width=5), *rows(1)]
    found, _ = queued(model, inputs)
    assert model.batches == [1, 3, 3]
    for x, answer in zip(inputs, found, strict=True):
        np.testing.assert_array_equal(answer["y"], 2 * x)


def test_a_request_that_fails_spoils_no_other():
    model = Held()
    inputs = rows(1, 1, 1)
    inputs[1][:] = -1e6
    found, _ = queued(model, inputs)
    assert isinstance(found[1], RuntimeError)
    for which in (0, 2):
        np.testing.assert_array_equal(found[which]["y"], 2 * inputs[which])


def test_a_full_queue_refuses_and_says_when_to_come_back():
    async def main():
        model = Held()
        one = batcher(model, max_queue=2)
        x = {"x": np.zeros((1, 3), np.float32)}
        futures = [one.ask(x), one.ask(x)]
        with pytest.raises(Refusal, match="2 requests wait already") as caught:
            one.ask(x)
        model.go.set()
        await asyncio.gather(*futures)
        await one.ask(x)
        one.stop()
        return caught.value

    refusal = asyncio.run(main())
    assert (refusal.status_code, refusal.headers) == (503, {"retry-after": "1"})


def test_what_has_run_out_of_time_is_told_and_not_computed():
    async def main():
        model = Held()
        one = batcher(model, timeout_seconds=0.02)
        first = one.ask({"x": np.zeros((1, 3), np.float32)})
        await asyncio.to_thread(model.begun.wait, 20)
        second = one.ask({"x": np.zeros((1, 3), np.float32)})
        found = await asyncio.gather(first, second, return_exceptions=True)
        model.go.set()
        one.stop()
        await asyncio.to_thread(one._thread.join, 20)
        await asyncio.sleep(0)
        return found, model.batches, one.num_waiting

    found, batches, left = asyncio.run(main())
    assert [each.status_code for each in found] == [504, 504]
    assert (batches, left) == ([1], 0)


def test_a_stopped_queue_answers_what_it_has_and_takes_no_more():
    async def main():
        model = Held()
        one = batcher(model)
        x = np.ones((1, 3), np.float32)
        futures = [one.ask({"x": x}) for _ in range(3)]
        one.stop()
        with pytest.raises(Refusal, match="The server ends"):
            one.ask({"x": x})
        model.go.set()
        return await asyncio.gather(*futures)

    assert [each["y"].tolist() for each in asyncio.run(main())] == [[[2, 2, 2]]] * 3


class OneScale(Scaled):
    """Rounds to int8 by one scale for the batch, as dynamic quantisation may."""

    def run(self, inputs):
        x = inputs["x"]
        scale = np.abs(x).max() / 127
        return {"y": (np.round(x / scale) * scale).astype(np.float32)}


class Summed(Scaled):
    def run(self, inputs):
        return {"y": inputs["x"].sum(axis=0, keepdims=True)}


FIXED = TensorSpec("x", (1, 3), "float32")
JOINS = {
    "each row for itself": (Scaled(), ""),
    "open dimensions": (Scaled(inputs=(OPEN,)), ""),
    "one scale": (OneScale(), "'y' of an example changes with the others of its batch"),
    "no rows": (Summed(), "output 'y' has no row for each example"),
    "fixed batch": (Scaled(inputs=(FIXED,)), "its number of examples is fixed"),
}


@pytest.mark.parametrize("model, why", JOINS.values(), ids=JOINS)
def test_requests_share_a_run_only_where_no_answer_depends_on_it(model, why):
    found = warm_up(model)
    assert (found.joins, why in found.why) == (not why, True)
    assert found.inputs is not None


def served(path, load=served_models.load, **limits):
    return application([f"m={path}"], load=load, **limits).models["m"]


def test_where_answers_depend_on_a_batch_it_is_said_and_none_is_made(tmp_path, caplog):
    served_models.write(tmp_path, 2)
    with caplog.at_level(logging.WARNING, "tfamp.serve"):
        model = served(tmp_path, load=lambda _: OneScale())
    assert model.batcher._max_batch_size == 1
    assert "answers requests one by one, as output 'y'" in caplog.messages[0]
    assert served(tmp_path).batcher._max_batch_size == 64
    chosen = served(tmp_path, load=lambda _: OneScale(), max_batch_size=7)
    assert chosen.batcher._max_batch_size == 7


def test_of_numbered_versions_the_newest_is_served(tmp_path):
    for number in (2, 10):
        served_models.write(tmp_path / "m" / f"{number:03}", number)
    model = served(tmp_path / "m")
    assert (model.version, model.model.factor) == ("10", 10)


def test_a_folder_of_models_is_served_by_the_names_in_it(tmp_path):
    served_models.write(tmp_path / "digits", 2)
    served_models.write(tmp_path / "faces" / "1", 3)
    served_models.write(tmp_path / "faces" / "4", 5)
    (tmp_path / "notes").mkdir()
    found = application([str(tmp_path)], load=served_models.load).models
    assert {name: (m.version, m.model.factor) for name, m in found.items()} == {
        "digits": ("1", 2),
        "faces": ("4", 5),
    }


def test_a_run_that_no_memory_is_left_for_is_told_to_come_back():
    model = Held()
    run = model.run

    def short_of_memory(inputs):
        if len(inputs["x"]) > 1:
            raise MemoryError("Unable to allocate")
        return run(inputs)

    model.run = short_of_memory
    inputs = rows(1, 2, 1)
    found, left = queued(model, inputs)
    assert (found[1].status_code, left) == (503, 0)
    for which in (0, 2):
        np.testing.assert_array_equal(found[which]["y"], 2 * inputs[which])


ENDS = {
    "exit": SystemExit("done"),
    "no more": StopIteration(),
    "panic": GeneratorExit(),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_whatever_a_run_raises_the_next_one_is_answered(end):
    model = Held()
    run = model.run

    def failing(inputs):
        if (inputs["x"] == 7).any():
            raise end
        return run(inputs)

    model.run = failing
    inputs = rows(1, 1)
    inputs[0][:] = 7
    found, left = queued(model, inputs)
    assert isinstance(found[0], RuntimeError) and left == 0
    np.testing.assert_array_equal(found[1]["y"], 2 * inputs[1])


def test_a_run_that_does_not_end_is_not_ready(tmp_path):
    async def main():
        model = Held()
        model.go.set()
        served_models.write(tmp_path, 2)
        one = served(tmp_path, load=lambda _: model, timeout_seconds=0.02)
        assert await one.is_ready()
        model.go.clear()
        with pytest.raises(Refusal, match="No answer within 0.02 s"):
            await one.ask({"x": np.zeros((1, 3), np.float32)})
        found = await one.is_ready()
        model.go.set()
        one.batcher.stop()
        return found

    assert asyncio.run(main()) is False


def test_names_of_models_are_those_of_their_folders_or_typed(tmp_path):
    digits = served_models.write(tmp_path / "digits", 2)
    found = named_places([str(digits), f"other={digits}"])
    assert list(found) == ["digits", "other"]
    (tmp_path / "empty").mkdir()
    wrong = {
        "Two models are called 'digits'": [str(digits), str(digits)],
        "is called 'a/b'; expected letters": [f"a/b={digits}"],
        "holds neither export.json nor folders with it": [str(tmp_path / "empty")],
        "names 1 models": [f"all={tmp_path}"],
        "There is no folder": [str(tmp_path / "none")],
        "is a file; expected a folder": [str(digits / "export.json")],
    }
    for message, paths in wrong.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            named_places(paths)


def test_a_model_that_fails_at_its_own_signature_is_not_served(tmp_path):
    served_models.write(tmp_path, 2)
    model = Scaled()
    model.run = lambda inputs: json.loads("{")
    with pytest.raises(RuntimeError, match="^Model 'm' in .* cannot be loaded"):
        served(tmp_path, load=lambda _: model)
