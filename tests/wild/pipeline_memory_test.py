"""Memory of input pipelines: builds that are let go, and buffers of small elements.

Each program runs in a process of its own and prints MiB, by what the system counts.
"""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

from tfamp.data import Pipeline

BEGIN = """
import gc, json
import numpy as np
import tensorflow as tf
from tfamp.data import Pipeline

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20
"""

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="reads Linux's own count of memory"
)


def measured(program):
    """The JSON that a program prints last."""
    text = BEGIN + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_fifty_builds_of_a_part_of_the_data_take_the_memory_of_one():
    # A search over settings: each trial builds its own dataset of half of 8 MiB.
    grown = measured(
        """
        x = np.ones((10_000, 200), np.float32)
        pipeline = Pipeline.from_arrays(x, np.arange(10_000) % 10).subset(0.5)
        pipeline = pipeline.map(lambda x, y: (x * 2, y)).shuffle(seed=1).batch(128)

        def trial():
            for _ in pipeline.build().take(2):
                pass

        for _ in range(5):
            trial()
        before = resident()
        for _ in range(50):
            trial()
        print(json.dumps(resident() - before))
        """
    )
    assert grown < 60, "MiB: all parts together have 200"


def test_what_a_build_dropped_is_told_after_its_dataset_is_gone():
    pipeline = Pipeline.from_arrays(np.arange(10.0)).filter(lambda x: x < 4)
    for _ in range(3):
        list(pipeline.build())
    told = " ".join(pipeline.describe().split())
    assert "Dropped 18 of 30 elements" in told
    assert "in 3 passes" in told


ENDLESS = """
x, y = np.zeros((100, 1), "float32"), np.zeros(100, "float32")
endless = tf.data.Dataset.from_tensor_slices((x, y)).repeat()  # steps_per_epoch
pipeline = Pipeline.from_dataset(endless).shuffle(seed=1).batch(4)
before = resident()
iterator = iter(pipeline.build())
next(iterator)
print(json.dumps(resident() - before))
"""


def test_shuffling_an_endless_dataset_of_small_examples_stays_in_its_budget():
    assert measured(ENDLESS) < 300, "the plan says 256 MiB"


@pytest.mark.slow
def test_shuffling_wide_rows_stays_in_its_budget():
    # 40 numbers a row are 160 bytes, and 40 tensors in a buffer are fifty times that.
    columns = tf.data.Dataset.range(10**6).batch(1000)
    columns = columns.map(
        lambda n: {str(i): tf.cast(n, tf.float32) + i for i in range(40)}
    )
    told = Pipeline.from_dataset(columns.unbatch()).shuffle(seed=1).describe()
    held = int(told.partition("shuffle")[2].split()[0].replace(",", ""))
    grown = measured(
        """
        columns = tf.data.Dataset.range(10**6).batch(1000)
        columns = columns.map(
            lambda n: {str(i): tf.cast(n, tf.float32) + i for i in range(40)}
        )
        pipeline = Pipeline.from_dataset(columns.unbatch()).shuffle(seed=1)
        before = resident()
        iterator = iter(pipeline.build())
        next(iterator)
        print(json.dumps(resident() - before))
        """
    )
    assert 10_000 < held < 100_000
    assert grown < 350, "the plan says 256 MiB"


def test_the_memory_of_a_cache_is_told_with_that_of_its_tensors():
    rows = tf.data.Dataset.range(1000).map(lambda n: {str(i): n for i in range(10)})
    told = Pipeline.from_dataset(rows).cache("memory").describe()
    size, unit = told.partition("memory, ")[2].split()[:2]
    # 80 bytes of values a row alone would be 78 KiB.
    assert unit == "MiB"
    assert 1 < float(size) < 4


@pytest.mark.slow
def test_a_table_of_many_rows_is_shuffled_whole_at_few_bytes_a_row():
    grown, is_whole, bounds, are_equal = measured(
        """
        rows = 3_000_000
        pipeline = Pipeline.from_arrays(np.arange(rows, dtype=np.int32)).shuffle(seed=3)
        pipeline = pipeline.batch(100_000)
        before = resident()
        dataset = pipeline.build()
        epochs = [[batch.numpy() for batch in dataset] for _ in range(2)]
        grown = resident() - before
        every = np.arange(rows)
        is_whole = [bool((np.sort(np.concatenate(e)) == every).all()) for e in epochs]
        bounds = [[int(batch.min()), int(batch.max())] for batch, *_ in epochs]
        are_equal = bool((epochs[0][0] == epochs[1][0]).all())
        print(json.dumps([grown, is_whole, bounds, are_equal]))
        """
    )
    assert is_whole == [True, True]
    assert not are_equal
    for low, high in bounds:  # drawn from all of the table
        assert low < 1000
        assert high > 2_999_000
    assert grown < 300, "MiB: 23 of two epochs, and 8 bytes a row for each order"
