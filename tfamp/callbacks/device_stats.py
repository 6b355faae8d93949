"""`DeviceStats`: load, memory, temperature and power while a model trains."""

import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tfamp.callbacks._device_readers import ProcessReader, Reader, open_gpu_reader
from tfamp.callbacks._fit_callback import EventWriter, FitCallback, check_path
from tfamp.records import checks

# As long as a sample may take to end before the thread is left to itself.
_JOIN_SECONDS = 5.0


class Sampler:
    """Calls `sample` of an object now and then, beside everything else.

    The thread is a daemon and holds the object by a weak reference: it ends with the
    object and with the program. `wait` waits so many seconds or until stopped, and
    states whether it was stopped.
    """

    def __init__(
        self,
        owner: Any,
        interval_seconds: float,
        *,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(owner), self._stopped, interval_seconds, wait),
            name="tfamp-device-stats",
            daemon=True,
        )
        # At the end of the program too, before what is sampled goes away.
        weakref.finalize(owner, self.stop)

    def start(self) -> None:
        """Begins to take samples, the first one at once."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for its last sample; a second time does nothing."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    @property
    def is_running(self) -> bool:
        """Whether the thread takes samples."""
        return self._thread.is_alive()


def _run(
    owner: "weakref.ref[Any]",
    stopped: threading.Event,
    interval_seconds: float,
    wait: Callable[[threading.Event, float], bool],
) -> None:
    while not stopped.is_set():
        held = owner()
        if held is None or not held.sample():
            return
        del held  # or it would live as long as the thread
        if wait(stopped, interval_seconds):
            return


_ENERGY = "_energy_joules"


class DeviceStats(FitCallback):
    """Shows what the machine does while a model trains.

    A thread reads, every `interval_seconds`,

    - `cpu_percent` (of one core: 200 is two at work) and `process_bytes`, everywhere;
    - of each NVIDIA GPU that TensorFlow uses `gpu0_utilisation` (the part of the last
      moments in which a kernel ran, in [0, 1]), `gpu0_memory_bytes` (in use by all;
      TensorFlow reserves most of it at once unless memory growth is on),
      `gpu0_temperature_celsius`, `gpu0_power_watts` and `gpu0_energy_joules`, since
      training began. On a MIG slice memory is the slice's and the others are those of
      the whole GPU, where the driver tells them.

    `History` gets the mean and the most of an epoch, as `cpu_percent_mean` and
    `cpu_percent_max`, and of the energy what the epoch took, as `gpu0_energy_joules`.
    There is one more sample at the end of each epoch. `cpu_percent` is absent where an
    epoch is over within a tenth of a second.

    It never ends training: what cannot be read is said in one line, and if reading or
    writing fails later, one warning is given and the callback is off. The thread ends
    with `fit`, however that ends.

    Cost: a step only counts itself. A sample takes a tenth of a millisecond, and some
    milliseconds with GPUs, beside the training, once a second.

    Args:
        log_dir: Folder for TensorBoard scalars of every sample, made if need be.
        csv_path: File for a row for every sample, appended to, with the number of the
            batch of this `fit` and the time in seconds since 1970.
        interval_seconds: Between two samples.
        clock: Gives seconds since 1970.
        readers: Functions that return figures by name, in place of those above.

    Attributes:
        notes: What cannot be read and why, a line each.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `interval_seconds` is not above 0; or, when training begins, a file
            cannot be written.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> data = np.ones((4, 1))
        >>> run = model.fit(data, data, verbose=0, callbacks=[DeviceStats()])
        >>> run.history["process_bytes_max"][0] > 2**20
        True
    """

    def __init__(
        self,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        csv_path: str | os.PathLike[str] | None = None,
        interval_seconds: float = 1.0,
        clock: Callable[[], float] = time.time,
        readers: tuple[Reader, ...] | None = None,
    ) -> None:
        super().__init__()
        self.log_dir = check_path("log_dir", log_dir)
        self.csv_path = check_path("csv_path", csv_path)
        self.interval_seconds = checks.positive("interval_seconds", interval_seconds)
        self._clock, self._given = clock, readers
        self._lock = threading.RLock()
        self._session: _Session | None = None
        self._num_batches = self._batches_before = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens what is read and written, and begins to take samples."""
        self._leave()
        self._num_batches = self._batches_before = 0
        readers = list(self._given if self._given is not None else self._found())
        try:
            session = _Session(readers)
        except Exception as error:  # whatever it is, training begins
            self._turn_off(error)
            return
        try:
            session.events = EventWriter(
                self.model, session.fields, csv_path=self.csv_path, log_dir=self.log_dir
            )
        except BaseException:
            session.close()
            raise
        session.sampler = Sampler(self, self.interval_seconds)
        self._session = session
        self._join()
        session.sampler.start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to sum an epoch up."""
        with self._lock:
            self._batches_before = self._num_batches
            if self._session is not None:
                self._session.samples = []

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts batches, for the rows."""
        self._num_batches = self._batches_before + batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes a last sample of the epoch and puts its summary into the logs."""
        self.sample()
        with self._lock:
            if self._session is not None and logs is not None:
                logs.update(self._session.summary())

    def sample(self) -> bool:
        """Takes a sample now; the thread does.

        Returns:
            Whether there is more to come.
        """
        with self._lock:
            session = self._session
            if session is None:
                return False
            try:
                session.take(self._num_batches, self._clock())
                return True
            except Exception as error:  # whatever it is, training goes on
                self._turn_off(error)
            self._session = None
            session.close()
            return False

    def _close(self, error: BaseException | None) -> None:
        session = self._session
        if session is None:
            return
        if session.sampler is not None:
            session.sampler.stop()
        with self._lock:
            self._session = None
            session.close()

    def _found(self) -> list[Reader]:
        """Returns readers of what is here, and notes what is not."""
        readers: list[Reader] = []
        try:
            readers.append(ProcessReader())
        except ImportError as error:
            self._note(str(error))
        gpus, why = open_gpu_reader()
        if gpus is not None:
            readers.append(gpus)
        for line in (why, *(gpus.notes if gpus is not None else ())):
            if line:
                self._note(line)
        return readers

    def _turn_off(self, error: Exception) -> None:
        self._note(f"DeviceStats is off, since reading or writing failed: {error!r}.")


class _Session:
    """What is open while a model trains: the thread, the readers and the files.

    What the readers return first gives the columns of a row, `fields`.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers
        first = self._read()
        self._energy = dict(first)
        self.fields = ("step", "time", *first)
        self.samples: list[dict[str, float | None]] = []
        self.events: EventWriter | None = None
        self.sampler: Sampler | None = None

    def take(self, num_batches: int, now: float) -> None:
        """Reads, keeps and writes a sample."""
        values = self._read()
        self.samples.append(values)
        row = (num_batches, now, *(values.get(name) for name in self.fields[2:]))
        if self.events is not None:
            self.events.write([row])

    def summary(self) -> dict[str, float]:
        """Returns the means and maxima of the epoch, and the energy it took."""
        found: dict[str, float] = {}
        for name in self.fields[2:]:
            read = [sample.get(name) for sample in self.samples]
            values = [value for value in read if value is not None]
            if not values:
                continue
            if name.endswith(_ENERGY):
                before = self._energy[name]
                if before is None:
                    before = values.pop(0)
                if values:
                    found[name] = values[-1] - before
                self._energy[name] = values[-1] if values else before
            else:
                found[f"{name}_mean"] = statistics.fmean(values)
                found[f"{name}_max"] = max(values)
        return found

    def close(self) -> None:
        """Closes what was opened; a second time does nothing."""
        for opened in (self.events, *self._readers):
            close = getattr(opened, "close", None)
            if close is not None:
                close()

    def _read(self) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for reader in self._readers:
            found.update(reader())
        return found
