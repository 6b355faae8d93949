"""What `scale` runs in processes of its own: replicas, workers, and their wire.

Workers live in a network namespace, whose only device is theirs: its bytes are counted,
and its rate is limited by the kernel.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BATCH = 16
COUNTS = (96, 91, 81)
LAST = 80  # the first row of an uneven last batch
TIMEOUT_SECONDS = 600
WIRE_POLICIES = ("mixed_bfloat16", "mixed_float16")
_LAUNCH = (
    "import sys; from benchmarks._scale_workers import launch; launch(*sys.argv[1:])"
)


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns 96 rows of a regression; the last batch is far from the others."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(max(COUNTS), 4)).astype("float32")
    y = x.sum(-1, keepdims=True)
    y[LAST:] += 16.0
    return x, y


def trained(strategy: Any, count: int, policy: str, accumulation: int) -> list[Any]:
    """Returns the weights after an epoch, alone where there is no strategy."""
    import keras
    import tensorflow as tf

    import tfamp

    with (strategy or tf.distribute.get_strategy()).scope(), tfamp.scope(policy):
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(4, "tanh", kernel_initializer="identity")(inputs)
        dense = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Model(inputs, dense(hidden))
        sgd = keras.optimizers.SGD(2.0**-6, momentum=0.5)
        dynamic = "float16" == policy.removeprefix("mixed_")
        optimizer = tfamp.LossScaleOptimizer(
            sgd,
            2.0**8 if dynamic else 1.0,
            dynamic=False,
            accumulation_steps=accumulation,
        )
        model.compile(optimizer, "mse", run_eagerly=strategy is None)
    x, y = data()
    model.fit(x[:count], y[:count], batch_size=BATCH, shuffle=False, verbose=0)
    return [np.asarray(w, "float64").tolist() for w in model.get_weights()]


def cases(policies: list[str]) -> list[tuple[int, str, int]]:
    """Returns what is trained alone and together: examples, policy, accumulation."""
    return [(n, policy, k) for policy in policies for n in COUNTS for k in (1, 2)]


def many(strategy: Any, policies: list[str]) -> dict[str, Any]:
    """Returns the weights of each case by its name."""
    return {json.dumps(case): trained(strategy, *case) for case in cases(policies)}


def mask(strategy: Any) -> list[list[bool]]:
    """Returns the dropout mask of each replica of this process."""
    import keras
    import tensorflow as tf

    import tfamp

    with strategy.scope(), tfamp.scope("float32"):
        layer = keras.layers.Dropout(0.5, seed=1)
        layer.build((1, 4096))
    drawn = strategy.run(lambda: layer(tf.ones((1, 4096)), training=True))
    parts = strategy.experimental_local_results(drawn)
    return [(part.numpy() > 0).ravel().tolist() for part in parts]


def seen(strategy: Any, count: int) -> list[int]:
    """Returns the examples of an epoch of shuffled arrays that come here."""
    import keras
    import tensorflow as tf

    import tfamp

    found: list[int] = []

    class Watched(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, batch: Any) -> Any:
            note = tf.numpy_function(self.note, [batch[0]], tf.float32)
            with tf.control_dependencies([note]):
                return super().train_step(batch)

        def note(self, x: np.ndarray) -> np.float32:
            found.extend(x[:, 0].astype(int).tolist())
            return np.float32(0.0)

    with strategy.scope():
        model = Watched()
        model.compile(tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.0)), "mse")
    x = np.arange(float(count))[:, None]
    model.fit(x, x, batch_size=BATCH, verbose=0)
    return found


def sent_bytes() -> int:
    """Returns the bytes that have gone over the wire of this namespace."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    (own,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(own.split(":")[1].split()[8])


def wire(strategy: Any, policy: str, width: int, turns: int, steps: int) -> Any:
    """Returns bytes and seconds of a step: of each turn, in float32 and in half."""
    import keras
    import tensorflow as tf

    import tfamp
    from benchmarks._turns import take_turns

    def side(reduce_dtype: str | None) -> Callable[[], tuple[float, float]]:
        with strategy.scope(), tfamp.scope(policy):
            layers = [keras.layers.Dense(width, "relu") for _ in range(4)]
            model = keras.Sequential(
                [keras.Input((width,)), *layers, keras.layers.Dense(1)]
            )
            optimizer = tfamp.LossScaleOptimizer(
                keras.optimizers.Adam(1e-3),
                2.0**10 if policy == "mixed_float16" else 1.0,
                dynamic=False,
                reduce_dtype=reduce_dtype,
            )
            model.compile(optimizer, "mse")
        x = np.random.default_rng(0).normal(size=(BATCH, width)).astype("float32")
        batches = tf.data.Dataset.from_tensors((x, x[:, :1])).repeat()
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.OFF
        )
        batches = batches.with_options(options)
        ends: list[tuple[int, float]] = []

        class Ends(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                ends.append((sent_bytes(), time.perf_counter()))

        def turn() -> tuple[float, float]:
            ends.clear()
            model.fit(batches, steps_per_epoch=steps + 2, verbose=0, callbacks=[Ends()])
            (first, begin), (last, end) = ends[1], ends[-1]
            return (last - first) / steps, (end - begin) / steps

        return turn

    sides = [side(None), side("auto")]
    take_turns(sides, 1)
    return take_turns(sides, turns).tolist()


def run_worker(out: str, asked: dict[str, Any]) -> None:
    """Does what was asked of a worker, and writes what came out."""
    import tfamp

    strategy = tfamp.distribute.strategy()
    found: dict[str, Any] = {"mask": mask(strategy), "seen": seen(strategy, 41)}
    if "policies" in asked:
        found["weights"] = many(strategy, asked["policies"])
    for policy in asked.get("wire", ()):
        found[policy] = wire(strategy, policy, **asked["sizes"])
    Path(out).write_text(json.dumps(found), encoding="utf-8")


def in_namespace(num: int, folder: Path, asked: dict[str, Any], rate: str = "") -> Any:
    """Returns what each of some workers has written, in a namespace of their own.

    Args:
        num: The number of workers.
        folder: Where they write.
        asked: What `run_worker` is asked.
        rate: The limit of the wire as `tc` has it, "100mbit"; "" for none.
    """
    limit = f"tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 400ms && "
    command = f"ip link set lo up && {limit if rate else ''}exec " + '"$@"'
    python = [sys.executable, "-c", _LAUNCH, str(num), str(folder), json.dumps(asked)]
    completed = subprocess.run(
        ["unshare", "-rn", "sh", "-c", command, "sh", *python],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if completed.returncode:
        raise RuntimeError(completed.stderr[-5000:] or completed.stdout[-5000:])
    outs = [folder / f"worker{index}.json" for index in range(num)]
    return [json.loads(out.read_text(encoding="utf-8")) for out in outs]


def launch(num: str, folder: str, asked: str) -> None:
    """Starts workers in this namespace, waits for them, and leaves none behind."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(int(num))]
    workers: list[subprocess.Popen[bytes]] = []
    code = "import json, sys; from benchmarks._scale_workers import run_worker; "
    code += "run_worker(sys.argv[1], json.loads(sys.argv[2]))"
    try:
        for index in range(int(num)):
            task = {"type": "worker", "index": index}
            cluster = {"cluster": {"worker": addresses}, "task": task}
            out = str(Path(folder) / f"worker{index}.json")
            environment = {**os.environ, "TF_CONFIG": json.dumps(cluster)}
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-c", code, out, asked], env=environment
                )
            )
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for worker in workers:
            worker.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(worker.returncode for worker in workers):
        sys.exit("A worker has failed.")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
