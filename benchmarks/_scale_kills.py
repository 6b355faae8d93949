"""What `scale` kills: a training alone, on two workers and under Ray, again and again.

Each life of a training has one worker that is killed with SIGKILL at a random moment:
after so many seconds of training, or in one of its saves, when a random part of the
file is written, or before it has its name. The next life goes on, and the last one to
the end. Each step of each life notes its loss.
"""

import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._scale_workers import ROOT, free_port

EVERY_STEPS = 20
BATCHES, EPOCHS = 25, 48
GONE_SECONDS = 30
TIMEOUT_SECONDS = 240
# Seconds between two steps.
PACES = {"alone": 0.03, "2 workers": 0.03, "Ray, 2 workers": 0.1}
_LIFE = "import sys; from benchmarks._scale_kills import live; live(*sys.argv[1:])"


def moments(seed: int, kills: int, workers: int, pace: float) -> list[dict[str, Any]]:
    """Returns who is killed when in each life: at any time, or in a save, in turns."""
    drawn = random.Random(seed)
    found: list[dict[str, Any]] = []
    for life in range(kills):
        moment = {"worker": drawn.randrange(workers), "pace": pace}
        if life % 2:
            # Beyond 1, the file is whole and has no name yet.
            moment.update(save=drawn.randint(1, 3), part=drawn.uniform(0.0, 1.25))
        else:
            moment["seconds"] = drawn.uniform(0.0, 4 * EVERY_STEPS * pace)
        found.append(moment)
    return found


def train(strategy: Any, callbacks: list[Any], folder: str, index: int) -> None:
    """Trains a life of a worker, which may be killed in it.

    Args:
        strategy: Of the cluster, or the default one.
        callbacks: With a `Resume`.
        folder: Holds the moments; takes notes of lives, steps, kills and ends.
        index: Place of this worker.
    """
    import keras
    import tensorflow as tf

    import tfamp

    notes = Path(folder)
    life = len(list(notes.glob(f"life-{index}-*")))
    _note(notes / f"life-{index}-{life:02d}", str(os.getpid()))
    plan = json.loads((notes / "moments").read_text(encoding="utf-8"))
    moment = plan[life] if life < len(plan) else {}
    mine = moment if moment.get("worker") == index else {}

    def kill() -> None:
        _note(notes / f"killed-{life:02d}", repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if "save" in mine:
        _kill_in_save(mine["save"], mine["part"], kill)

    class Steps(keras.callbacks.Callback):
        begun = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not self.begun and "seconds" in mine:
                threading.Timer(mine["seconds"], kill).start()
            self.begun = True
            step = int(self.model.optimizer.iterations.numpy())
            row = json.dumps([life, step, float(logs["loss"])]) + "\n"
            with (notes / f"steps-{index}").open("a", encoding="utf-8") as file:
                file.write(row)
            time.sleep(moment.get("pace", 0.0))

    keras.utils.set_random_seed(0)
    with strategy.scope(), tfamp.scope("mixed_bfloat16"):
        layers = [
            keras.layers.Dense(16, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.01)), "mse")
    x = np.random.default_rng(0).normal(size=(8 * BATCHES, 8)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(len(x), seed=1)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    data = data.batch(8).with_options(options)
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[*callbacks, Steps()])
    total = hashlib.sha256()
    for variable in (*model.variables, *model.optimizer.variables):
        total.update(keras.ops.convert_to_numpy(variable).tobytes())
    _note(notes / f"end-{index}", total.hexdigest())


def live(folder: str, index: str) -> None:
    """Runs a life of one worker, or of a process alone."""
    import tfamp

    strategy = tfamp.distribute.strategy()
    states = str(Path(folder) / "states")
    resume = tfamp.callbacks.Resume(states, every_steps=EVERY_STEPS)
    train(strategy, [resume], folder, int(index))


