"""Memory of input pipelines: builds that are let go, and buffers of small elements.

Each program runs in a process of its own and prints MiB, by what the system counts.
"""

import json
import os
import subprocess
import sys
import textwrap

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


def test_many_builds_of_a_part_of_the_data_take_the_memory_of_one():
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
        for _ in range(25):
            trial()
        print(json.dumps(resident() - before))
        """
    )
    assert grown < 50, "MiB: all parts together have 100"


def test_the_memory_of_a_cache_is_told_with_that_of_its_tensors():
    rows = tf.data.Dataset.range(1000).map(lambda n: {str(i): n for i in range(10)})
    pipeline = Pipeline.from_dataset(rows).cache("memory")
    pipeline.build()
    size, unit = (
        " ".join(pipeline.describe().split()).partition("differs; ")[2].split()[:2]
    )
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
