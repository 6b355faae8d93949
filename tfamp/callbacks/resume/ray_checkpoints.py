"""`Resume` under Ray Train, which keeps the states in checkpoints of its own."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import ray.train

from tfamp.callbacks.resume import Resume
from tfamp.callbacks.resume.files import Folder, Kept
from tfamp.stepping.snapshot_files import write
from tfamp.stepping.snapshots import State


class RayResume(Resume):
    """A `Resume` whose files are in Ray's checkpoints, and that reports each epoch.

    Ray counts a checkpoint when the files of all workers are in it, so the newest is
    one that all have. Reports hold `epoch` (from 0), `steps` since the beginning, and
    the logs of the newest epoch that has ended.

    Args:
        every_steps: As in `Resume`.
    """

    def __init__(self, *, every_steps: int) -> None:
        self._logs: dict[str, float] = {}
        name = ray.train.get_context().get_experiment_name()
        super().__init__(name, every_steps=every_steps)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports what the epoch came to."""
        self._logs = {name: float(value) for name, value in (logs or {}).items()}
        ray.train.report(self._metrics())

    def _again(self) -> str:
        return (
            "Where `max_failures` of Ray's `FailureConfig` allows it, Ray starts all "
            "workers again, and they go on from its newest checkpoint."
        )

    def _folder_of(self, index: int, num_workers: int) -> Folder:
        return _Checkpoints(self.directory, index, num_workers, self._metrics)

    def _metrics(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "steps": self._total, **self._logs}


class _Checkpoints(Folder):
    """The files of one training, each step's in a checkpoint.

    `directory` is what Ray calls the training, and `metrics` gives what is reported
    with a checkpoint.
    """

    def __init__(
        self,
        directory: str,
        index: int,
        num_workers: int,
        metrics: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__(directory, index, num_workers)
        self._metrics = metrics
        self._state: State | None = None

    def prepare(self) -> None:
        """Ray has made what there is to make."""

    def others_have_files(self) -> bool:
        """Never: Ray gives no checkpoint that only some workers have written to."""
        return False

    def newest(self) -> Kept | None:
        """Reads this worker's file in the newest checkpoint, and returns its name."""
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return None
        # Ray may hold it in memory of another machine, and here only for this block.
        with checkpoint.as_directory() as path:
            folder = Folder(path, self._index, self._num_workers)
            kept = folder.newest()
            if kept is None:
                raise ValueError(
                    f"Ray's checkpoint {checkpoint.path!r} holds no state of all "
                    "workers; expected what `tfamp.distribute.ray_loop` keeps in it. "
                    "Pass another `name` in Ray's `RunConfig`."
                )
            self._state = folder.read(kept)
        return kept

    def read(self, kept: Kept) -> State:
        """Returns what `newest` has read."""
        state, self._state = self._state, None
        return state if state is not None else super().read(kept)

    def write(self, state: State, step: int) -> None:
        """Writes a state into a new checkpoint, and waits until all workers have.

        Where it cannot be written, training cannot go on, as the others would count a
        checkpoint that lacks this worker's file.
        """
        kept = Kept(step, self._index, self._num_workers)
        try:
            folder = tempfile.mkdtemp()
            write(state, os.path.join(folder, kept.name))
            ray.train.report(
                self._metrics(),
                checkpoint=ray.train.Checkpoint.from_directory(folder),
                delete_local_checkpoint_after_upload=True,
            )
        except OSError as error:
            raise RuntimeError(
                f"The checkpoint of step {step} of {self.directory!r} could not be "
                f"written ({error}); expected room in {tempfile.gettempdir()!r} and in "
                "Ray's `storage_path`. Free some; where `max_failures` allows it, Ray "
                "goes on from the checkpoint before."
            ) from error
