"""Processes that fill, fail, are killed and read one cache, without TensorFlow.

`python -m tests.cache_stress --minutes 60` runs eight of them and prints what they did.
Each looks at every byte it reads: a cache has to be whole, of the fingerprint that was
asked for, and to stay while it is read. Two must not fill the same cache at once, where
there are locks (`--no_locks` pretends that the file system has none).
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIGESTS = [f"{number:012x}" for number in range(1, 4)]
CHUNKS = 4
EVENTS = {"b": "filled", "f": "failed", "r": "read", "d": "removed", "w": "wrong"}
SOME_MILLISECONDS = 0.003


def caches(has_locks):
    """Returns the module of the cache's files, without what imports TensorFlow."""
    package = types.ModuleType("tfamp.data")
    package.__path__ = [str(ROOT / "tfamp" / "data")]
    sys.modules.setdefault("tfamp.data", package)
    from tfamp.data.stages import cache_files

    if not has_locks:
        cache_files.fcntl = None
    return cache_files


def chunk(digest, number):
    """Returns the bytes that a cache of this fingerprint holds at a place."""
    return hashlib.blake2b(f"{digest} {number}".encode()).digest() * 100


class Worker:
    """Fills and reads caches in turn, until it is killed."""

    def __init__(self, folder, seed, has_locks):
        self.folder, self.has_locks = Path(folder), has_locks
        self.random = random.Random(seed)
        self.module = caches(has_locks)
        self.events = os.open(
            self.folder / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT
        )

    def note(self, event):
        os.write(self.events, event.encode())

    def wrong(self, what):
        (self.folder / f"wrong-{os.getpid()}-{time.monotonic_ns()}").write_text(what)
        self.note("w")

    def pause(self):
        time.sleep(self.random.uniform(0, SOME_MILLISECONDS))

    def maybe_end(self, fate, place):
        if fate == ("die", place):
            os.kill(os.getpid(), signal.SIGKILL)
        if fate == ("fail", place):
            raise RuntimeError("told to fail")

    def fill(self, files):
        with self.alone(files.digest):
            files.remove_unnamed()
            way = self.random.choice(["go on", "go on", "die", "fail"])
            fate = way, self.random.randrange(CHUNKS + 2)
            data = files.new_data()
            try:
                shard = data.with_name(f"{data.name}.data-00000-of-00001")
                with shard.open("wb") as file:
                    for number in range(CHUNKS):
                        self.maybe_end(fate, number)
                        file.write(chunk(files.digest, number))
                        file.flush()
                        self.pause()
                self.maybe_end(fate, CHUNKS)
                data.with_name(f"{data.name}.index").write_text(files.digest)
                self.maybe_end(fate, CHUNKS + 1)
                files.publish(data, {"digest": files.digest})
            except RuntimeError:
                for path in files.parts(data.name):
                    path.unlink()
                raise
            self.note("b")

    @contextlib.contextmanager
    def alone(self, digest):
        """Notes where another one fills the same cache, by a lock of its own."""
        if not self.has_locks:
            yield
            return
        import fcntl

        with (self.folder / f"alone-{digest}").open("w") as file:
            for _ in range(200):  # a killed process closes its files one by one
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.01)
            else:
                self.wrong(f"two fill {digest}")
            yield

    def read(self, files):
        """Looks twice at what is there: it has to stay while it is held."""
        for _ in range(2):
            record = files.read()
            if record.get("digest") != files.digest:
                return self.wrong(f"record of {files.digest}: {record}")
            data = files.path.with_name(record["data"])
            found = data.with_name(f"{data.name}.data-00000-of-00001").read_bytes()
            if found != b"".join(chunk(files.digest, n) for n in range(CHUNKS)):
                return self.wrong(f"{len(found)} bytes of {files.digest}")
            files.write({**record, "hits": 1})
            self.pause()
        self.note("r")
        return None

    def step(self):
        files = self.module.CacheFiles(
            self.folder / "train", self.random.choice(DIGESTS)
        )
        try:
            self.module.fill_or_read(files, lambda: self.fill(files))
        except RuntimeError:
            return self.note("f")
        except FileNotFoundError:
            # Without locks another one may take a slow process for a dead one.
            return self.note("f") if not self.has_locks else self.wrong("files went")
        with contextlib.suppress(*([] if self.has_locks else [FileNotFoundError])):
            self.read(files)
        for other in self.module.others(files) if self.random.random() < 0.5 else []:
            with self.module.kept_from_others(other) as is_unused:
                if is_unused:
                    other.remove()
                    self.note("d")
        for held in self.module._HELD.values():  # as its end would
            os.close(held)
        self.module._HELD.clear()
        return None

    def run(self):
        while True:
            self.step()


def start(folder, seed, has_locks):
    """Starts a worker; returns the number of its process."""
    process = os.fork()
    if process == 0:
        try:
            Worker(folder, seed, has_locks).run()
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            (Path(folder) / f"wrong-{os.getpid()}").write_text(text)
        finally:
            os._exit(1)
    return process


def stress(folder, seconds, *, num_processes, has_locks, num_reads, seed):
    """Runs processes, of which one after the other is killed.

    Returns:
        How often each thing happened, and what went wrong, in words.
    """
    caches(has_locks)  # imported here, so that a new process costs little
    chance = random.Random(seed)
    events = Path(folder) / "events"
    events.touch()
    running = [start(folder, number, has_locks) for number in range(num_processes)]
    seeds, num_killed = num_processes, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if num_reads and events.read_text().count("r") >= num_reads:
            break
        time.sleep(chance.uniform(0, 0.05))
        if chance.random() < 0.5:
            os.kill(running[chance.randrange(num_processes)], signal.SIGKILL)
        for place, process in enumerate(running):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                num_killed += os.waitstatus_to_exitcode(status) == -signal.SIGKILL
                running[place] = start(folder, seeds, has_locks)
                seeds += 1
    for process in running:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    counts = collections.Counter(events.read_text())
    found = {name: counts[letter] for letter, name in EVENTS.items()}
    wrong = [path.read_text() for path in sorted(Path(folder).glob("wrong-*"))]
    return found | {"killed": num_killed}, wrong


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
        counts, wrong = stress(
            folder,
            60 * arguments.minutes,
            num_processes=arguments.processes,
            has_locks=not arguments.no_locks,
            num_reads=arguments.reads,
            seed=arguments.seed,
        )
    print(json.dumps(counts))
    print("\n".join(wrong[:20]), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
