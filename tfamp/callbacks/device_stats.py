"""`DeviceStats`: load, memory, temperature and power while a model trains."""

import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from tfamp.callbacks._fit_callback import EventWriter, FitCallback, check_path
from tfamp.machine.nvml import Nvml, visible_gpus
from tfamp.records import checks

# As long as a sample may take to end before the thread is left to itself.
_JOIN_SECONDS = 5.0
# Load over less time than this is a matter of luck.
_MIN_LOAD_SECONDS = 0.1
Figures = dict[str, float | None]
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
    There is one more sample at the end of each epoch.

    It never ends training: what cannot be read is said in one line, and if reading or
    writing fails later, one warning is given and the callback is off. The thread ends
    with `fit`, however that ends. A sample takes a tenth of a millisecond, and some
    milliseconds with GPUs, beside the training.

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
        readers: tuple[Callable[[], Figures], ...] | None = None,
    ) -> None:
        super().__init__()
        self.log_dir = check_path("log_dir", log_dir)
        self.csv_path = check_path("csv_path", csv_path)
        self.interval_seconds = checks.positive("interval_seconds", interval_seconds)
        self._clock, self._given = clock, readers
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._readers: tuple[Callable[[], Figures], ...] = ()
        self._events: EventWriter | None = None
        self._samples: list[Figures] = []
        self._num_batches = self._batches_before = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens what is read and written, and begins to take samples."""
        self._leave()
        self._num_batches = self._batches_before = 0
        try:
            self._readers = self._found() if self._given is None else self._given
            self._begun = self._read()
        except Exception as error:  # whatever it is, training begins
            self._turn_off(error)
            return
        self._names, self._energy = tuple(self._begun), dict(self._begun)
        self._events = EventWriter(
            self.model,
            ("step", "time", *self._names),
            csv_path=self.csv_path,
            log_dir=self.log_dir,
        )
        self._join()
        ended = self._ended = threading.Event()
        name = "tfamp-device-stats"
        self._thread = threading.Thread(
            target=self._run, args=(ended,), name=name, daemon=True
        )
        self._thread.start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to sum an epoch up."""
        with self._lock:
            self._batches_before, self._samples = self._num_batches, []

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts batches, for the rows."""
        self._num_batches = self._batches_before + batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes a last sample of the epoch and puts its summary into the logs."""
        if self.sample() and logs is not None:
            with self._lock:
                logs.update(self._summary())

    def sample(self) -> bool:
        """Takes a sample now, as the thread does; returns whether more are to come."""
        with self._lock:
            try:
                if self._events is not None:
                    found = self._read()
                    self._samples.append(found)
                    row = (self._num_batches, self._clock())
                    self._events.write([(*row, *map(found.get, self._names))])
            except Exception as error:  # whatever it is, training goes on
                self._turn_off(error)
            return self._events is not None

    def _run(self, ended: threading.Event) -> None:
        while not ended.is_set() and self.sample():
            ended.wait(self.interval_seconds)

    def _close(self, error: BaseException | None) -> None:
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)
        self._close_all()

    def _close_all(self) -> None:
        with self._lock:
            for opened in (self._events, *self._readers):
                if close := getattr(opened, "close", None):
                    close()
            self._events, self._readers = None, ()

    def _turn_off(self, error: Exception) -> None:
        self._note(f"DeviceStats is off, since reading or writing failed: {error!r}.")
        self._close_all()

    def _read(self) -> Figures:
        return {name: v for reader in self._readers for name, v in reader().items()}

    def _summary(self) -> dict[str, float]:
        """Returns the means and maxima of the epoch, and the energy it took."""
        found: dict[str, float] = {}
        for name in self._names:
            read = [sample.get(name) for sample in self._samples]
            values = [value for value in read if value is not None]
            if values and not name.endswith(_ENERGY):
                found[f"{name}_mean"] = statistics.fmean(values)
                found[f"{name}_max"] = max(values)
            elif values:
                before = self._energy[name]
                if before is not None or len(values) > 1:
                    found[name] = values[-1] - (values[0] if before is None else before)
                self._energy[name] = values[-1]
        return found

    def _found(self) -> tuple[Callable[[], Figures], ...]:
        """Returns readers of what is here, and notes what is not."""
        readers: list[Callable[[], Figures]] = []
        makers: list[Callable[..., Callable[[], Figures]]] = [_process_reader]
        makers += [_GpuReader] if visible_gpus() else []
        for make in makers:
            try:
                readers.append(make(self._note))
            except (ImportError, RuntimeError) as error:
                self._note(str(error))
        return tuple(readers)


def _process_reader(note: Callable[[str], None]) -> Callable[[], Figures]:
    """Returns a reader of CPU and memory of this process, by psutil."""
    psutil: Any = checks.require(
        "psutil", extra="report", purpose="CPU and memory of `DeviceStats`"
    )
    process = psutil.Process()
    process.cpu_percent()  # the first call has nothing to compare with
    last, percent = time.monotonic(), None

    def read() -> Figures:
        nonlocal last, percent
        now = time.monotonic()
        if now - last >= _MIN_LOAD_SECONDS:
            last, percent = now, float(process.cpu_percent())
        rss = float(process.memory_info().rss)
        return {"cpu_percent": percent, "process_bytes": rss}

    return read


class _GpuReader:
    """Reads the GPUs that TensorFlow uses; energy counts from the first reading on.

    A figure that the driver does not give at the beginning is left out, and said.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._nvml = Nvml()
        self.close = self._nvml.close
        figures = self._figures()
        self._begun = {n: v for n, v in figures.items() if v is not None}
        for reading in self._nvml.read():
            where = f"GPU:{reading.index}"
            if reading.mig_slice is not None:
                note(
                    f"{where} is the MIG slice {reading.mig_slice} of {reading.name}: "
                    "memory is its own; temperature, power and energy, where told, are "
                    "those of the whole GPU."
                )
            start = f"gpu{reading.index}_"
            if missing := [
                n.removeprefix(start)
                for n in figures
                if n.startswith(start) and n not in self._begun
            ]:
                note(
                    f"{where} does not tell {', '.join(missing)}: its driver refuses "
                    "that here, as under MIG and in some containers."
                )

    def __call__(self) -> Figures:
        """Returns the figures now, by name."""
        found = {name: v for name, v in self._figures().items() if name in self._begun}
        for name, value in found.items():
            if name.endswith(_ENERGY) and value is not None:
                found[name] = value - self._begun[name]
        return found

    def _figures(self) -> Figures:
        return {
            f"gpu{reading.index}_{name}": None if value is None else float(value)
            for reading in self._nvml.read()
            for name, field in _GPU_FIGURES.items()
            for value in [getattr(reading, field)]
        }
