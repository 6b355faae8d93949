"""Batches of the server: what shares a run, what does not, whose answer is whose."""

import asyncio
import json
import logging
import threading

import numpy as np
import pytest

pytest.importorskip("orjson", reason="needs tfamp[serve]")

from tests import served_models
from tests.served_models import Scaled
from tfamp.serving.runtimes.signature import TensorSpec
from tfamp.serving.server.batching import Batcher, warm_up
from tfamp.serving.server.models import Limits, Models, named_places
from tfamp.serving.server.tensors import Refusal

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
        with pytest.raises(Refusal, match="^2 requests wait already") as caught:
            one.ask(x)
        model.go.set()
        await asyncio.gather(*futures)
        await one.ask(x)
        one.stop()
        return caught.value

    refusal = asyncio.run(main())
    assert (refusal.status, refusal.retry) == (503, True)


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
    assert [each.status for each in found] == [504, 504]
    assert (batches, left) == ([1], 0)


def test_a_stopped_queue_answers_what_it_has_and_takes_no_more():
    async def main():
        model = Held()
        one = batcher(model)
        x = np.ones((1, 3), np.float32)
        futures = [one.ask({"x": x}) for _ in range(3)]
        one.stop()
        with pytest.raises(Refusal, match="^This version of the model is going"):
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


def models_of(path, load=served_models.load, **limits):
    models = Models({"m": path}, load, Limits(**limits))
    models.load_all()
    return models


def factors(models):
    return {n: models.get("m", n).model.factor for n in models.numbers("m")}


def looked(models, times=2):
    """Looks for changes, with the event loop taking up what was found."""

    async def main():
        loop = asyncio.get_running_loop()
        for _ in range(times):
            await asyncio.to_thread(models.look, loop)
        await asyncio.sleep(0)

    asyncio.run(main())


def test_versions_come_change_and_go(tmp_path):
    for number in (2, 10):
        served_models.write(tmp_path / str(number), number)
    models = models_of(tmp_path)
    assert factors(models) == {"2": 2, "10": 10}
    assert models.get("m").number == "10"
    served_models.write(tmp_path / "11", 11)
    looked(models, times=1)
    assert "11" not in factors(models)  # It might be half there.
    looked(models, times=1)
    assert (models.get("m").number, len(factors(models))) == ("11", 3)
    served_models.write(tmp_path / "11", 12)
    (tmp_path / "2" / "export.json").unlink()
    looked(models)
    assert factors(models) == {"10": 10, "11": 12}


def test_what_cannot_be_loaded_leaves_what_was_there(tmp_path, caplog):
    served_models.write(tmp_path, 2)
    models = models_of(tmp_path)
    (tmp_path / "export.json").write_text("{")
    looked(models, times=4)
    assert factors(models) == {"1": 2}
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("Version 1 of model 'm' in ")
    (tmp_path / "export.json").unlink()
    looked(models)
    assert factors(models) == {"1": 2}
    served_models.write(tmp_path, 3)
    looked(models)
    assert factors(models) == {"1": 3}


def test_where_answers_depend_on_a_batch_it_is_said_and_none_is_made(tmp_path, caplog):
    served_models.write(tmp_path, 2)
    with caplog.at_level(logging.WARNING, "tfamp.serve"):
        models = models_of(tmp_path, load=lambda _: OneScale())
    assert models.get("m").batcher._max_batch_size == 1
    assert "answers requests one by one, as output 'y'" in caplog.messages[0]
    assert models_of(tmp_path).get("m").batcher._max_batch_size == 64
    chosen = models_of(tmp_path, load=lambda _: OneScale(), max_batch_size=7)
    assert chosen.get("m").batcher._max_batch_size == 7


def test_names_of_models_are_those_of_their_folders_or_typed(tmp_path):
    digits = served_models.write(tmp_path / "digits", 2)
    found = named_places([str(digits), f"other={digits}"])
    assert list(found) == ["digits", "other"]
    wrong = {
        "Two models are called 'digits'": [str(digits), str(digits)],
        "is called 'a/b'; expected letters": [f"a/b={digits}"],
        "holds neither export.json nor numbered folders": [str(tmp_path)],
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
    with pytest.raises(RuntimeError, match="^Version 1 of model 'm' in .* cannot be"):
        models_of(tmp_path, load=lambda _: model)
