"""`recipes/train_workers.py` on two workers of each launcher, one of them killed."""

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
# Everything that is waited for is an event; only a run that hangs meets the clock.
HANGS_SECONDS = 1200
pytestmark = pytest.mark.slow("resume_test kills workers of its own program")


def environments(launcher):
    """Returns the variables that a launcher sets for each process it starts."""
    if launcher == "Ray":
        return [{"RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0"}]
    with socket.socket() as one, socket.socket() as other:
        one.bind(("", 0))
        other.bind(("", 0))
        ports = [each.getsockname()[1] for each in (one, other)]
    if launcher == "Slurm":
        listed = ",".join(map(str, ports))
        return [slurm_variables(index, 2, listed) for index in range(2)]
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    tasks = [{"type": "worker", "index": index} for index in range(2)]
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks
    ]


def victim(launcher, processes):
    """Returns the number of the process of one worker."""
    if launcher != "Ray":
        return processes[1].pid
    psutil = pytest.importorskip("psutil")
    parts = psutil.Process(processes[0].pid).children(recursive=True)
    workers = [part for part in parts if "TrainWorker" in " ".join(part.cmdline())]
    return max(part.pid for part in workers)


def run(folder, launcher, *, kills=False):
    """Runs the recipe to its end, or kills a worker once a state is there.

    Returns the statuses and all that was written.
    """
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "recipes/train_workers.py", "--epochs=3"]
    command += [f"--directory={folder}", "--every_steps=5"]
    command += ["--ray_workers=2"] * (launcher == "Ray")
    processes, hangs = [], time.monotonic() + HANGS_SECONDS
    log = folder / f"{'killed' if kills else 'whole'}.log"
    try:
        with log.open("w") as file:
            for environ in environments(launcher):
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        while kills and not list(folder.glob("step-*1-of-2.npz")):
            assert time.monotonic() < hangs, log.read_text()[-3000:]
            time.sleep(0.05)
        if kills:
            os.kill(victim(launcher, processes), signal.SIGKILL)
        statuses = [each.wait(hangs - time.monotonic()) for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    return statuses, log.read_text()


def metrics_of(text):
    """Returns the line of JSON that the first worker has written."""
    (line,) = {x[x.index("{") :] for x in text.splitlines() if '"accuracy"' in x}
    return json.loads(line)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """What comes of a training that nobody killed."""
    statuses, text = run(tmp_path_factory.mktemp("workers") / "whole", "TF_CONFIG")
    assert statuses == [0, 0], text[-3000:]
    return metrics_of(text)


@pytest.mark.parametrize("launcher", ["TF_CONFIG", "Slurm", "Ray"])
def test_kill_9_of_one_worker_changes_nothing(launcher, wanted, tmp_path):
    if launcher == "Ray":
        pytest.importorskip("ray.train", reason="needs the extra `ray`")
    statuses, text = run(tmp_path / "run", launcher, kills=True)
    if launcher == "Ray":  # which starts both again
        assert statuses == [0], text[-3000:]
    else:
        assert statuses[1] == -signal.SIGKILL and statuses[0] > 0
        assert "Start all workers again: they go on at the newest step" in text
        statuses, text = run(tmp_path / "run", launcher)
        assert statuses == [0, 0], text[-3000:]
    assert "Resume: going on behind step" in text
    found = metrics_of(text)
    assert found == wanted
    assert (found["replicas"], found["accuracy"] > 0.8) == (2, True)
