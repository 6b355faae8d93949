"""The guide to the tf.data service: its code runs, and loses and doubles nothing."""

import re
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.data_distribute_test import FEATURES, write_records
from tfamp.data import Pipeline

GUIDE = (Path(__file__).parents[1] / "docs/data_service.md").read_text("utf-8")
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


def test_workers_parse_tfrecords_without_python(tmp_path):
    files = str(write_records(tmp_path, [20]) / "*.tfrecord")
    pipeline = Pipeline.from_tfrecord(files, features=FEATURES, num_examples=None)
    dataset = pipeline.map(lambda element: 2 * element["x"]).build()
    assert b"PyFunc" not in dataset._as_serialized_graph().numpy()
    names: dict = {}
    exec(BLOCKS[0].partition("dispatcher, workers = ")[0], names)
    dispatcher, workers = names["start"](2)
    mode = names["service"].ShardingPolicy.DYNAMIC
    remote = dataset.apply(names["service"].distribute(mode, dispatcher.target))
    assert sorted(map(int, remote)) == list(range(0, 40, 2))
    assert len(workers) == 2
