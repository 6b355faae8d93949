"""What `tfamp.distribute` reads of launchers' variables, and the strategy it makes."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests import cluster_program
from tests.cluster_program import slurm_variables
from tests.linear_training import TOLERANCE, X, Y, one_device
from tests.refusals import refusals
from tfamp.distribute import strategies
from tfamp.dtypes import hooks
from tfamp.loss_scale.fit_hooks import STRATEGIES
from tfamp.machine.clusters import Cluster, cluster_of

ROOT = Path(__file__).parents[1]
TWO = ["a:2222", "b:2222"]
HANGS_SECONDS = 1200  # only a task that waits for ever takes so long


def tf_config(cluster, **task):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def slurm(**changes):
    """Variables of the second task of two, on two nodes, less those that are None."""
    values = {
        "SLURM_JOB_ID": "1207",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "n[9-10]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_NODEID": "1",
        **changes,
    }
    return {name: value for name, value in values.items() if value is not None}


ENVIRONMENTS = {
    "nothing": ({"PATH": "/bin"}, Cluster("none")),
    "an indexed job that is none": ({"JOB_COMPLETION_INDEX": "3"}, Cluster("none")),
    "Vertex": (
        tf_config({"chief": ["c:1"], "worker": TWO}, type="worker", index=0),
        Cluster("TF_CONFIG", ("c:1", "a:2222", "b:2222"), 1),
    ),
    "TFJob with an evaluator": (
        tf_config({"worker": TWO, "evaluator": ["e:1"]}, type="worker", index=0),
        Cluster("TF_CONFIG", ("a:2222", "b:2222"), 0),
    ),
    "Slurm": (slurm(), Cluster("Slurm", ("n9:24656", "n10:24656"), 1)),
    "Slurm, two tasks a node": (
        slurm(
            SLURM_STEP_TASKS_PER_NODE="2,1",
            SLURM_STEP_NUM_TASKS="3",
            SLURM_PROCID="1",
            SLURM_NODEID="0",
            SLURM_STEP_RESV_PORTS="12001-12002",
        ),
        Cluster("Slurm", ("n9:12001", "n9:12002", "n10:12001"), 1),
    ),
    "a shell on a node": (
        slurm(SLURM_NTASKS="1", SLURM_STEP_NUM_TASKS="1"),
        Cluster("none"),
    ),
    "Ray on Slurm": (
        {**slurm(), **tf_config({"worker": TWO}, type="worker", index=0)},
        Cluster("TF_CONFIG", ("a:2222", "b:2222"), 0),
    ),
}


@pytest.mark.parametrize("environ, wanted", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_launchers_variables_give_one_record(environ, wanted):
    found = cluster_of(environ)
    assert found == wanted
    assert Cluster.from_json(found.to_json()) == found
    again = cluster_of({"TF_CONFIG": json.dumps(found.to_tf_config())})
    assert (again.workers, again.index) == (found.workers, found.index)


HALF = {
    "no cluster": ({"TF_CONFIG": '{"task": {}}'}, "KeyError: 'cluster'"),
    "no port": (
        tf_config({"worker": ["a"]}, type="worker", index=0),
        "not of that form",
    ),
    "past the end": (
        tf_config({"worker": TWO}, type="worker", index=2),
        "IndexError",
    ),
    "the same address": (
        tf_config({"worker": ["a:1", "a:1"]}, type="worker", index=0),
        "or not each once",
    ),
    "no rank": (slurm(SLURM_PROCID=None), "SLURM_PROCID is not set"),
    "parameter servers": (
        tf_config({"worker": TWO, "ps": ["p:1"]}, type="worker", index=0),
        "Keras 3 trains with workers alone",
    ),
    "a batch script": (
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        "SLURM_STEP_NODELIST is not set",
    ),
    "tasks in turns": (
        slurm(
            SLURM_STEP_TASKS_PER_NODE="2,1",
            SLURM_STEP_NUM_TASKS="3",
            SLURM_DISTRIBUTION="cyclic",
        ),
        "SLURM_DISTRIBUTION is 'cyclic'",
    ),
    "hosts with a hole": (
        slurm(SLURM_STEP_NODELIST="n[1-"),
        "SLURM_STEP_NODELIST is 'n[1-'",
    ),
    "too few ports": (
        slurm(
            SLURM_STEP_TASKS_PER_NODE="2,1",
            SLURM_STEP_NUM_TASKS="3",
            SLURM_NODEID="0",
            SLURM_STEP_RESV_PORTS="12001",
        ),
        "SLURM_STEP_RESV_PORTS is '12001'; expected 2 ports",
    ),
}


@pytest.mark.parametrize("environ, message", HALF.values(), ids=HALF)
def test_half_a_cluster_is_an_error_that_names_the_variable(environ, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        cluster_of(environ)
    assert "; expected " in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_cluster_is_read_without_tensorflow():
    code = (
        "import sys, tfamp; print(tfamp.distribute.cluster().source, "
        "'tensorflow' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "none False\n", done.stderr


class Made:
    """Stands for a strategy that would start a server and wait."""

    def __init__(self, **arguments):
        self.arguments = arguments


@pytest.fixture
def lines(monkeypatch):
    """What is logged; strategies are made of `Made`, on a machine without GPUs."""
    found = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            strategies.logging, level, lambda text, *args: found.append(text % args)
        )
    for name in ("MultiWorkerMirroredStrategy", "MirroredStrategy"):
        monkeypatch.setattr(tf.distribute, name, Made)
    monkeypatch.setattr(strategies, "_OF_WORKERS", {})
    return found


def with_gpus(monkeypatch, num):
    devices = [tf.config.PhysicalDevice(f"/GPU:{i}", "GPU") for i in range(num)]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: devices)


@pytest.mark.parametrize("num, wanted", [(0, "RING"), (1, "NCCL")])
def test_several_workers_get_their_resolver_and_nccl_or_ring(
    lines, monkeypatch, num, wanted
):
    with_gpus(monkeypatch, num)
    cluster = Cluster("TF_CONFIG", ("c:1", "a:1"), 1)
    made = tfamp.distribute.strategy(cluster)
    resolver = made.arguments["cluster_resolver"]
    assert resolver.cluster_spec().as_dict() == {"worker": ["c:1", "a:1"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.num_accelerators() == {"GPU": num}
    assert made.arguments["communication_options"].implementation.value == wanted
    assert made in STRATEGIES
    assert "reduce_per_replica" in " ".join(hooks.installed())
    (found,) = lines
    assert f"Gradients go by {wanted}" in found
    assert "Worker 1 of 2 (from 0), as TF_CONFIG says: c:1, a:1" in found


test_strategies_that_cannot_be_are_refused = refusals(
    {
        "a name": ("slurm", "Unknown `cluster` 'slurm'"),
        "a dict": ({}, "`cluster` is {}, of type dict", TypeError),
    },
    tfamp.distribute.strategy,
)


def test_a_strategy_of_workers_comes_first():
    tf.constant(1)
    cluster = Cluster("TF_CONFIG", ("127.0.0.1:1", "127.0.0.1:2"), 0)
    with pytest.raises(RuntimeError, match="comes too late: TensorFlow has run"):
        tfamp.distribute.strategy(cluster)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """What each of three tasks of Slurm wrote; they run once for all tests."""
    folder, num = tmp_path_factory.mktemp("tasks"), 3
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("", 0))
        ports = ",".join(str(each.getsockname()[1]) for each in sockets)
    outs = [folder / f"{index}.json" for index in range(num)]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.cluster_program", str(out)],
            cwd=ROOT,
            env={**os.environ, **slurm_variables(index, num, ports)},
        )
        for index, out in enumerate(outs)
    ]
    try:
        assert [task.wait(HANGS_SECONDS) for task in running] == [0] * num
    finally:
        for task in running:
            task.kill()
            task.wait()
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.slow("test_several_workers_get_their_resolver_and_nccl_or_ring")
def test_three_tasks_of_slurm_train_as_one_device_does(tasks):
    # Batches of 8 are 3, 3 and 2 examples; the last one of 41 rows is a single one.
    rows = slice(cluster_program.UNEVEN)
    model, _ = one_device(X, Y, 8)
    plain, _ = one_device(X[rows], Y[rows], 8)
    for index, result in enumerate(tasks):
        assert result["is multi worker"] and result["is one"]
        assert (result["replicas"], result["task"]) == (3, ["worker", index])
        for found, wanted in (("weights", model), ("plain weights", plain)):
            for given, expected in zip(
                result[found], wanted.get_weights(), strict=True
            ):
                np.testing.assert_allclose(given, expected, **TOLERANCE)
