"""`tfamp.scaling`: shares of a step, verdicts, first steps, and real processes."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.linear_training import inner, linear
from tests.replicas import two_replicas
from tfamp.cli.command import INTERRUPTED
from tfamp.comparison.replicas import judgement, processes, steps
from tfamp.comparison.replicas.judgement import Equality, OneDevice, ScalingPoint, Times
from tfamp.comparison.replicas.result import Scaling
from tfamp.comparison.replicas.steps import Step
from tfamp.stepping.input_waits import Bottleneck
from tfamp.trials import processes as trial_processes
from tfamp.trials.intervals import Interval

ROOT = Path(__file__).parents[1]
NONE = Interval(0.0, 0.0, 0.01)
HALF = Interval(0.5, 0.45, 0.55)
WIDE = Interval(0.1, 0.0, 0.4)


def waits(gain=0.0, seconds=0.1):
    return Bottleneck(
        "compute", gain, gain, gain, "why", "1. Cache.", {"input": (seconds,)}, 8
    )


def one(gain=0.0, seconds=0.1, half=1.0):
    return OneDevice(half, (), waits(gain, seconds), 1.0)


def point(communication=NONE, slow=NONE, waiting=0.0, efficiency=0.95):
    interval = Interval(efficiency, efficiency - 0.02, efficiency + 0.02)
    shares = (interval, communication, slow, waiting)
    return ScalingPoint("weak", 2, 16, 1.0, *shares, 1000, 1000)


def equal(answer=True, apart=1e-6):
    return Equality(2, answer, {"weights": apart}, {"weights": 1e-3}, 2)


@pytest.mark.parametrize(
    ("found", "equality", "shares", "verdict"),
    [
        pytest.param(point(), equal(), False, "scales", id="scales"),
        pytest.param(point(efficiency=0.5), equal(), True, "scales", id="shared"),
        pytest.param(point(efficiency=0.5), equal(), False, "unclear", id="own"),
        pytest.param(point(HALF), equal(), True, "communication", id="wire"),
        pytest.param(point(WIDE), equal(), True, "unclear", id="noise"),
        pytest.param(point(slow=HALF), equal(), True, "slow worker", id="slow"),
        pytest.param(point(waiting=0.7), equal(), True, "input", id="input"),
        pytest.param(point(HALF, waiting=0.7), equal(), True, "input", id="most"),
        pytest.param(None, equal(False, 0.5), True, "not equal", id="not equal"),
        pytest.param(point(), equal(False, 0.5), True, "not equal", id="not sold"),
        pytest.param(point(HALF, None), equal(None), True, "communication", id="draws"),
    ],
)
def test_what_costs_most_is_the_verdict(found, equality, shares, verdict):
    said, why = judgement.judge(found, [equality], one(), shares_devices=shares)
    assert said == verdict
    assert why.endswith(".")


def test_not_equal_names_the_distance():
    _, why = judgement.judge(None, [equal(False, 0.5)], one(), shares_devices=True)
    assert "the weights of 2 replicas are 50.0 % of their way" in why
    assert "rounding allows 0.1 %. No speed was measured." in why


def test_shares_of_a_step_come_from_pairs_of_a_round():
    # The machine is half as fast in the second round: ratios stay.
    times = Times([1.0, 2.0], [4.0, 8.0], [[1.0, 2.0], [3.0, 6.0]])
    assert judgement.communication_share(times) == Interval(0.25, 0.25, 0.25)
    assert judgement.slow_worker_share(times) == Interval(0.5, 0.5, 0.5)
    assert judgement.efficiency(times, gain=0.5).estimate == pytest.approx(0.125)


def test_one_process_shows_no_slowest_worker():
    assert judgement.slow_worker_share(Times([1.0] * 2, [1.0] * 2, [[1.0] * 2])) is None


def test_an_input_that_feeds_all_replicas_has_to_be_as_fast():
    # 0.6 s for a batch, two batches a step of 1 s: 1.2 s.
    share = judgement.input_share(one(seconds=0.6), 1.0, batches=2)
    assert share == pytest.approx(1 - 1 / 1.2)
    assert judgement.input_share(one(0.3, 0.6), 1.0, batches=1) == 0.3


def test_advice_on_the_wire_speaks_of_half_precision_where_it_is_not_used():
    facts = {"is_half": False, "has_workers": True}
    first, *_ = judgement.advise("communication", point(HALF), one(), **facts)
    assert "each replica sends 1000 bytes a step" in first
    assert first.endswith("and a policy of half precision.")


def test_rounding_allows_more_of_the_signs_that_an_adaptive_optimizer_takes():
    found = steps.tolerances(["float32"], tf32=False, has_slots=True)
    assert found == {"slots": 1e-3, "weights": pytest.approx(2 * 1e-3**0.5)}
    half = steps.tolerances(["bfloat16", "float32"], tf32=True, has_slots=True)
    assert half["slots"] == 5e-2


def test_a_step_alone_adds_nothing_up():
    x = tf.constant(np.arange(16.0, dtype="float32").reshape(8, 2))
    y = tf.reduce_sum(x, 1, keepdims=True)
    kernels, sizes = {}, {}
    for reduces in (True, False):
        with tfamp.scope("float32"), two_replicas().scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.set_weights([np.zeros((2, 1)), np.zeros(1)])
            model.compile(keras.optimizers.SGD(0.125), "mse")
        step = Step(model, (x, y), 8, reduces=reduces)
        sizes[reduces] = sum(step.sizes)
        kernels[reduces] = [
            part.numpy().ravel().tolist()
            for part in model.distribute_strategy.experimental_local_results(
                model.trainable_variables[0].value
            )
        ]
    assert kernels[True][0] == kernels[True][1]
    assert kernels[False][0] != kernels[False][1]
    # Of both replicas: kernel and bias, in float32, and at most scalars besides.
    assert 2 * 12 <= sizes[True] <= 2 * (12 + 16)
    assert sizes[False] == 0
    owners = (tf.distribute.ReplicaContext, tf.distribute.Strategy)
    assert "all_reduce" not in vars(owners[0])
    assert owners[1].reduce.__module__.startswith("tensorflow.")


def scaling(verdict="communication", points=(), equality=()):
    return Scaling(
        model="<digits>",
        policy="mixed_bfloat16",
        kind="workers",
        devices=("Xeon", "Xeon"),
        shares_devices=False,
        batch_size=8,
        verdict=verdict,
        reason="Half of a step is communication.",
        advice=("1. Send less.",),
        one_device=one(),
        equality=equality,
        points=points,
        notes=("A note.",),
        versions={"keras": "3.15.1", "jax": None},
    )


def test_the_page_holds_the_verdict_each_figure_and_each_plot():
    pytest.importorskip("jinja2", reason="of the extra `report`")
    pytest.importorskip("matplotlib", reason="of the extra `report`")
    found = scaling(points=(point(HALF, slow=None),), equality=(equal(),))
    page = found.to_html()
    for text in (
        *("Communication costs most", "Half of a step is communication."),
        *("Send less.", "0.95 [0.93, 0.97]", "50 % [45, 55]", "A note.", "3.15.1"),
        *("&lt;digits&gt;", 'id="plot-efficiency"', 'id="plot-shares"', "missing"),
        "First 2 steps of 2 replicas: equal",
    ):
        assert text in page
    assert "<digits>" not in page
    assert not re.search(r"(src|href)=.https?:", page)
    assert Scaling.from_json(found.to_json()) == found


def test_the_page_of_what_was_not_timed_has_no_figures(tmp_path):
    pytest.importorskip("jinja2", reason="of the extra `report`")
    page = scaling("not equal", equality=(equal(False),)).to_html(tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text() == page
    assert "Not equal to one device" in page
    assert "<table" not in page and "<svg" not in page


def test_layers_that_draw_are_silent_only_in_the_block():
    normalize = keras.layers.BatchNormalization()
    drop, flip = keras.layers.Dropout(0.5), keras.layers.RandomFlip()
    model = keras.Sequential([keras.Input((4, 4, 1)), normalize, drop, flip])
    with steps._made_equal(model) as (notes, random):
        assert (drop.rate, normalize.synchronized) == (0.0, True)
        assert [name.rpartition("/")[2] for name in random] == [flip.name]
        assert len(notes) == 2
    assert (drop.rate, normalize.synchronized) == (0.5, False)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"replicas": (1,)}, ValueError, "at least one number above 1"),
        ({"replicas": (1, 2.0)}, TypeError, "`replicas` is 2.0"),
        ({"replicas": (1, 4096)}, ValueError, "`replicas` holds 4096, and this"),
        ({"replicas": (1, 3), "batch_size": 2}, ValueError, "A batch has 2 examples"),
        ({"workers": 2}, TypeError, "`workers` is 2, of type int"),
        ({"data": (np.zeros((0, 4)), np.zeros(0))}, ValueError, "have (0,) rows"),
        ({"data": iter([1])}, TypeError, "`data` is <list_iterator"),
        (
            {"batch_size": 8, "max_memory_bytes": 2**30},
            ValueError,
            "Leave one out",
        ),
    ],
    ids=[
        "one number",
        "no whole number",
        "too many",
        "batch too small",
        "workers",
        "empty data",
        "data read once",
        "batch and limit",
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        tfamp.scaling(linear, **arguments)


def test_a_scope_of_a_strategy_is_refused():
    with two_replicas().scope(), pytest.raises(RuntimeError, match="Call it outside"):
        tfamp.scaling(linear)


def build():
    """Returns a linear regression with its data."""
    model = linear()
    model.compile(inner(), "mse")
    x = np.random.default_rng(0).normal(size=(9, 4)).astype("float32")
    return model, (x, x.sum(-1, keepdims=True))


def test_two_replicas_take_the_steps_of_one_device(tmp_path):
    found = tfamp.scaling(build, policy="float32", seconds=0.1, timeout_seconds=200)
    (equality,) = found.equality
    assert equality.is_equal, equality
    # Five of nine examples on one replica, weighted: sums in another order.
    assert max(equality.distances.values()) < 1e-5
    assert found.verdict != "not equal"
    assert [(p.mode, p.replicas, p.batch_size) for p in found.points] == [
        ("strong", 2, 9),
        ("weak", 2, 18),
    ]
    assert 20 <= found.points[0].reduced_bytes <= 40
    assert found.shares_devices
    assert any("says nothing of GPUs" in note for note in found.notes)
    found.to_json(tmp_path / "found.json")
    assert Scaling.from_json(tmp_path / "found.json") == found
    assert "Verdict: " in str(found)


whole = pytest.mark.whole(
    "test_two_replicas_take_the_steps_of_one_device starts such processes"
)


def children(folder):
    """Returns the processes of replicas whose job lies below a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{folder}/tfamp-scaling-".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.anchors("one device")
