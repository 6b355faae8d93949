"""Eight processes fill, fail, are killed and read one cache: no wrong byte."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts processes by fork")
@pytest.mark.parametrize("locks", [[], ["--no_locks"]], ids=["locks", "none"])
def test_no_process_reads_what_is_half_written_or_of_another(locks):
    # Without TensorFlow, so that processes start and are killed within milliseconds.
    command = [sys.executable, "-m", "tests.cache_stress", "--reads=100", "--seed=1"]
    done = subprocess.run([*command, *locks], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["read"] >= 100
    assert counts["wrong"] == 0
    assert counts["filled"] > 0
    assert counts["killed"] > 0
