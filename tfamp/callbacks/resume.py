"""`Resume`: training that goes on where it was, to the bit."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.callbacks import _resume_state as states
from tfamp.callbacks._fit_callback import FitCallback
from tfamp.keras_hooks import around_training, epochs
from tfamp.keras_hooks.epochs import EPOCH_HOOKS, Execution, Feed, Place
from tfamp.keras_hooks.workers import part_of
from tfamp.records import checks, console
from tfamp.stepping.snapshot_files import Folder, Kept, folder_path
from tfamp.stepping.snapshots import State
from tfamp.stepping.unchanged import put_random, take_random


class Resume(FitCallback):
    """Keeps the state of `fit`, so that the same program goes on where it was killed.

    What follows equals, bit by bit, what would have followed: weights, optimizer, loss
    scale and counters, random states of layers, of Python, NumPy and Keras, metrics,
    the history, and the place in the data, a `tfamp.data.Pipeline`'s too. Run the same
    program again: it begins with the newest state. A training that has come to its end
    trains its last step again; with more `epochs` it goes on. The order of the data has
    to be the same in each process: call `keras.utils.set_random_seed` first, or give
    `shuffle` a `seed`; where it is not, one line says so.

    With several workers each writes to a folder that all see, and all go on at the
    newest step that all have. When one dies the others end within half a minute. Not
    kept: `tf.random` operations inside of the step (`keras.random` with a
    `SeedGenerator` is), state of generators and `PyDataset`s, and, as with
    `BackupAndRestore`, of other callbacks.

    Args:
        directory: A folder, one for each training: local, or any path that
            `tf.io.gfile` opens, such as "gs://...".
        every_steps: Batches between two states, which are written while training
            waits. The last step of all is kept too.

    Attributes:
        resumed_at: Epoch and step that the last `fit` went on from, None for none.

    Raises:
        ValueError: A value is out of range; or, before any training, the folder cannot
            be written, or holds a training of another model, policy, data, or number
            of workers or replicas.

    Example:
        >>> import keras, numpy as np, tempfile
        >>> data, folder = np.ones((8, 1), np.float32), tempfile.mkdtemp()
        >>> def run(epochs):
        ...     keras.utils.set_random_seed(0)
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     resume = Resume(folder, every_steps=2)
        ...     run = {"epochs": epochs, "verbose": 0, "callbacks": [resume]}
        ...     return resume, model.fit(data, data, **run).epoch
        >>> (first, _), (second, epochs) = run(epochs=2), run(epochs=3)
        >>> first.resumed_at, second.resumed_at, epochs
        (None, (1, 0), [0, 1, 2])
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, every_steps: int = 500
    ) -> None:
        super().__init__()
        self.directory = folder_path(directory)
        self.every_steps = checks.positive_int("every_steps", every_steps)
        self.resumed_at: tuple[int, int] | None = None
        EPOCH_HOOKS.install()
        self._feed: Feed | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Looks for a training to go on with, and whether it is this one."""
        feed = around_training.feed_of(self.model)
        if feed is None:
            raise ValueError(
                "Resume was told that training begins outside of `fit`; expected "
                "`model.fit(..., callbacks=[Resume(...)])`. Use it there."
            )
        for each in around_training.callbacks_of(self.model):
            if isinstance(each, keras.callbacks.BackupAndRestore):
                raise ValueError(
                    "Resume and BackupAndRestore are in the same `fit`; expected one, "
                    "since each would begin where it thinks. Leave the other out."
                )
        if feed.around is not None:
            self._note("A second Resume in the same `fit` does nothing: use one.")
            return
        strategy = self.model.distribute_strategy
        place, num_workers = states.place_of(strategy)
        self._folder = Folder(self.directory, place, num_workers)
        self.resumed_at = None
        self._found: State | None = None
        self._pending: State | None = None
        self._epoch = self._total = self._since = 0
        kept = self._folder.newest()
        if num_workers > 1:
            step = -1 if kept is None else kept[0].number
            states.check_same(strategy, step, self.directory)
        if kept is not None:
            self._go_on(*kept, feed)
        elif self._folder.listed():
            self._note(
                f"Resume: {self.directory!r} holds no whole step of all workers, so "
                "training starts from its beginning. All have to see the folder."
            )
        self._join()
        self._feed, feed.around = feed, self._steps_of_epoch
        if why := states.unrepeatable(feed):
            self._note(
                f"Resume: {why}, so a training that goes on will not equal this one to "
                "the bit. Call `keras.utils.set_random_seed` first, or seed it."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes which epoch it is."""
        self._epoch = epoch

    def _close(self, error: BaseException | None) -> None:
        feed, self._feed, self._found = self._feed, None, None
        if feed is not None:
            feed.around = None
        if self.resumed_at is not None:
            epochs.begin_at(self.model, None)
        if states.has_lost_another(error) and self._folder.num_workers > 1:
            logging.error(
                "Resume: another worker does not answer any more. This one ends too, "
                "as it cannot train alone. Start all workers again: they go on at the "
                "newest step that all of them have in %r.",
                self.directory,
            )

    def _go_on(self, kept: Kept, state: State, feed: Feed) -> None:
        """Checks that a state is of this training, and has `fit` begin there."""
        held = state.counters[states.KEY]
        before = {"workers": kept.num_workers, **held["data"]}
        now = {"workers": self._folder.num_workers, **states.data_of(self.model, feed)}
        changed = [
            f"{name} {before[name]}, and now {now[name]}"
            for name in now
            if before[name] != now[name] and None not in (before[name], now[name])
        ]
        if changed:
            raise states.refusal(self.directory, f"had {', '.join(changed)}")
        epoch, num_epochs = held["epoch"], (self.params or {}).get("epochs")
        if num_epochs is not None and epoch >= num_epochs:
            why = f"is in epoch {epoch} (from 0), and `epochs` is {num_epochs}"
            raise states.refusal(self.directory, why)
        self._total, self._found = held["total"], state
        self.resumed_at = epoch, held["step"]
        epochs.begin_at(self.model, epoch)
        where = os.path.join(self.directory, kept.name)
        console.say(
            f"Resume: going on behind step {held['step']} of epoch {epoch} (from 0), "
            f"of {where!r}."
        )
        if held["platform"] != states.platform():
            self._note(
                "Resume: what follows is not to the bit what the training in "
                f"{self.directory!r} would have been, since its global seed was "
                f"{held['platform'][0]} and it ran on {held['platform'][1]}."
            )

    def _steps_of_epoch(self, executions: Iterator[Execution]) -> Iterator[Execution]:
        """Goes through an epoch: draws what was trained, and keeps states."""
        feed, found, self._found = self._feed, self._found, None
        if feed is None:
            yield from executions
            return
        held: dict[str, Any] = {} if found is None else found.counters[states.KEY]
        skipped = int(held.get("step", 0))
        if found is not None:
            found = self._go_to(found, feed)
        is_due = self._since >= self.every_steps or self._pending is not None
        self._start = {
            "place": list(dataclasses.astuple(feed.place())),
            "random of epoch": take_random(),
            "passes": states.take_passes(feed),
        }
        if not held and self._total and (is_due or self._is_final(feed, 0)):
            self._pending = None
            self._write(self._state(0, feed))
        for each in executions:
            if each.begin < skipped:
                batch = self._draw(each, skipped)
                if found is not None:
                    self._put(found, batch)
                    found = None
                continue
            if held:
                put_random(held["random"])
                held = {}
            yield each
            self._after(each, feed)

    def _draw(self, execution: Execution, skipped: int) -> Any:
        """Draws the batches of an execution that was trained; returns the last."""
        batch = None
        for step in range(execution.begin, min(execution.end, skipped)):
            batch = next(execution.iterator, None)
            if batch is None:
                why = f"had {skipped} batches of an epoch; the data ended after {step}"
                raise states.refusal(self.directory, why)
        return batch

    def _go_to(self, state: State, feed: Feed) -> State | None:
        """Goes to where an epoch began; returns the state, unless it was put."""
        held = state.counters[states.KEY]
        put_random(held["random of epoch"])
        place = Place(*held["place"])
        # One iterator for all epochs counts its passes anew.
        passes = [] if place.drawn else held["passes"]
        states.put_passes(feed, passes)
        batch = feed.go_to(place)
        states.put_passes(feed, passes)
        if batch is None and not held["step"]:
            batch = feed.first_batch()
        if batch is None:
            return state
        self._put(state, batch)
        return None

    def _put(self, state: State, batch: Any) -> None:
        part = part_of(batch, self.model.distribute_strategy)
        states.put(self.model, state, part, self.directory)

    def _after(self, execution: Execution, feed: Feed) -> None:
        """Keeps the state where it is time, after all callbacks have seen the step.

        Behind an epoch's last step, where the logs are in nobody's hands, the next
        epoch's start is kept; so where that step is not known one waits for another.
        """
        num_batches = feed.num_batches
        end = min(execution.end, num_batches or execution.end)
        self._total += end - execution.begin
        self._since += end - execution.begin
        if self._pending is not None:
            self._write(self._pending)
            self._pending = None
            self._since = end - execution.begin
        is_due = self._since >= self.every_steps or self._is_final(feed, end)
        if is_due and num_batches is None:
            self._pending = self._state(end, feed)
        elif is_due and end != num_batches:
            self._write(self._state(end, feed))

    def _is_final(self, feed: Feed, end: int) -> bool:
        """Returns whether only the last execution of the last epoch is left."""
        num_epochs, num_batches = (self.params or {}).get("epochs"), feed.num_batches
        if num_batches is None or self._epoch + 1 != num_epochs:
            return False
        return end < num_batches <= end + feed.steps_per_execution

    def _state(self, step: int, feed: Feed) -> State:
        """Returns all that a training needs to go on behind a step of this epoch."""
        at = {"epoch": self._epoch, "step": step, "total": self._total}
        return states.take(self.model, feed, {**at, **self._start})

    def _write(self, state: State) -> None:
        self._since = 0
        try:
            self._folder.write(state, state.counters[states.KEY]["total"])
        except (OSError, tf.errors.OpError) as error:
            self._note(
                f"Resume: a state could not be written to {self.directory!r} "
                f"({error}). Training goes on, the files before it stay, and the next "
                "one is tried too. Free space there."
            )