def _note(path: Path, text: str) -> None:
    """Writes a file that is there with all of its text or not at all."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(text, encoding="utf-8")
    beside.rename(path)


def _kill_in_save(number: int, part: float, kill: Callable[[], None]) -> None:
    """Kills the process in its save of this number, when a part of it is written."""
    from tfamp.records import record as whole_files
    from tfamp.stepping import snapshot_files

    write, replace, saves = snapshot_files.write_archive, os.replace, [0]

    def write_archive(state: Any, file: Any) -> None:
        saves[0] += 1
        if saves[0] != number or part > 1:
            write(state, file)
            return
        content = io.BytesIO()
        write(state, content)
        file.write(content.getvalue()[: int(part * content.tell())])
        file.flush()
        kill()

    def named(source: Any, target: Any) -> None:
        if str(target).endswith(".npz") and saves[0] == number:
            kill()
        replace(source, target)

    snapshot_files.write_archive = write_archive
    whole_files.os.replace = named


class _Watch(threading.Thread):
    """Sees when the processes of a life are gone whose worker was killed.

    Args:
        folder: Of the notes.
        workers: Number of workers.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        super().__init__(daemon=True)
        self.seconds: dict[int, float] = {}
        self._folder, self._workers = folder, workers
        self._is_over = threading.Event()

    def run(self) -> None:
        """Looks until it is told to end."""
        while not self._is_over.wait(0.05):
            for path in self._folder.glob("killed-*"):
                life = int(path.name.partition("-")[2])
                if life not in self.seconds and not self._alive(life):
                    since = float(path.read_text(encoding="utf-8"))
                    self.seconds[life] = time.time() - since

    def end(self) -> list[float]:
        """Returns the seconds from each kill on until all of its life were gone."""
        time.sleep(0.2)
        self._is_over.set()
        self.join()
        return [self.seconds[life] for life in sorted(self.seconds)]

    def _alive(self, life: int) -> bool:
        names = (f"life-{index}-{life:02d}" for index in range(self._workers))
        paths = [self._folder / name for name in names]
        return any(
            _is_running(int(path.read_text(encoding="utf-8")))
            for path in paths
            if path.exists()
        )


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def _processes(folder: Path, workers: int) -> None:
    """Runs life after life, each of so many processes, until one is not killed."""
    lives = len(json.loads((folder / "moments").read_text(encoding="utf-8"))) + 1
    for life in range(lives):
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(workers)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for index in range(workers):
                task = {"type": "worker", "index": index}
                cluster = {"cluster": {"worker": addresses}, "task": task}
                config = json.dumps(cluster) if workers > 1 else ""
                with (folder / f"log-{index}-{life:02d}").open("w") as log:
                    running.append(
                        subprocess.Popen(
                            [sys.executable, "-c", _LIFE, str(folder), str(index)],
                            cwd=ROOT,
                            env={**os.environ, "TF_CONFIG": config},
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )
            deadline = time.monotonic() + TIMEOUT_SECONDS
            for worker in running:
                worker.wait(max(1.0, deadline - time.monotonic()))
        finally:
            for worker in running:
                worker.kill()
                worker.wait()
        if not any(worker.returncode for worker in running):
            return
        if not (folder / f"killed-{life:02d}").exists():
            raise RuntimeError((folder / f"log-0-{life:02d}").read_text()[-5000:])


def _on_ray(folder: Path, kills: int) -> None:
    """Runs all lives as one training of Ray, which starts the workers again."""
    import ray
    from ray import train as ray_train
    from ray.train.tensorflow import TensorflowTrainer

    import tfamp

    def of_worker(config: dict[str, str]) -> None:
        os.environ.pop("TF_USE_LEGACY_KERAS", None)
        strategy = tfamp.distribute.strategy()
        states = str(Path(config["folder"], "states"))
        resume = tfamp.callbacks.Resume(states, every_steps=EVERY_STEPS)
        index = ray_train.get_context().get_world_rank()
        train(strategy, [resume], config["folder"], index)

    os.environ["RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    options = {"include_dashboard": False, "log_to_driver": False}
    ray.init(num_cpus=2, object_store_memory=10**8, **options)
    try:
        TensorflowTrainer(
            of_worker,
            train_loop_config={"folder": str(folder)},
            scaling_config=ray_train.ScalingConfig(num_workers=2),
            run_config=ray_train.RunConfig(
                name="kills",
                storage_path=str(folder / "ray"),
                failure_config=ray_train.FailureConfig(max_failures=kills),
            ),
        ).fit()
    finally:
        ray.shutdown()


def rows(folder: Path, workers: int) -> list[list[list[Any]]]:
    """Returns the notes of each worker's steps: life, step, loss."""
    texts = [
        (folder / f"steps-{i}").read_text(encoding="utf-8") for i in range(workers)
    ]
    return [list(map(json.loads, text.splitlines())) for text in texts]


def lost_steps(noted: Sequence[Sequence[Any]]) -> list[int]:
    """Returns how many steps each life but the first trained again.

    Example:
        >>> lost_steps([[0, 1, 0.5], [0, 2, 0.4], [1, 2, 0.4], [2, 3, 0.3]])
        [1, 0]
    """
    before = zip(noted, noted[1:], strict=False)
    return [a[1] + 1 - b[1] for a, b in before if a[0] != b[0]]


def killed(setting: str, kills: int, seed: int = 0) -> dict[str, Any]:
    """Returns what came of a training with so many kills, beside one without."""
    workers = 1 if setting == "alone" else 2
    ends: list[list[str]] = []
    noted: list[Any] = []
    seconds: list[float] = []
    for plan in ([], moments(seed, kills, workers, PACES[setting])):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _note(folder / "moments", json.dumps(plan))
            watch = _Watch(folder, workers)
            watch.start()
            if "Ray" in setting and plan:
                _on_ray(folder, kills)
            else:
                _processes(folder, workers)
            seconds = watch.end()
            noted.append(rows(folder, workers))
            paths = [folder / f"end-{index}" for index in range(workers)]
            ends.append([path.read_text(encoding="utf-8") for path in paths])
    wanted = [{step: loss for _, step, loss in own} for own in noted[0]]
    same_steps = all(
        loss == exact[step]
        for own, exact in zip(noted[1], wanted, strict=True)
        for _, step, loss in own
    )
    lost = max(lost_steps(own) for own in noted[1])
    return {
        "kills": len(seconds),
        "equal": ends[0] == ends[1] and same_steps,
        "lost": max(lost, default=0),
        "every_steps": EVERY_STEPS,
        "gone_seconds": round(max(seconds, default=0.0), 1),
        "gone_goal": GONE_SECONDS,
    }
