"""The files that a training resumes from, and the workers that write them.

There is one for each worker and step kept. They are found by their names alone, so that
no index can be torn from them. A file has its name only when it is whole.
"""

import contextlib
import io
import os
import re
import zipfile
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from tfamp.records.record import BESIDE
from tfamp.stepping.snapshot_files import (
    made_folder,
    read_archive,
    write,
    write_archive,
)
from tfamp.stepping.snapshots import State

_NAME = re.compile(r"step-(\d+)\.worker-(\d+)-of-(\d+)\.npz")


class Kept(NamedTuple):
    """A file in the folder, by what its name says."""

    step: int
    place: int
    num_workers: int

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"step-{self.step:09d}.worker-{self.place}-of-{self.num_workers}.npz"


class Folder:
    """The files of one training in a folder that all workers see.

    `directory` is local, or any path that `tf.io.gfile` opens, such as "gs://...";
    `index` is the place of this worker.
    """

    def __init__(self, directory: str, index: int = 0, num_workers: int = 1) -> None:
        self.directory = directory
        self._index, self._num_workers = index, num_workers
        self._is_local = "://" not in directory
        self._passed_over: set[str] = set()

    def prepare(self) -> None:
        """Makes the folder, and clears what a killed process left half written."""
        if self._is_local:
            made_folder("directory", self.directory)
        else:
            try:
                tf.io.gfile.makedirs(self.directory)
            except (tf.errors.OpError, OSError) as error:
                raise ValueError(
                    f"`directory` {self.directory!r} cannot be made ({error}); "
                    "expected a folder that `tf.io.gfile` can write. Pass another path."
                ) from error
        mine = f".worker-{self._index}-of-{self._num_workers}.npz"
        for name in tf.io.gfile.listdir(self.directory):
            if mine in name and name.endswith(BESIDE):
                tf.io.gfile.remove(self._path(name))

    def newest(self) -> Kept | None:
        """Returns this worker's file of the newest step that all workers have whole.

        Of a training with another number of workers, which is refused, that of its
        chief or of its worker of the same place.
        """
        for files in self._complete():
            if all(self._is_whole(each) for each in files):
                return files[self._index if self._index < len(files) else 0]
        return None

    def read(self, kept: Kept) -> State:
        """Reads a file; a ValueError says that it is damaged."""
        try:
            with tf.io.gfile.GFile(self._path(kept.name), "rb") as file:
                return read_archive(io.BytesIO(file.read()))
        except Exception as error:  # whatever damaged headers lead zip and NumPy to
            raise ValueError(
                f"The file {self._path(kept.name)!r} is damaged ({error}); expected "
                "what `Resume` wrote. Delete the files of its step, and the step "
                "before is taken."
            ) from error

    def write(self, state: State, step: int) -> None:
        """Writes a state, which is whole when it has its name, and clears older ones.

        After an OSError what was there before still is.
        """
        kept = Kept(step, self._index, self._num_workers)
        if self._is_local:
            write(state, self._path(kept.name))
        else:
            self._write_far(state, kept.name)
        self._clear()

    def others_have_files(self) -> bool:
        """Returns whether there are files of some workers, but no step of all."""
        return bool(self._listed()) and self.newest() is None

    def _write_far(self, state: State, name: str) -> None:
        content = io.BytesIO()
        write_archive(state, content)
        beside = self._path(f".{name}{BESIDE}")
        try:
            with tf.io.gfile.GFile(beside, "wb") as file:
                file.write(content.getvalue())
            tf.io.gfile.rename(beside, self._path(name), overwrite=True)
        except tf.errors.OpError as error:
            with contextlib.suppress(tf.errors.OpError):
                tf.io.gfile.remove(beside)
            raise OSError(error.message) from error

    def _clear(self) -> None:
        """Deletes this worker's files of steps before the last two that all have.

        Two, since a disk may lose what it has told to hold.
        """
        complete = [files[0].step for files in self._complete()]
        first = complete[1] if len(complete) > 1 else -1
        for each in self._listed():
            is_mine = each.place == self._index or each.num_workers != self._num_workers
            if each.step < first and is_mine:
                with contextlib.suppress(tf.errors.OpError):
                    tf.io.gfile.remove(self._path(each.name))

    def _complete(self) -> list[list[Kept]]:
        """Returns the files of each step that all workers have, newest first."""
        steps: dict[tuple[int, int], set[int]] = {}
        for each in self._listed():
            steps.setdefault((each.step, each.num_workers), set()).add(each.place)
        # Of two trainings with the same step, that with as many workers comes first.
        newest_first = sorted(
            steps, key=lambda key: (key[0], key[1] == self._num_workers), reverse=True
        )
        return [
            [Kept(step, i, num_workers) for i in range(num_workers)]
            for step, num_workers in newest_first
            if len(steps[step, num_workers]) == num_workers
        ]

    def _listed(self) -> list[Kept]:
        found = map(_NAME.fullmatch, tf.io.gfile.listdir(self.directory))
        return [Kept(int(m[1]), int(m[2]), int(m[3])) for m in found if m is not None]

    def _is_whole(self, kept: Kept) -> bool:
        """Returns whether a file is there to its end; warns of one that is not."""
        try:
            path = self._path(kept.name)
            # The end of the file alone is read, which lists what is in it.
            with tf.io.gfile.GFile(path, "rb") as file, zipfile.ZipFile(file):
                return True
        except (zipfile.BadZipFile, OSError, tf.errors.OpError) as error:
            if kept.name not in self._passed_over:
                self._passed_over.add(kept.name)
                logging.warning(
                    "Resume: passed over %r, which is not whole (%s).",
                    self._path(kept.name),
                    error,
                )
            return False

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)


