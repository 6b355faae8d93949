"""Memory of input pipelines: builds that are let go, and tables that are shuffled.

Each program runs in a process of its own and prints MiB, by what the system counts.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest

BEGIN = """
import gc, json
import numpy as np
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
    # A search over settings: each trial builds its own dataset of half of 24 MiB.
    grown = measured(
        """
        x = np.ones((10_000, 600), np.float32)
        pipeline = Pipeline.from_arrays(x, np.arange(10_000) % 10).subset(0.5)
        pipeline = pipeline.map(lambda x, y: (x * 2, y)).shuffle(seed=1).batch(128)

        def trial():
            for _ in pipeline.build().take(2):
                pass

        for _ in range(2):
            trial()
        before = resident()
        for _ in range(8):
            trial()
        print(json.dumps(resident() - before))
        """
    )
    assert grown < 48, "MiB: all parts together have 92"
