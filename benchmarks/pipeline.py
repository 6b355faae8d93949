"""What `tfamp.data` makes of image files, CSV and sampling plans.

Prints examples/s of each pipeline and how many times as fast tfamp's is as another way
to write the same: naive and hand-tuned tf.data, and Keras's loader.

Time: about ten minutes on two CPU cores. Use an idle machine.

Images and tables are made here, of random content. The sides live in one process and
take turns, each reading one epoch, timed from its start to its last batch; a ratio is
the median over the turns, its spread the 90 % bootstrap interval. No disk is measured.
"""

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from benchmarks._runner import ratio, take_turns

# What a pipeline is compared with, and how many times as fast it has to be.
GOALS = {
    ("tfamp", "naive, not optimized"): 2.0,
    ("tfamp", "naive"): None,
    ("tfamp", "hand-tuned"): 0.97,
    ("tfamp", "Keras's loader"): None,
    ("tfamp, memory cache", "naive, not optimized"): 10.0,
    ("tfamp, file cache", "naive, not optimized"): 6.5,
    ("tfamp, memory cache and cast", "naive, not optimized"): None,
    ("tfamp, reshuffled cache", "the same, cast on the CPU"): 5.0,
    ("tfamp, reshuffled cache", "the same, cast by batches"): None,
    ("tfamp, CSV", "CSV row by row"): 8.0,
    ("tfamp, CSV", "make_csv_dataset"): None,
}
FLAGS = (
    ("integer", "turns", 15, "Turns of each side."),
    ("integer", "images", 2000, "Image files."),
    ("integer", "rows", 200_000, "Rows of CSV."),
)
SIZE = (224, 224)
BATCH = 32
ROW_BATCH = 256
NUM_COLUMNS = 20
NUM_CLASSES = 4


class Epochs:
    """Reads a side epoch by epoch, the first of which is not timed."""

    def __init__(self, side: Iterable) -> None:
        self.side = side
        self.num_batches = sum(1 for _ in side)
        self.seconds: list[float] = []

    def __call__(self) -> float:
        """Reads one epoch and returns its seconds."""
        start = time.perf_counter()
        iterator = iter(self.side)
        for _ in range(self.num_batches):
            next(iterator)
        self.seconds.append(time.perf_counter() - start)
        if next(iterator, None) is not None:
            raise RuntimeError(f"{self.side!r} has more batches in a later epoch.")
        return self.seconds[-1]


def read(sides: dict[str, Iterable], turns: int) -> dict[str, Epochs]:
    """Returns the sides after `turns` epochs of each."""
    epochs = {name: Epochs(side) for name, side in sides.items()}
    take_turns(list(epochs.values()), turns)
    return epochs


def ratios(epochs: dict[str, Epochs]) -> dict[str, dict[str, Any]]:
    """Returns how many times as fast as others tfamp's pipelines are."""
    figures = {}
    for (ours, other), goal in GOALS.items():
        if ours in epochs and other in epochs:
            seconds = [np.array(epochs[name].seconds) for name in (other, ours)]
            found = ratio(*seconds)
            met = goal is None or found["ratio"] >= goal
            figures[f"{ours} / {other}"] = {**found, "goal": goal, "met": met}
    return figures


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


def naive(paths: list[str], optimized: bool) -> tf.data.Dataset:
    """Returns the pipeline that one writes first."""
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    dataset = dataset.map(read_as_float).batch(BATCH)
    if optimized:
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
        "naive, not optimized": naive(paths, optimized=False),
        "naive": naive(paths, optimized=True),
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


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    turns, images, rows = settings.turns, settings.images, settings.rows
    if settings.smoke:
        turns, images, rows = 2, 40, 600
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "images")
        paths = write_images(folder, images)
        table = write_rows(Path(name, "rows.csv"), rows)
        epochs = read(image_sides(folder, paths, cores), turns)
        epochs |= read(row_sides(table), turns)
    rates = {
        name: round((rows if "csv" in name.lower() else images) / np.median(s.seconds))
        for name, s in epochs.items()
    }
    made = {"images": images, "rows": rows, "turns": turns}
    return {**made, "rates": rates, "ratios": ratios(epochs)}
