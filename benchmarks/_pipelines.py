"""Every way to read the same files and arrays, for `pipeline.py` to compare."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp

SIZE = (224, 224)
BATCH = 32
ROW_BATCH = 256
NUM_COLUMNS = 20
NUM_CLASSES = 4


def write_images(folder: Path, number: int) -> list[str]:
    """Writes JPEGs of a photo's size and detail, one folder a class."""
    rng = np.random.default_rng(0)
    paths = []
    for index in range(number):
        height, width = rng.integers(200, 260, 2)
        coarse = rng.normal(128, 60, (height // 12 + 1, width // 12 + 1, 3))
        smooth = tf.image.resize(coarse, (height, width), method="bicubic")
        pixels = smooth + rng.normal(0, 2.5, (height, width, 3))
        encoded = tf.io.encode_jpeg(tf.cast(tf.clip_by_value(pixels, 0, 255), tf.uint8))
        place = folder / str(index % NUM_CLASSES) / f"{index:05}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(encoded.numpy())
        paths.append(str(place))
    return sorted(paths)


def write_rows(path: Path, number: int) -> Path:
    """Writes a table of floats with a header and an integer target."""
    values = np.random.default_rng(1).normal(size=(number, NUM_COLUMNS))
    names = [f"x{column}" for column in range(NUM_COLUMNS)]
    with open(path, "w", encoding="utf-8") as file:
        file.write(",".join([*names, "y"]) + "\n")
        for number, row in enumerate(values):
            cells = [f"{value:.5f}" for value in row]
            file.write(",".join([*cells, str(number % NUM_CLASSES)]) + "\n")
    return path


def label_of(path: tf.Tensor) -> tf.Tensor:
    """Returns the class, which is the name of the folder."""
    return tf.strings.to_number(tf.strings.split(path, os.sep)[-2], tf.int32)


def read_as_float(path: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Reads an image as tutorials do: float32 in 0 to 1."""
    image = tf.image.decode_jpeg(tf.io.read_file(path), channels=3)
    return tf.image.resize(image, SIZE) / 255.0, label_of(path)


def read_as_uint8(path: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Reads an image to be scaled in the model."""
    image = tf.image.decode_jpeg(tf.io.read_file(path), channels=3)
    resized = tf.round(tf.image.resize(image, SIZE))
    return tf.saturate_cast(resized, tf.uint8), label_of(path)


def naive(paths: list[str], optimised: bool) -> tf.data.Dataset:
    """Returns the pipeline that one writes first."""
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    dataset = dataset.map(read_as_float).batch(BATCH)
    if optimised:
        return dataset
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    return dataset.with_options(options)


def hand_tuned(paths: list[str], cores: int) -> tf.data.Dataset:
    """Returns the best that we know to write without tfamp."""
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    dataset = dataset.map(read_as_uint8, num_parallel_calls=cores)
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = cores
    return dataset.batch(BATCH).prefetch(2).with_options(options)


def cast_on_cpu(
    images: tf.data.Dataset, cores: int, *, by_batch: bool
) -> tf.data.Dataset:
    """Returns batches scaled by the pipeline rather than by the model."""
    if by_batch:
        images = images.batch(BATCH)
    scaled = images.map(
        lambda x, y: (tf.cast(x, tf.float32) / 255.0, y), num_parallel_calls=cores
    )
    return (scaled if by_batch else scaled.batch(BATCH)).prefetch(2)


def image_sides(folder: Path, paths: list[str], cores: int) -> dict[str, Iterable]:
    """Returns every way to read the image files, by name."""
    start = tfamp.data.Pipeline.from_images(folder)
    pipeline = start.batch(BATCH).prefetch()
    decoded = pipeline.decode(SIZE)
    cached = decoded.cache("memory").build()
    reshuffled = decoded.cache("memory").shuffle(seed=1).build()
    images = start.decode(SIZE).cache("memory").shuffle(seed=1).build()
    scale = tf.function(tfamp.data.Rescale(1 / 255))

    class AndCast:
        def __iter__(self) -> Iterator[Any]:
            return ((scale(x), y) for x, y in cached)

    sides: dict[str, Iterable] = {
        "naive, not optimised": naive(paths, optimised=False),
        "naive": naive(paths, optimised=True),
        "hand-tuned": hand_tuned(paths, cores),
        "Keras's loader": keras.utils.image_dataset_from_directory(
            folder, batch_size=BATCH, image_size=SIZE, shuffle=False, verbose=False
        ),
        "tfamp": decoded.build(),
        "tfamp, memory cache": cached,
        "tfamp, memory cache and cast": AndCast(),
        "tfamp, file cache": decoded.cache(folder.parent / "cache").build(),
        "tfamp, reshuffled cache": reshuffled,
        "the same, cast on the CPU": cast_on_cpu(images, cores, by_batch=False),
        "the same, cast by batches": cast_on_cpu(images, cores, by_batch=True),
    }
    return sides


def row_by_row(path: Path) -> tf.data.Dataset:
    """Returns rows parsed one at a time, as tutorials do."""
    defaults = [[0.0]] * NUM_COLUMNS + [[0]]

    def parse(line: tf.Tensor) -> tuple[Any, tf.Tensor]:
        *columns, label = tf.io.decode_csv(line, defaults)
        return {f"x{index}": value for index, value in enumerate(columns)}, label

    return tf.data.TextLineDataset(str(path)).skip(1).map(parse).batch(ROW_BATCH)


def row_sides(path: Path) -> dict[str, Iterable]:
    """Returns every way to read the table, by name."""
    rows = tfamp.data.Pipeline.from_csv(path, label="y").batch(ROW_BATCH).prefetch()
    return {
        "CSV row by row": row_by_row(path),
        "make_csv_dataset": tf.data.experimental.make_csv_dataset(
            str(path), ROW_BATCH, label_name="y", num_epochs=1, shuffle=False
        ),
        "tfamp, CSV": rows.build(),
    }


def plan_sides(number: int) -> dict[str, Iterable]:
    """Returns arrays read in order and by each kind of plan."""
    rng = np.random.default_rng(2)
    features = rng.normal(size=(number, 8)).astype(np.float32)
    labels = (rng.random(number) < 0.1).astype(np.int32)
    start = tfamp.data.Pipeline.from_arrays(features, labels).batch(ROW_BATCH)
    return {
        "arrays": start.build(),
        "arrays, balanced": start.balance(seed=1).build(),
        "arrays, weighted": start.weights(labels + 0.1, seed=1).build(),
        "arrays, weighted without replacement": start.weights(
            labels + 0.1, replacement=False, num_examples=number // 2, seed=1
        ).build(),
    }
