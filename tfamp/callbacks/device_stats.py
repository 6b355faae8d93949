"""`DeviceStats`: load, memory, temperature and power while a model trains."""

import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfamp.callbacks._fit_callback import EventWriter, FitCallback, check_path
from tfamp.machine.nvml import GpuReading, Nvml, visible_gpus
from tfamp.records import checks

# As long as a sample may take to end before the thread is left to itself.
_JOIN_SECONDS = 5.0
# Load over less time than this is a matter of luck.
_MIN_LOAD_SECONDS = 0.1
Reader = Callable[[], dict[str, float | None]]
# The end of the name of a figure that adds up.
_ENERGY = "_energy_joules"
# Of a reading of a GPU, what goes into rows, by the name it has there.
_GPU_FIGURES = {
    "utilisation": "utilisation",
    "memory_bytes": "memory_used_bytes",
    "temperature_celsius": "temperature_celsius",
    "power_watts": "power_watts",
    "energy_joules": "energy_joules",
}


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
            session = _Session(readers, Sampler(self, self.interval_seconds))
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
        """Takes a sample now, as the thread does; returns whether more are to come."""
        with self._lock:
            try:
                if self._session is not None:
                    self._session.take(self._num_batches, self._clock())
            except Exception as error:  # whatever it is, training goes on
                self._turn_off(error)
            return self._session is not None

    def _close(self, error: BaseException | None) -> None:
        if self._session is not None:
            self._session.sampler.stop()
        self._end_session()

    def _found(self) -> list[Reader]:
        """Returns readers of what is here, and notes what is not."""
        readers: list[Reader] = []
        try:
            readers.append(ProcessReader())
        except ImportError as error:
            self._note(str(error))
        if not visible_gpus():
            return readers
        try:
            gpus = GpuReader()
        except (ImportError, RuntimeError) as error:
            self._note(f"No figures of the GPU: {error}")
            return readers
        for line in gpus.notes:
            self._note(line)
        return [*readers, gpus]

    def _end_session(self) -> None:
        with self._lock:
            session, self._session = self._session, None
            if session is not None:
                session.close()

    def _turn_off(self, error: Exception) -> None:
        self._note(f"DeviceStats is off, since reading or writing failed: {error!r}.")
        self._end_session()


class _Session:
    """What is open while a model trains; a first reading gives the columns of a row."""

    def __init__(self, readers: Sequence[Reader], sampler: "Sampler") -> None:
        self._readers, self.sampler = readers, sampler
        first = self._read()
        self._energy = dict(first)
        self.fields = ("step", "time", *first)
        self.samples: list[dict[str, float | None]] = []
        self.events: EventWriter | None = None

    def take(self, num_batches: int, now: float) -> None:
        """Reads, keeps and writes a sample."""
        self.samples.append(self._read())
        row = (num_batches, now, *map(self.samples[-1].get, self.fields[2:]))
        if self.events is not None:
            self.events.write([row])

    def summary(self) -> dict[str, float]:
        """Returns the means and maxima of the epoch, and the energy it took."""
        found: dict[str, float] = {}
        for name in self.fields[2:]:
            read = [sample.get(name) for sample in self.samples]
            values = [value for value in read if value is not None]
            if values and not name.endswith(_ENERGY):
                found[f"{name}_mean"] = statistics.fmean(values)
                found[f"{name}_max"] = max(values)
            elif values:
                known = [v for v in (self._energy[name], *values) if v is not None]
                if len(known) > 1:
                    found[name] = known[-1] - known[0]
                self._energy[name] = known[-1]
        return found

    def close(self) -> None:
        """Closes what was opened; a second time does nothing."""
        for opened in (self.events, *self._readers):
            if close := getattr(opened, "close", None):
                close()

    def _read(self) -> dict[str, float | None]:
        return {name: v for reader in self._readers for name, v in reader().items()}


