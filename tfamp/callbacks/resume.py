"""`Resume`: training that goes on where it was, to the bit."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.callbacks._fit_callback import FitCallback, Logs, has_workers
from tfamp.data.stages.augment import EpochCounter
from tfamp.dtypes import resolution
from tfamp.keras_hooks import around_training, epochs, structure, trainer
from tfamp.keras_hooks.epochs import EPOCH_HOOKS, Execution, Feed, Place
from tfamp.keras_hooks.optimizers import optimizers_of
from tfamp.keras_hooks.workers import part_of
from tfamp.records import checks, console
from tfamp.stepping import snapshots
from tfamp.stepping.snapshot_files import Folder, Kept, folder_path
from tfamp.stepping.snapshots import State
from tfamp.stepping.unchanged import put_random, take_random

# The name of this record among the counters of a state.
_KEY = "resume"
# What TensorFlow gives where no global seed is set.
_NO_SEED = 87654321
# What workers get whose reductions TensorFlow aborts, as another one does not answer.
_ABORTS = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError)


class Resume(FitCallback):
    """Keeps the state of `fit`, so that the same program goes on where it was killed.

    What follows equals, bit by bit, what would have followed: weights, optimizer, loss
    scale and counters, random states of layers, of Python, NumPy and Keras, metrics,
    the history, and the place in the data, a `tfamp.data.Pipeline`'s too. Run the same
    program again: it begins with the newest state, `resumed_at` an epoch and step. A
    training at its end trains its last step again; with more `epochs` it goes on. The
    order of the data has to be the same in each process: call
    `keras.utils.set_random_seed` first; where it is not, one line says so.

    With several workers each writes to a folder that all see, and all go on at the
    newest step that all have. When one dies the others end within half a minute. Not
    kept: `tf.random` operations inside of the step (`keras.random` is), state of
    generators, `PyDataset`s, and, as with `BackupAndRestore`, of other callbacks.

    Args:
        directory: A folder, one for each training: local, or any path that
            `tf.io.gfile` opens, such as "gs://...".
        every_steps: Batches between two states; the last step is kept too.

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

    def on_train_begin(self, logs: Logs = None) -> None:
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
        self._folder = Folder(self.directory, *_place_of(self.model))
        self.resumed_at = None
        self._found: State | None = None
        self._pending: State | None = None
        self._epoch = self._total = self._since = 0
        kept = self._folder.newest()
        if self._folder.num_workers > 1:
            self._check_same(-1 if kept is None else kept[0].number)
        if kept is not None:
            self._go_on(*kept, feed)
        elif self._folder.listed():
            self._note(
                f"Resume: {self.directory!r} holds no whole step of all workers, so "
                "training starts from its beginning. All have to see the folder."
            )
        self._join()
        self._feed, feed.around = feed, self._steps_of_epoch
        if why := _unrepeatable(feed):
            self._note(
                f"Resume: {why}, so a training that goes on will not equal this one to "
                "the bit. Call `keras.utils.set_random_seed` first, or seed it."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Notes which epoch it is."""
        self._epoch = epoch

    def _close(self, error: BaseException | None) -> None:
        feed, self._feed, self._found = self._feed, None, None
        if feed is not None:
            feed.around = None
        if self.resumed_at is not None:
            epochs.begin_at(self.model, None)
        is_aborted = isinstance(error, _ABORTS) and "ollective" in str(error)
        if is_aborted and self._folder.num_workers > 1:
            logging.error(
                "Resume: another worker does not answer any more. This one ends too, "
                "as it cannot train alone. Start all workers again: they go on at the "
                "newest step that all of them have in %r.",
                self.directory,
            )

    def _check_same(self, step: int) -> None:
        """Raises unless all workers resume from the same step, -1 for the beginning."""
        strategy = self.model.distribute_strategy

        def added_up() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", tf.constant(step, tf.float64))

        total = strategy.experimental_local_results(strategy.run(added_up))[0]
        if float(total) / strategy.num_replicas_in_sync != step:
            found = "no file of all" if step < 0 else f"step {step}"
            raise ValueError(
                f"`directory` is {self.directory!r}, in which this worker found "
                f"{found}, and another one something else; expected a folder that all "
                "workers see. Pass one on a shared disk, or delete the files of the "
                "newest step."
            )

    def _go_on(self, kept: Kept, state: State, feed: Feed) -> None:
        """Checks that a state is of this training, and has `fit` begin there."""
        held = state.counters[_KEY]
        before = {"workers": kept.num_workers, **held["data"]}
        now = {"workers": self._folder.num_workers, **_data_of(self.model, feed)}
        changed = [
            f"{name} {before[name]}, and now {now[name]}"
            for name in now
            if before[name] != now[name] and None not in (before[name], now[name])
        ]
        if changed:
            raise self._refusal(f"had {', '.join(changed)}")
        epoch, num_epochs = held["epoch"], (self.params or {}).get("epochs")
        if num_epochs is not None and epoch >= num_epochs:
            why = f"is in epoch {epoch} (from 0), and `epochs` is {num_epochs}"
            raise self._refusal(why)
        self._total, self._found = held["total"], state
        self.resumed_at = epoch, held["step"]
        epochs.begin_at(self.model, epoch)
        where = os.path.join(self.directory, kept.name)
        console.say(
            f"Resume: going on behind step {held['step']} of epoch {epoch} (from 0), "
            f"of {where!r}."
        )
        if held["platform"] != _platform():
            self._note(
                "Resume: what follows is not to the bit what the training in "
                f"{self.directory!r} would have been, since its global seed was "
                f"{held['platform'][0]} and it ran on {held['platform'][1]}."
            )

    def _refusal(self, why: str) -> ValueError:
        return ValueError(
            f"The training in {self.directory!r} {why}; expected the same program as "
            "before. Run that one, or pass another `directory`."
        )

    def _steps_of_epoch(self, executions: Iterator[Execution]) -> Iterator[Execution]:
        """Goes through an epoch: draws what was trained, and keeps states."""
        feed, found, self._found = self._feed, self._found, None
        if feed is None:
            yield from executions
            return
        held: dict[str, Any] = {} if found is None else found.counters[_KEY]
        skipped = int(held.get("step", 0))
        if found is not None and self._go_to(found, feed):
            found = None
        is_due = self._since >= self.every_steps or self._pending is not None
        self._start = {
            "place": list(dataclasses.astuple(feed.place())),
            "random of epoch": take_random(),
            "passes": [int(each.read()) for each in _counters(feed)],
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
                raise self._refusal(why)
        return batch

    def _go_to(self, state: State, feed: Feed) -> bool:
        """Goes to where an epoch began; returns whether it has put the state."""
        held = state.counters[_KEY]
        put_random(held["random of epoch"])
        place = Place(*held["place"])
        # One iterator for all epochs counts its passes anew.
        passes = [] if place.drawn else held["passes"]
        _count_from(feed, passes)
        batch = feed.go_to(place)
        _count_from(feed, passes)
        if batch is None and not held["step"]:
            batch = feed.first_batch()
        if batch is not None:
            self._put(state, batch)
        return batch is not None

    def _put(self, state: State, batches: Any) -> None:
        """Gives the model, built from a batch if need be, what a state holds."""
        model, held = self.model, state.counters[_KEY]
        batch = part_of(batches, model.distribute_strategy)
        spec = self._feed.spec if self._feed and not model.run_eagerly else None
        seen = batch if spec is None else spec
        # A batch of another form is for the train step, which says what is wrong.
        with contextlib.suppress(Exception), model.distribute_strategy.scope():
            trainer.build_from(model, seen)
            trainer.call_ahead(model, seen, resolution.resolve)
        for _, part, _ in structure.walk(model):
            # Networks that a train step of the user's calls, as its first step would.
            if isinstance(part, keras.Model) and part.built:
                resolution.resolve(part)
        if not all(optimizer.built for optimizer in optimizers_of(model)):
            # Only the train step knows their variables; what it does is undone below.
            around_training.on_batch(model)(batch)
        try:
            snapshots.put(model, state)
        except ValueError as error:
            why = str(error).removeprefix("`state` ").partition(". Expected ")[0]
            raise self._refusal(why) from error
        for before, now in zip(held["dtypes"], _dtypes_of(model), strict=False):
            if before != now:
                what = f"{' '.join(before)}, and now as {' '.join(now)}"
                why = f"was under another policy: a layer computed as {what}"
                raise self._refusal(why)
        if (history := getattr(model, "history", None)) is not None:
            history.epoch[:] = held["history"]["epoch"]
            history.history.clear()
            history.history.update(held["history"]["logs"])

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
        history, logs = getattr(self.model, "history", None), {}
        for name, values in history.history.items() if history is not None else ():
            with contextlib.suppress(TypeError, ValueError):
                logs[name] = [float(value) for value in values]
        held = {
            **{"epoch": self._epoch, "step": step, "total": self._total},
            **self._start,
            "data": _data_of(self.model, feed),
            "dtypes": _dtypes_of(self.model),
            "platform": _platform(),
            "random": take_random(),
            "history": {"epoch": list(history.epoch) if history else [], "logs": logs},
        }
        return snapshots.take(self.model).with_counters(**{_KEY: held})

    def _write(self, state: State) -> None:
        self._since = 0
        try:
            self._folder.write(state, state.counters[_KEY]["total"])
        except (OSError, tf.errors.OpError) as error:
            self._note(
                f"Resume: a state could not be written to {self.directory!r} "
                f"({error}). Training goes on, the files before it stay, and the next "
                "one is tried too. Free space there."
            )


def _dtypes_of(model: keras.Model) -> list[list[str]]:
    """Returns class, compute and variable dtype of a model's layers, in order."""
    return [
        [type(x).__name__, str(x.compute_dtype), str(x.variable_dtype)]
        for _, x, _ in structure.walk(model)
    ]


def _data_of(model: keras.Model, feed: Feed) -> dict[str, Any]:
    """Returns what has to be the same of the data where a training goes on."""
    names = ("num_batches", "batch_size", "steps_per_execution")
    found = {name: getattr(feed, name) for name in names}
    return {**found, "replicas": snapshots.num_local_replicas(model)}


def _platform() -> list[Any]:
    """Returns the global seed, and what computes: it may round otherwise elsewhere."""
    # With a seed for the operation, so that no random number is drawn for it.
    seed, _ = tf.compat.v1.get_seed(1)
    versions = f"TensorFlow {tf.__version__} and Keras {keras.__version__}"
    return [None if seed == _NO_SEED else int(seed), versions]


def _unrepeatable(feed: Feed) -> str | None:
    """Returns why another process cannot bring the data in the same order, if so."""
    is_seeded = _platform()[0] is not None
    if feed.kind == "other":
        return "the order of a generator or PyDataset is its own"
    if feed.kind == "arrays" and feed.shuffles and not is_seeded:
        return "`fit` shuffles arrays without a seed"
    if not is_seeded and any(not each.is_seeded for each in _counters(feed)):
        return "the dataset has an `augment` without a seed"
    for each in _stages(feed.dataset):
        seeds: list[Any] = [getattr(each, name, None) for name in ("_seed", "_seed2")]
        if all(map(tf.is_tensor, seeds)) and not any(int(seed) for seed in seeds):
            return "the dataset has a `shuffle` without a seed"
    return None


def _count_from(feed: Feed, passes: list[int]) -> None:
    """Has pipelines count on from whole passes, by which they augment."""
    for counter, number in zip(_counters(feed), passes, strict=False):
        counter.go_to(number)


def _counters(feed: Feed) -> list[EpochCounter]:
    stages = _stages(feed.dataset)
    found = (getattr(each, EpochCounter.ATTRIBUTE, None) for each in stages)
    return [each for each in found if isinstance(each, EpochCounter)]


def _stages(dataset: Any) -> Iterator[Any]:
    """Yields a dataset, and those that it is made of; nothing for None."""
    if dataset is not None:
        yield dataset
        for each in getattr(dataset, "_inputs", list)():
            yield from _stages(each)


def _place_of(model: keras.Model) -> tuple[int, int]:
    """Returns the number of this worker, and of all; (0, 1) where one trains alone."""
    if not has_workers(model):
        return 0, 1
    resolver: Any = model.distribute_strategy.cluster_resolver
    jobs = resolver.cluster_spec().as_dict()
    first = len(jobs.get("chief", [])) if resolver.task_type == "worker" else 0
    number = sum(len(jobs.get(job, [])) for job in ("chief", "worker"))
    return first + int(resolver.task_id), max(1, number)
