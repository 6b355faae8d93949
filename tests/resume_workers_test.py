"""`Resume` on two workers: one is lost, the other ends, both go on at a common step."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster_program import slurm_variables

ROOT = Path(__file__).parents[1]
# What is waited for is an event: one worker is lost, then the other has ended. Only
# where that never comes does a clock end the test.
HANGS_SECONDS = 1200
slow = pytest.mark.slow(
    "test_a_worker_whose_other_is_killed_ends_and_says_how_to_go_on has a kill"
)


def has_ended(worker):
    """Returns whether a process has ended, or is stopped."""
    if worker.poll() is not None:
        return True
    state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


def run(folder, states, *lost):
    """Runs both workers until one ends, and the other in time.

    Args:
        folder: Where they write.
        states: The folder of their states.
        *lost: What the program takes: which worker is lost, how and where.

    Returns:
        The statuses, None of one that never ended, and what was written.
    """
    folder.mkdir()
    with socket.socket() as one, socket.socket() as other:
        one.bind(("", 0))
        other.bind(("", 0))
        ports = ",".join(str(s.getsockname()[1]) for s in (one, other))
    outs, workers = [folder / f"{index}.json" for index in range(2)], []
    command = [sys.executable, "-m", "tests.resume_worker_program"]
    try:
        for index, out in enumerate(outs):
            with (folder / f"{index}.log").open("w") as log:
                workers.append(
                    subprocess.Popen(
                        [*command, str(out), str(states), *lost],
                        cwd=ROOT,
                        env={**os.environ, **slurm_variables(index, 2, ports)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        first = int(lost[0]) if lost else 0
        hangs = time.monotonic() + HANGS_SECONDS
        for worker in (workers[first], workers[1 - first]):
            while not has_ended(worker) and time.monotonic() < hangs:
                time.sleep(0.05)
        statuses = [worker.poll() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    found = [json.loads(out.read_text()) for out in outs if out.exists()]
    return statuses, found


def check_survivor(folder, statuses, lost):
    """Checks that the other worker has ended, and said why and what to do."""
    log = (folder / f"{1 - lost}.log").read_text()
    assert statuses[1 - lost] == 1, log[-3000:]
    assert "Resume: another worker does not answer any more" in log, log[-3000:]
    assert "Start all workers again: they go on at the newest step that all" in log


def test_a_worker_whose_other_is_killed_ends_and_says_how_to_go_on(tmp_path):
    statuses, found = run(tmp_path / "killed", tmp_path / "states", "1", "step", "5")
    assert (statuses[1], found) == (-signal.SIGKILL, [])
    check_survivor(tmp_path / "killed", statuses, lost=1)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """What both workers wrote of a training that nobody killed."""
    folder = tmp_path_factory.mktemp("workers")
    statuses, found = run(folder / "never killed", folder / "states")
    assert statuses == [0, 0], (folder / "never killed/0.log").read_text()[-3000:]
    return found


def check_equal(folder, states, wanted, resumed_at):
    """Starts both workers again, and compares their ends."""
    statuses, found = run(folder, states)
    assert statuses == [0, 0], (folder / "0.log").read_text()[-3000:]
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine["resumed at"] in resumed_at
        assert mine["notes"] == []
        assert mine["digest"] == theirs["digest"]
        assert mine["loss"] == theirs["loss"]


@slow
@pytest.mark.parametrize(
    "lost", [("0", "save", "3"), ("1", "freeze", "5")], ids=" ".join
)
def test_both_workers_go_on_to_the_bit(tmp_path, wanted, lost):
    statuses, found = run(tmp_path / "lost", tmp_path / "states", *lost)
    assert found == []
    check_survivor(tmp_path / "lost", statuses, int(lost[0]))
    # Saves come behind steps 2 and 4, and at the beginning of the last epoch.
    places = [[0, 2], [1, 1], [2, 0]]
    check_equal(tmp_path / "again", tmp_path / "states", wanted, places)