@pytest.mark.parametrize(
    ("flags", "num_processes"),
    [((), 1), (("--workers", "--seconds=60"), 3)],
    ids=["one device", "two workers"],
)
def test_ctrl_c_leaves_no_process_and_no_file(tmp_path, flags, num_processes):
    command = [sys.executable, "-m", "tfamp", "scale", "tests.scaling_test:build"]
    scale = subprocess.Popen(
        [*command, "--policy=float32", *flags],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 240
        while len(children(tmp_path)) < num_processes and scale.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        scale.send_signal(signal.SIGINT)
        _, said = scale.communicate(timeout=30)
    finally:
        scale.kill()
        scale.wait()
    assert scale.returncode == INTERRUPTED, said
    assert "stopped" in said and "Traceback" not in said
    assert children(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_no_thread_and_no_open_file(monkeypatch):
    def answers(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "_CHILD", "this")  # a module that ends at once
    monkeypatch.setattr(processes.Replicas, "answers", answers)
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        tfamp.scaling(build, policy="float32", workers=True)
    # Threads of tests before may end meanwhile, and close their files.
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


def test_ctrl_c_while_a_process_starts_ends_it_too(monkeypatch):
    started, start = [], trial_processes.start_with_pipe

    def press(*given, **how):
        started.append(start(*given, **how))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(processes, "_CHILD", "this")
    monkeypatch.setattr(trial_processes, "start_with_pipe", press)
    # A shell that starts the tests in the background has them ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            tfamp.scaling(build, policy="float32")
    finally:
        signal.signal(signal.SIGINT, before)
    ((process, _),) = started
    assert process.returncode is not None


@whole
def test_stock_keras_with_uneven_parts_is_not_equal_and_not_timed():
    found = tfamp.scaling(build, seconds=0.1, timeout_seconds=200)
    assert found.verdict == "not equal"
    assert found.points == ()
    assert found.efficiency is None
    assert "tfamp.enable" in found.advice[0]


@whole
def test_what_fails_in_a_worker_is_told():
    def broken():
        model, data = build()
        if tf.distribute.has_strategy():
            raise ValueError("no room on this worker")
        return model, data

    with pytest.raises(RuntimeError, match="no room on this worker"):
        tfamp.scaling(broken, workers=True, seconds=0.1, timeout_seconds=200)


@whole
@pytest.mark.parametrize("rate", ["100mbit", ""], ids=["throttled", "free"])
def test_the_share_of_a_wire_is_that_of_its_bytes(tmp_path, rate):
    if not (shutil.which("tc") and shutil.which("unshare")):
        pytest.skip("needs tc and unshare")
    # A smaller packet than the burst: the filter drops what is larger.
    wire = "ip link set lo mtu 16000 up"
    if rate:
        wire += f" && tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 1s"
    tried = subprocess.run(["unshare", "-rn", "bash", "-c", wire], capture_output=True)
    if tried.returncode:
        pytest.skip(f"no network namespace here: {tried.stderr.decode()[:100]}")
    program = [sys.executable, "-m", "tests.scaling_program", str(tmp_path / "out")]
    subprocess.run(
        ["unshare", "-rn", "bash", "-c", f'{wire} && exec "$@"', "bash", *program]
        + ["wire"] * bool(rate),
        cwd=ROOT,
        env=os.environ,
        timeout=280,
        check=True,
    )
    lines = (tmp_path / "out").read_text().splitlines()
    verdict, share, by_bytes = lines[0], float(lines[1]), float(lines[2])
    if rate:
        assert verdict == "communication"
        assert share == pytest.approx(min(by_bytes, 1.0), abs=0.05)
    else:
        assert share < 0.5
        assert verdict != "communication"
