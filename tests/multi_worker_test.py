"""Two worker processes train as one device does, and skip the same steps."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import worker_program as program
from tests.linear_training import BIAS, KERNEL, TOLERANCE, X, Y, one_device, without

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 1200  # a worker that waits for another one waits for ever
START_SCALE = 2.0**15


def free_address():
    """Returns an address on this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def run_workers(folder, program="tests.worker_program", *arguments):
    """Runs a program in two processes and returns what each wrote."""
    cluster = {"worker": [free_address(), free_address()]}
    outs = [folder / f"worker{index}.json" for index in range(2)]
    workers, logs = [], []
    try:
        for index, out in enumerate(outs):
            task = {"type": "worker", "index": index}
            config = json.dumps({"cluster": cluster, "task": task})
            logs.append(out.with_suffix(".log").open("w+"))
            command = [sys.executable, "-m", program, str(out), *arguments]
            workers.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={
                        **os.environ,
                        "TF_CONFIG": config,
                        "KERAS_BACKEND": "tensorflow",
                    },
                    stdout=logs[-1],
                    stderr=subprocess.STDOUT,
                )
            )
        for worker in workers:
            worker.wait(TIMEOUT_SECONDS)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        for log in logs:
            log.close()
    for worker, out in zip(workers, outs, strict=True):
        assert worker.returncode == 0, out.with_suffix(".log").read_text()[-5000:]
    return [json.loads(out.read_text()) for out in outs]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """What each of the two workers wrote; they run once for all tests."""
    items = [item for item in request.session.items if item.path == request.path]
    is_whole = any(item.get_closest_marker("slow") for item in items)
    folder = tmp_path_factory.mktemp("workers")
    return run_workers(folder, "tests.worker_program", *["--whole"] * is_whole)


slow = pytest.mark.slow(
    "test_both_workers_end_in_the_same_state has an epoch, windows, bad batches"
)


def both(outcomes, case):
    """Returns what each of the two workers wrote of a case."""
    return [outcome[case] for outcome in outcomes]


def check_weights(outcome, model):
    for found, expected in zip(outcome["weights"], model.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, **TOLERANCE)


CASES = ("fit", "uneven", "accumulation", "stopped", "evaluate", "predict", "sums")


@pytest.mark.parametrize("case", [*CASES, pytest.param("fit, overflows", marks=slow)])
def test_both_workers_end_in_the_same_state(outcomes, case):
    first, second = (outcome[case] for outcome in outcomes)
    assert first == second


def test_fit_evaluate_and_predict_give_what_one_device_gives(outcomes):
    model, losses = one_device(X, Y, program.GLOBAL_BATCH)
    check_weights(outcomes[0]["fit"], model)
    np.testing.assert_allclose(outcomes[0]["fit"]["losses"], losses, **TOLERANCE)
    loss = model.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(outcomes[0]["evaluate"], loss, **TOLERANCE)
    predictions = model.predict(X, verbose=0)
    np.testing.assert_allclose(outcomes[0]["predict"], predictions, **TOLERANCE)


def test_uneven_batches_train_as_on_one_device(outcomes):
    rows = slice(program.UNEVEN)
    model, losses = one_device(X[rows], Y[rows], program.GLOBAL_BATCH)
    check_weights(outcomes[0]["uneven"], model)
    np.testing.assert_allclose(outcomes[0]["uneven"]["losses"], losses, **TOLERANCE)


@slow
def test_a_bad_batch_on_any_worker_is_as_if_it_had_not_been(outcomes):
    x, y = without(program.BAD_ROWS, program.GLOBAL_BATCH)
    model, _ = one_device(x, y, program.GLOBAL_BATCH)
    found = outcomes[0]["fit, overflows"]
    check_weights(found, model)
    assert (found["applied"], found["skipped"], found["iterations"]) == (3, 3, 3)
    # Down by half three times; it grows again after 2000 finite steps.
    assert found["scale"] == START_SCALE / 2**3


def test_workers_draw_dropout_masks_of_their_own(outcomes):
    first, second = (np.array(outcome["mask"]) for outcome in outcomes)
    assert np.mean(first == second) == pytest.approx(0.5, abs=0.05)


def test_throughput_counts_the_examples_of_all_workers(outcomes):
    # 41 rows: behind the first step, which is traced, 8, 8, 8, 8 and 1 on one worker.
    assert both(outcomes, "rate") == [[pytest.approx(33 / 5)]] * 2


@pytest.mark.parametrize("case", ["shuffled", "shuffled by seeds"])
def test_each_example_comes_once_in_an_epoch(outcomes, case):
    # Orders of its own on each worker in stock Keras: some come twice, some never.
    epochs = [sum(parts, []) for parts in zip(*both(outcomes, case), strict=True)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(41))] * 2
    first, second = outcomes[0][case]
    assert first != sorted(first)
    assert (first == second) == (case == "shuffled by seeds")


def test_gradients_in_half_precision_are_added_up(outcomes):
    found = outcomes[0]["sums"]
    assert (found["applied"], found["skipped"]) == (6, 0)


def test_microbatches_of_all_workers_make_one_batch(outcomes):
    x, y = without(program.SMALL_BAD_ROWS, 4)
    model, _ = one_device(x, y, batch_size=4 * 4)
    found = outcomes[0]["accumulation"]
    check_weights(found, model)
    assert (found["applied"], found["skipped"], found["iterations"]) == (3, 2, 3)
    assert found["scale"] == START_SCALE / 2**2


def test_training_that_cannot_go_on_ends_on_both_workers(outcomes):
    for outcome in outcomes:
        found = outcome["stopped"]
        name, text = found["error"]
        assert name == "LossScaleError"
        message = "Skipped 3 updates in a row, because their gradients were not finite"
        assert re.match(re.escape(message), text)
        assert found["weights"] == [KERNEL.tolist(), BIAS.tolist()]
        assert (found["applied"], found["skipped"]) == (0, 3)
        assert found["scale"] == START_SCALE
