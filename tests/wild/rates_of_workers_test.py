"""`Throughput` on two workers that are processes of their own."""

import csv
import json
import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import tfamp

strategy = tfamp.distribute.strategy()
import keras
import numpy as np
import tensorflow as tf

folder, place = sys.argv[1], sys.argv[2]
x = np.random.default_rng(0).normal(size=(96, 3)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.DATA
)
data = data.with_options(options)
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
told = tfamp.callbacks.Throughput(
    batch_size=16, every_steps=2, csv_path=f"{folder}/{place}.csv"
)
run = model.fit(data, epochs=2, verbose=0, callbacks=[told])
left_out = tfamp.callbacks.Throughput()
again = model.fit(data, epochs=1, verbose=0, callbacks=[left_out])
answers = {
    "history": run.history, "notes": told.notes, "first": told.first_step_seconds,
    "again": again.history, "again notes": left_out.notes,
    "function": type(model.train_function).__module__,
}
with open(f"{folder}/{place}.json", "w") as file:
    json.dump(answers, file)
"""


def free_ports(number):
    held = [socket.socket() for _ in range(number)]
    try:
        for each in held:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where both workers have written what they saw."""
    made = tmp_path_factory.mktemp("rates")
    addresses = [f"localhost:{port}" for port in free_ports(2)]
    workers = []
    for place in range(2):
        task = {"type": "worker", "index": place}
        config = {"cluster": {"worker": addresses}, "task": task}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
        with open(made / f"{place}.log", "w") as log:
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-c", SCRIPT, str(made), str(place)],
                    env={**environment, "TF_CPP_MIN_LOG_LEVEL": "2"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        statuses = [worker.wait(300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert statuses == [0, 0], (made / "0.log").read_text()[-3000:]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_each_worker_tells_the_rate_of_all(folder, place):
    answers = json.loads((folder / f"{place}.json").read_text())
    history = answers["history"]
    for rate, step in zip(
        history["examples_per_second"], history["step_seconds"], strict=True
    ):
        assert rate > 0 and step > 0
    assert history["first_step_seconds"] == [answers["first"]]
    assert answers["first"] > max(history["step_seconds"])
    assert "input_wait" not in history
    assert any("draws its batches itself" in note for note in answers["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_a_worker_that_is_not_told_the_batch_says_what_to_pass(folder, place):
    answers = json.loads((folder / f"{place}.json").read_text())
    assert "examples_per_second" not in answers["again"]
    assert answers["again"]["step_seconds"][0] > 0
    assert any("pass `batch_size`" in note for note in answers["again notes"])
    assert not answers["function"].startswith("tfamp.keras_hooks")


@pytest.mark.slow
def test_the_chief_alone_writes(folder):
    assert not (folder / "1.csv").exists()
    with open(folder / "0.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "examples_per_second", "step_seconds", "input_wait"]
    # Six batches an epoch; the first step of all is told apart.
    assert [row[0] for row in rows] == ["3", "5", "6", "8", "10", "12"]
    for step, rate, seconds, wait in rows:
        assert int(step) > 0 and wait == ""
        assert float(rate) * float(seconds) == pytest.approx(16)
