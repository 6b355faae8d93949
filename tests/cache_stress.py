"""Processes that fill, fail, are killed and read one cache.

`python -m tests.cache_stress --minutes 60` runs eight of them and prints what they did.
Each looks at every element that it reads: a cache has to be whole and of the pipeline
that asked for it (`--no_locks` does without locks, as some file systems do).
"""

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUM_ELEMENTS = 200
FACTORS = (1, 2, 3)
_READS_A_KILL = 5


def work(folder, seed, has_locks):
    """Fills and reads caches in turn, until it is killed."""
    import numpy as np
    import tensorflow as tf

    from tfamp.data import Pipeline

    if not has_locks:
        sys.modules["filelock"] = None
    chance = random.Random(seed)
    fate = [NUM_ELEMENTS]

    def look(x):
        if x == fate[0]:
            raise RuntimeError("told to fail")
        return x

    def make(factor):
        def scaled(x):
            return tf.ensure_shape(tf.py_function(look, [x], tf.int64), ()) * factor

        pipeline = Pipeline.from_arrays(np.arange(NUM_ELEMENTS)).map(scaled)
        return pipeline.cache(Path(folder) / "train")

    def note(event):
        with open(Path(folder) / "events", "a") as file:
            file.write(event)

    while True:
        factor = chance.choice(FACTORS)
        fate[0] = chance.randrange(4 * NUM_ELEMENTS)
        try:
            found = [int(x) for x in make(factor).build()]
        except (tf.errors.OpError, OSError) as error:
            is_told = "told to fail" in str(error)
            note("f" if is_told or not has_locks else "w")
            if not is_told:
                (Path(folder) / f"wrong-{os.getpid()}").write_text(str(error))
            continue
        is_right = found == [factor * x for x in range(NUM_ELEMENTS)]
        note("r" if is_right else "w")
        if chance.random() < 0.3 and has_locks:
            remove_one(Path(folder), chance)


def remove_one(folder, chance):
    """Makes room for a new cache, as a user does: renames one, then removes it."""
    whole = [one for one in folder.glob("train-*") if one.is_dir() and not one.suffix]
    if whole:
        gone = folder / f"gone-{os.getpid()}-{time.monotonic_ns()}"
        with contextlib.suppress(OSError):
            chance.choice(whole).rename(gone)
            shutil.rmtree(gone)


def stress(folder, seconds, *, num_processes, has_locks, num_reads, seed):
    """Runs processes, of which one after the other is killed; returns the counts."""
    chance = random.Random(seed)
    events = Path(folder) / "events"
    events.touch()

    def start(number):
        code = f"from tests.cache_stress import work; work({folder!r}, {number}, "
        command = [sys.executable, "-c", f"{code}{has_locks})"]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)

    running = [start(number) for number in range(num_processes)]
    num_started, num_killed = num_processes, 0
    end = time.monotonic() + seconds
    read_at_last = 0
    while time.monotonic() < end:
        counts = collections.Counter(events.read_text())
        if num_reads and counts["r"] >= num_reads and num_killed:
            break
        time.sleep(chance.uniform(0, 0.1))
        # A new process needs seconds to begin, so the others get on before the next.
        if counts["r"] - read_at_last >= _READS_A_KILL:
            place = chance.randrange(num_processes)
            running[place].send_signal(signal.SIGKILL)
            running[place].wait()
            running[place] = start(num_started)
            num_started, num_killed = num_started + 1, num_killed + 1
            read_at_last = counts["r"]
    for process in running:
        process.kill()
        process.wait()
    counts = collections.Counter(events.read_text())
    found = {"read": counts["r"], "failed": counts["f"], "wrong": counts["w"]}
    return found | {"killed": num_killed}


def main():
    """Runs the processes, and prints what they did as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--reads", type=int, default=0, help="0 for no limit")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--no_locks", action="store_true")
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = stress(
            folder,
            60 * arguments.minutes,
            num_processes=arguments.processes,
            has_locks=not arguments.no_locks,
            num_reads=arguments.reads,
            seed=arguments.seed,
        )
        wrong = [path.read_text() for path in Path(folder).glob("wrong-*")]
    print(json.dumps(counts))
    print("\n".join(wrong[:20]), file=sys.stderr)
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
