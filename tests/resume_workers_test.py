"""`Resume` on two workers: one is killed, both go on at the step that both have."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from tests.cluster_program import slurm_variables
from tests.resume_worker_program import build, dataset
from tfamp.callbacks import Resume

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.whole(
    "test_a_training_goes_on_to_the_bit has one process and its replicas"
)


def run(folder, states, kill_at=0):
    """Runs both workers to their end; returns their statuses and what they wrote."""
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
                        [*command, str(out), str(states), str(kill_at)],
                        cwd=ROOT,
                        env={**os.environ, **slurm_variables(index, 2, ports)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        statuses = [worker.wait(240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    found = [json.loads(out.read_text()) for out in outs if out.exists()]
    return statuses, found


def test_both_workers_go_on_to_the_bit_and_one_process_takes_their_state(tmp_path):
    statuses, wanted = run(tmp_path / "never killed", tmp_path / "first")
    assert statuses == [0, 0], (tmp_path / "never killed/0.log").read_text()[-3000:]
    states = tmp_path / "second"
    statuses, found = run(tmp_path / "killed", states, kill_at=5)
    assert statuses[1] == -signal.SIGKILL
    assert statuses[0] != 0
    assert found == []
    # As if the kill had come before its last save: worker 0 has a step that it lacks.
    (states / "step-000000004.worker-1-of-2.npz").unlink()
    # One process, which says that it is another training from here on.
    keras.utils.set_random_seed(0)
    model, resume = build(), Resume(states, every_steps=50)
    history = model.fit(dataset(), epochs=3, verbose=0, callbacks=[resume])
    assert resume.resumed_at == (0, 2)
    assert len(history.history["loss"]) == 3
    assert "it had 2 workers of 1 replicas" in resume.notes[0]
    assert "not to the bit" in resume.notes[0]
    for path in states.glob("*-of-1.npz"):
        path.unlink()
    statuses, found = run(tmp_path / "again", states)
    assert statuses == [0, 0], (tmp_path / "again/0.log").read_text()[-3000:]
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine["resumed at"] == [0, 2]
        assert mine["notes"] == []
        assert mine["digest"] == theirs["digest"]
        assert mine["loss"] == theirs["loss"]
