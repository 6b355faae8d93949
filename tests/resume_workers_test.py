"""`Resume` on two workers: one is killed, and the other ends and says what to do."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster_program import slurm_variables

ROOT = Path(__file__).parents[1]
# What is waited for is an event: one worker is lost, then the other has ended. Only
# where that never comes does a clock end the test.
HANGS_SECONDS = 1200


def test_a_worker_whose_other_is_killed_ends_and_says_how_to_go_on(tmp_path):
    with socket.socket() as one, socket.socket() as other:
        one.bind(("", 0))
        other.bind(("", 0))
        ports = ",".join(str(s.getsockname()[1]) for s in (one, other))
    logs, workers = [tmp_path / f"{index}.log" for index in range(2)], []
    command = [sys.executable, "-m", "tests.resume_worker_program", str(tmp_path)]
    try:
        for index, path in enumerate(logs):
            with path.open("w") as log:
                workers.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env={**os.environ, **slurm_variables(index, 2, ports)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        hangs = time.monotonic() + HANGS_SECONDS
        statuses = [each.wait(hangs - time.monotonic()) for each in workers[::-1]]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    log = logs[0].read_text()
    assert statuses == [-signal.SIGKILL, 1], log[-3000:]
    assert "Resume: another worker does not answer any more" in log
    assert "Start all workers again: they go on at the newest step that all" in log
