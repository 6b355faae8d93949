"""`Pipeline.service` and its guide: the code runs, and loses and doubles nothing."""

import concurrent.futures
import json
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.data_distribute_test import FEATURES, NUM, write_records
from tests.refusals import refusals
from tfamp.callbacks import Resume
from tfamp.data import Pipeline, Tally, coverage, tally
from tfamp.data.stages import workers

GUIDE = (Path(__file__).parents[1] / "docs/data_service.md").read_text("utf-8")
_KEPT: list = []
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def test_the_guide_decodes_every_image_once_an_epoch(tmp_path, monkeypatch):
    for name in ("cats", "dogs"):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(5):
            pixels = np.full((8, 8, 3), 10 * number, np.uint8)
            tf.io.write_file(str(folder / f"{number}.png"), tf.io.encode_png(pixels))
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(BLOCKS[0], names)
    expected = [(10 * n, label) for label in (0, 1) for n in range(5)]
    for _ in range(2):
        pairs = [
            (int(image[0, 0, 0]), int(label))
            for images, labels in names["train"]
            for image, label in zip(images, labels, strict=True)
        ]
        assert sorted(pairs, key=lambda pair: pair[::-1]) == expected


@pytest.fixture(scope="module")
def address():
    """The address of a dispatcher with two workers."""
    names: dict = {}
    exec(BLOCKS[0].partition("dispatcher, workers = ")[0], names)
    dispatcher, workers = names["start"](2)
    yield dispatcher.target
    # With readers' iterators alive, workers take seconds to end: the process ends them.
    _KEPT.extend([dispatcher, *workers])


def records(folder, **arguments):
    """Returns the pipeline of 0 to 26, in files of 5, 13 and 9."""
    (folder / "records").mkdir(exist_ok=True)
    files = str(write_records(folder / "records") / "*.tfrecord")
    pipeline = Pipeline.from_tfrecord(files, features=FEATURES, **arguments)
    return pipeline.map(lambda element: element["x"])


def numbers(folder):
    return Pipeline.from_arrays(np.arange(NUM)).map(lambda x: x)


whole = pytest.mark.whole("readers of records show how a source is divided")


@pytest.mark.parametrize(
    "make, num_readers",
    [
        pytest.param(numbers, 2, marks=whole),
        (records, 3),
        pytest.param(numbers, 3, marks=whole),
        pytest.param(records, 2, marks=whole),
    ],
    ids=["arrays-2", "records-3", "arrays-3", "records-2"],
)
def test_readers_have_each_example_once_and_evenly(
    tmp_path, address, make, num_readers
):
    pipeline = make(tmp_path)
    readers = [
        pipeline.shard(num_readers, index).service(address).shuffle().batch(4)
        for index in range(num_readers)
    ]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        tallies = list(pool.map(tally, readers))
    found = coverage(tallies, pipeline)
    assert found.is_exact, found
    # Of each of the three files, one may have one more.
    assert max(found.sizes) - min(found.sizes) <= (1 if make is numbers else 2)


def test_the_length_is_known_and_watched(tmp_path, address):
    for pipeline in (numbers(tmp_path), records(tmp_path)):
        dataset = pipeline.service(address).batch(10).build()
        assert int(dataset.cardinality()) == 3
        assert b"PyFunc" not in dataset._as_serialized_graph().numpy()
    given = Pipeline.from_dataset(tf.data.Dataset.range(27).take(10))
    # Two workers would each take ten of their parts.
    with pytest.raises(tf.errors.OpError, match="expected to contain 10 elements"):
        list(given.service(address).build())


@whole
def test_another_process_reads_its_part(tmp_path, address):
    pipeline = numbers(tmp_path)
    code = """
import sys
from pathlib import Path
from tests.data_service_test import numbers, tally
own = numbers(Path("unused")).shard(2, 1).service(sys.argv[1])
tally(own.batch(4)).to_json(sys.argv[2])
"""
    out = tmp_path / "1.json"
    command = [sys.executable, "-c", code, address, str(out)]
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True, timeout=120)
    readers = [pipeline.shard(2, 0).service(address), out]
    assert coverage(readers, pipeline).is_exact


def test_workers_that_train_together_need_parts(tmp_path, address, monkeypatch):
    monkeypatch.setattr(workers, "num_workers", lambda: 2)
    message = "`.service` brings elements in the order in which they are ready, and 2 "
    with pytest.raises(ValueError, match=re.escape(message)):
        numbers(tmp_path).service(address).build()
    built = numbers(tmp_path).shard(2, 0).service(address).build()
    policy = built.options().experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.OFF


def test_a_resumed_training_is_told_that_the_order_is_not_its_own(tmp_path, address):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((4, 1), "float32")
    dataset = Pipeline.from_arrays(x, x).service(address).batch(2).build()
    resume = Resume(tmp_path, every_steps=1)
    model.fit(dataset, verbose=0, callbacks=[resume])
    assert "a data service brings elements in the order" in resume.notes[0]


def given():
    return Pipeline.from_dataset(tf.data.Dataset.range(9))


def python(x):
    return tf.numpy_function(lambda value: value, [x], tf.int64)


ADDRESS = "127.0.0.1:1"
test_what_does_not_go_with_a_service_is_refused = refusals(
    {
        "no address": (
            lambda: given().service("host"),
            "`address` is 'host'; expected",
        ),
        "a number": (
            lambda: given().service(5),
            "`address` is 5, of type int",
            TypeError,
        ),
        "nobody there": (
            lambda: given().service(ADDRESS).build(),
            f"`.service('{ADDRESS}')` has no dispatcher: host answers, nothing listens",
        ),
        "shard of a dataset": (
            lambda: given().shard(2, 0).service(ADDRESS).build(),
            "`.shard` of this source does not go with `.service`",
        ),
        "skipped errors": (
            lambda: given().map(python).on_error("skip").service(ADDRESS).build(),
            "`.on_error` and `.service` came together",
        ),
        "Python": (
            lambda: given().map(python).service(ADDRESS).build(),
            "A step before `.service` runs Python",
        ),
    }
)


def test_the_plan_shows_what_runs_there(tmp_path, capsys):
    text = numbers(tmp_path).shard(2, 0).shuffle().service(ADDRESS).describe()
    rows = [line for line in text.splitlines()[2:] if not line.startswith("   ")]
    stages = [line.split()[0] for line in rows]
    assert stages == ["source", "shard", "map", "service", "shuffle", "threads"]
    assert "14 elements" in text


def test_lost_doubled_and_strange_examples_are_counted(tmp_path):
    everything = np.array([1, 2, 2, 3])
    first, second = np.array([1, 1, 2]), np.array([9, 2])
    tally(first).to_json(tmp_path / "0.json")
    assert sum(json.loads((tmp_path / "0.json").read_text())["counts"].values()) == 3
    found = coverage([tmp_path / "0.json", tally(second)], everything)
    assert (found.num_lost, found.num_doubled, found.num_strange) == (1, 1, 1)
    assert str(found) == ("4 examples in parts of 3, 2: 1 lost, 1 doubled, 1 not of it")
    # Values, dtypes and places all count.
    pairs = [(np.array([[1, 2]]), np.array([[2, 1]]))]
    pairs += [(np.array([1]), np.array([1.0])), (np.array(["ab"]), np.array(["a"]))]
    for one, other in pairs:
        assert tally(one) != tally(other)
    texts = tf.data.Dataset.from_tensor_slices(["ab", "c"])
    assert tally(np.array(["ab", "c"])) == tally(texts.batch(2))
    assert isinstance(tally(texts), Tally)
