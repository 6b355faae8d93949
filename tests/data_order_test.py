"""The order stages run in: by position or on a stream, in chunks, with care."""

import numpy as np
import pytest
import tensorflow as tf

from tests.data_pipeline_test import table_stages
from tfamp.data import Pipeline


def uneven():
    """Eight pairs: six of class 0, two of class 1."""
    return Pipeline.from_arrays(np.arange(8), np.array([0] * 6 + [1] * 2))


def labels(dataset):
    return sorted(int(y) for _, y in dataset)


@pytest.fixture
def images(tmp_path):
    """Two classes of gray JPEGs, of which the second cat is cut short."""
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for shade in range(4):
            pixels = np.full((24, 20, 3), 100 * number + 20 * shade, np.uint8)
            jpeg = tf.io.encode_jpeg(pixels).numpy()
            (tmp_path / name / f"{shade}.jpg").write_bytes(jpeg)
    broken = tmp_path / "cat" / "1.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    return tmp_path


@pytest.mark.parametrize("is_cached", [False, True], ids=["positions", "cache"])
def test_behind_a_cache_balance_repeats_what_was_cached(tmp_path, is_cached):
    pipeline, stages = uneven(), ["source", "balance", "gather", "threads"]
    if is_cached:
        pipeline = pipeline.map(lambda x, y: (x, y)).cache(tmp_path / "train")
        stages = ["source", "map", "cache", "balance", "threads"]
    pipeline = pipeline.balance(seed=1)
    assert table_stages(pipeline.describe()) == stages
    dataset = pipeline.build()
    assert int(dataset.cardinality()) == 8
    assert labels(dataset) == [0] * 4 + [1] * 4


def test_images_are_shuffled_as_paths_and_decoded_to_uint8(images, caplog):
    pipeline = Pipeline.from_images(images).decode((8, 8)).shuffle(seed=1).batch(4)
    stages = ["source", "shuffle", "gather", "decode", "batch", "threads"]
    assert table_stages(pipeline.describe()) == stages
    careful = pipeline.on_error("skip", max_fraction=0.2)
    batches = list(careful.build())
    assert [x.dtype for x, _ in batches] == [tf.uint8, tf.uint8]
    assert [x.shape for x, _ in batches] == [(4, 8, 8, 3), (3, 8, 8, 3)]
    (skipped,) = careful.skipped
    assert skipped.where == str(images / "cat" / "1.jpg")
    assert "jpeg::Uncompress failed" in skipped.message
    assert "[Op:" not in skipped.message
    shades = {}
    for x, y in batches:
        for image, label in zip(x.numpy(), y.numpy(), strict=True):
            shades.setdefault(int(label), []).append(round(image.mean() / 20))
    assert sorted(shades[0]) == [0, 2, 3]
    assert sorted(shades[1]) == [5, 6, 7, 8]


def test_rows_that_nothing_looks_at_go_from_chunks_to_batches(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,y\n" + "".join(f"{i},{i % 3}\n" for i in range(10)))
    pipeline = Pipeline.from_csv(path, label="y").batch(4)
    assert "from chunks" in pipeline.describe()
    dataset = pipeline.build()
    assert int(dataset.cardinality()) == 3
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [x["a"].numpy().tolist() for x, _ in dataset] == batches
    by_row = Pipeline.from_csv(path, label="y").map(lambda x, y: (x["a"], y)).batch(4)
    assert "from chunks" not in by_row.describe()
    assert [x.numpy().tolist() for x, _ in by_row.build()][2] == [8, 9]
