"""`DeviceStats`: load, memory, temperature and power while a model trains."""

import os
import statistics
import threading
import time
from typing import Any

from tfamp.callbacks._fit_callback import EventWriter, FitCallback, check_path
from tfamp.machine.nvml import Nvml, visible_gpus
from tfamp.records import checks

# As long as a sample may take to end before the thread is left to itself.
_JOIN_SECONDS = 5.0
Figures = dict[str, float]
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
      `gpu0_temperature_celsius`, `gpu0_power_watts` and `gpu0_energy_joules`. On a MIG
      slice memory is the slice's and the others are those of the whole GPU.

    `History` gets the mean and the most of an epoch, as `cpu_percent_mean` and
    `cpu_percent_max`, and the energy that it took, as `gpu0_energy_joules`. There is
    one more sample at the end of each epoch. It never ends training: what cannot be
    read is said in one line. The thread ends with `fit`, however that ends.

    Args:
        log_dir: Folder for TensorBoard scalars of every sample, made if need be.
        csv_path: File for a row for every sample, appended to, with the number of the
            batch of this `fit` and the time in seconds since 1970.
        interval_seconds: Between two samples.

    Attributes:
        notes: What cannot be read and why, a line each.

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
    ) -> None:
        super().__init__()
        self.log_dir = check_path("log_dir", log_dir)
        self.csv_path = check_path("csv_path", csv_path)
        self.interval_seconds = checks.positive("interval_seconds", interval_seconds)
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._events: EventWriter | None = None
        self._process: Any = None
        self._nvml: Nvml | None = None
        self._names: tuple[str, ...] = ()
        self._first: Figures = {}
        self._samples: list[Figures] = []
        self._num_batches = self._batches_before = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens what is read and written, and begins to take samples."""
        self._leave()
        self._num_batches = self._batches_before = 0
        try:
            purpose = "CPU and memory of `DeviceStats`"
            psutil: Any = checks.require("psutil", extra="report", purpose=purpose)
            self._process = psutil.Process()
            self._process.cpu_percent()  # the first call has nothing to compare with
        except ImportError as error:
            self._note(str(error))
        try:
            self._nvml = Nvml() if visible_gpus() else None
        except (ImportError, RuntimeError) as error:
            self._note(str(error))
        try:
            self._first = self._read()
        except Exception as error:  # whatever it is, training begins
            self._turn_off(error)
            return
        for reading in self._nvml.read() if self._nvml is not None else ():
            missing = [
                n for n, f in _GPU_FIGURES.items() if getattr(reading, f) is None
            ]
            if reading.mig_slice is not None:
                self._note(
                    f"GPU:{reading.index} is the MIG slice {reading.mig_slice} of "
                    f"{reading.name}: memory is its own, the rest the whole GPU's."
                )
            if missing:
                self._note(
                    f"GPU:{reading.index} does not tell {', '.join(missing)}: its "
                    "driver refuses that here, as under MIG and in some containers."
                )
        self._names = tuple(self._first)
        try:
            self._events = EventWriter(
                self.model,
                ("step", "time", *self._names),
                csv_path=self.csv_path,
                log_dir=self.log_dir,
            )
        except ValueError:
            self._close_all()
            raise
        self._join()
        ended = self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ended,), daemon=True)
        self._thread.name = "tfamp-device-stats"
        self._thread.start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to sum an epoch up."""
        with self._lock:
            # Energy counts from the last sample of the epoch before.
            self._before = self._samples[-1] if self._samples else self._first
            self._batches_before, self._samples = self._num_batches, []

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts batches, for the rows."""
        self._num_batches = self._batches_before + batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes a last sample of the epoch and puts its summary into the logs."""
        if not self._sample() or logs is None:
            return
        with self._lock:
            for name in self._names:
                values = [sample[name] for sample in self._samples if name in sample]
                if values and name.endswith(_ENERGY):
                    logs[name] = values[-1] - self._before.get(name, values[0])
                elif values:
                    logs[f"{name}_mean"] = statistics.fmean(values)
                    logs[f"{name}_max"] = max(values)

    def _run(self, ended: threading.Event) -> None:
        while not ended.is_set() and self._sample():
            ended.wait(self.interval_seconds)

    def _sample(self) -> bool:
        """Takes a sample; returns whether more are to come."""
        with self._lock:
            try:
                if self._events is not None:
                    found = self._read()
                    self._samples.append(found)
                    row = (self._num_batches, time.time())
                    self._events.write([(*row, *map(found.get, self._names))])
            except Exception as error:  # whatever it is, training goes on
                self._turn_off(error)
            return self._events is not None

    def _read(self) -> Figures:
        """Returns the figures now, by name; what is not told is left out."""
        found: Figures = {}
        if self._process is not None:
            found["cpu_percent"] = float(self._process.cpu_percent())
            found["process_bytes"] = float(self._process.memory_info().rss)
        for reading in self._nvml.read() if self._nvml is not None else ():
            for name, field in _GPU_FIGURES.items():
                if (value := getattr(reading, field)) is not None:
                    found[f"gpu{reading.index}_{name}"] = float(value)
        return found

    def _close(self, error: BaseException | None) -> None:
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)
        self._close_all()

    def _close_all(self) -> None:
        with self._lock:
            for opened in (self._events, self._nvml):
                if opened is not None:
                    opened.close()
            self._events = self._nvml = self._process = None

    def _turn_off(self, error: Exception) -> None:
        self._note(f"DeviceStats is off, since reading or writing failed: {error!r}.")
        self._close_all()