# What workers get whose reductions TensorFlow aborts, as another one does not answer.
_ABORTS = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError)
_TASK = re.compile(r"/job:(chief|worker)/replica:\d+/task:(\d+)")


def place_of(strategy: Any) -> tuple[int, int]:
    """Returns the place of this worker, from 0, and the number of workers."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 0, 1
    resolver = strategy.cluster_resolver
    addresses = _addresses(strategy)
    if len(addresses) < 2:
        return 0, 1
    place = list(addresses).index((resolver.task_type, int(resolver.task_id)))
    return place, len(addresses)


def lost(strategy: Any, error: BaseException | None) -> str | None:
    """Returns which worker does not answer any more, where that ended training.

    TensorFlow's workers send each other heartbeats: ten seconds after the last one it
    aborts the reductions of the others. Its error names who was lost, but for the first
    worker, to which all send theirs.
    """
    place, num_workers = place_of(strategy)
    text = str(error)
    if num_workers < 2 or not isinstance(error, _ABORTS) or "ollective" not in text:
        return None
    addresses = _addresses(strategy)
    named = {(job, int(task)) for job, task in _TASK.findall(text)}
    places = [i for i, task in enumerate(addresses) if task in named and i != place]
    if not places and "CoordinationService" in text and place:
        places = [0]
    if not places:
        return "Another worker"
    hosts = list(addresses.values())
    names = " and ".join(f"{i} ({hosts[i]!r})" for i in places)
    return f"Worker {names} of {num_workers}"


def _addresses(strategy: Any) -> dict[tuple[str, int], str]:
    """Returns the addresses of all workers by job and task, the chief first."""
    jobs = strategy.cluster_resolver.cluster_spec().as_dict()
    return {
        (job, task): address
        for job in ("chief", "worker")
        for task, address in enumerate(jobs.get(job, []))
    }


def check_same(strategy: Any, step: int, directory: str) -> None:
    """Raises unless all workers resume from the same step, -1 for the beginning."""

    def added_up() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tf.constant(step, tf.float64))

    total = strategy.experimental_local_results(strategy.run(added_up))[0]
    mean = float(total) / strategy.num_replicas_in_sync
    if mean != step:
        found = "no file of all" if step < 0 else f"step {step}"
        raise ValueError(
            f"`directory` is {directory!r}, in which this worker found {found}, and "
            "another one something else; expected a folder that all workers see. Pass "
            "one on a shared disk, or delete the files of the newest step."
        )
