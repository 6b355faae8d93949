"""Processes fill, fail, are killed and read one cache: no wrong element."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow("one killed writer, and two that fill at once, in data_cache_test")
@pytest.mark.parametrize("locks", [[], ["--no_locks"]], ids=["locks", "none"])
def test_no_process_reads_what_is_half_written_or_of_another(locks):
    command = [sys.executable, "-m", "tests.cache_stress", "--reads=20", "--seed=1"]
    command += ["--processes=2", "--minutes=4", *locks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["read"] >= 20
    assert counts["wrong"] == 0
    assert counts["killed"] > 0