class Sampler(threading.Thread):
    """Calls `sample` of an object now and then, the first time at once.

    The thread is a daemon and holds the object by a weak reference: it ends with the
    object and with the program.
    """

    def __init__(self, owner: Any, interval_seconds: float) -> None:
        super().__init__(name="tfamp-device-stats", daemon=True)
        self.interval_seconds, self.ended = interval_seconds, threading.Event()
        self._owner = weakref.ref(owner)
        # At the end of the program too, before what is sampled goes away.
        weakref.finalize(owner, self.stop)

    def run(self) -> None:
        """Takes samples until there is no more to come."""
        while not self.ended.is_set():
            owner = self._owner()
            if owner is None or not owner.sample():
                return
            del owner  # or it would live as long as the thread
            if self.wait():
                return

    def wait(self) -> bool:
        """Waits until the next sample is due; returns whether it was stopped."""
        return self.ended.wait(self.interval_seconds)

    def stop(self) -> None:
        """Ends the thread and waits for its last sample; a second time does nothing."""
        self.ended.set()
        if self.is_alive() and self is not threading.current_thread():
            self.join(_JOIN_SECONDS)


class ProcessReader:
    """Reads CPU and memory of this process, by psutil.

    `cpu_percent` is of one core, since the reading before: 200 is two cores at work, by
    all threads of the process.
    """

    def __init__(self) -> None:
        psutil: Any = checks.require(
            "psutil", extra="report", purpose="CPU and memory of `DeviceStats`"
        )
        self._process = psutil.Process()
        self._percent: float | None = None
        self._last = time.monotonic(), self._cpu_seconds()

    def __call__(self) -> dict[str, float | None]:
        """Returns the figures now, by name."""
        now, cpu = time.monotonic(), self._cpu_seconds()
        then, before = self._last
        if now - then >= _MIN_LOAD_SECONDS:
            self._percent = 100 * (cpu - before) / (now - then)
            self._last = now, cpu
        return {
            "cpu_percent": self._percent,
            "process_bytes": float(self._process.memory_info().rss),
        }

    def _cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


class GpuReader:
    """Reads the GPUs that TensorFlow uses; energy counts from the first reading on.

    `names` has what is read, such as "gpu0_power_watts"; a figure that the driver does
    not give at the beginning is left out, with a line for its GPU in `notes`. Without
    the library there is an ImportError, without a driver that answers a RuntimeError.
    """

    def __init__(self) -> None:
        self._nvml = Nvml()
        self.close = self._nvml.close
        readings = self._nvml.read()
        first = _figures(readings)
        self.names = tuple(name for name, value in first.items() if value is not None)
        self.notes = tuple(line for reading in readings for line in _notes(reading))
        self._begun = {name: first[name] for name in self.names if _ENERGY in name}

    def __call__(self) -> dict[str, float | None]:
        """Returns the figures now, by name."""
        found = _figures(self._nvml.read())
        for name, begun in self._begun.items():
            value = found.get(name)
            found[name] = None if value is None or begun is None else value - begun
        return {name: found.get(name) for name in self.names}


def _figures(readings: Sequence[GpuReading]) -> dict[str, float | None]:
    """Returns the figures of all GPUs, by the names that they have in rows."""
    found: dict[str, float | None] = {}
    for reading in readings:
        for name, field in _GPU_FIGURES.items():
            value = getattr(reading, field)
            found[f"gpu{reading.index}_{name}"] = (
                None if value is None else float(value)
            )
    return found


def _notes(reading: GpuReading) -> Iterator[str]:
    """Yields what a GPU does not tell, or only of more than itself."""
    if reading.mig_slice is not None:
        yield (
            f"GPU:{reading.index} is the MIG slice {reading.mig_slice} of "
            f"{reading.name}: memory is its own; temperature, power and energy, where "
            "told, are those of the whole GPU."
        )
    missing = [
        k for k, field in _GPU_FIGURES.items() if getattr(reading, field) is None
    ]
    if missing:
        yield (
            f"GPU:{reading.index} does not tell {', '.join(missing)}: its driver "
            "refuses that here, as under MIG and in some containers."
        )
