"""`DeviceStats`: load, memory, temperature and power while a model trains."""

import statistics
import threading
from typing import Any

from tfamp.callbacks._fit_callback import FitCallback, Logs, Quiet
from tfamp.machine.memory import Nvml, visible_gpus
from tfamp.records import checks

_SECONDS = 1.0  # between two samples
# The end of the name of a figure that adds up.
_ENERGY = "_energy_joules"
# Of a reading of a GPU, what is shown.
_FIGURES = (
    *("utilisation", "memory_used_bytes", "temperature_celsius"),
    *("power_watts", "energy_joules"),
)


class DeviceStats(FitCallback):
    """Shows what the machine does while a model trains.

    A thread reads every second `cpu_percent` (of one core: 200 is two at work),
    `process_bytes`, and of each NVIDIA GPU that TensorFlow uses `gpu0_utilisation` (the
    part of the last moments in which a kernel ran, in [0, 1]), `gpu0_memory_bytes`,
    `gpu0_temperature_celsius`, `gpu0_power_watts` and `gpu0_energy_joules`. On a MIG
    slice memory is the slice's and the others are those of the whole GPU. `History`
    gets the mean and the most of an epoch, as `cpu_percent_mean` and `cpu_percent_max`,
    and the energy that it took. `notes` has a line for what cannot be read.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> data = np.ones((4, 1))
        >>> run = model.fit(data, data, verbose=0, callbacks=[DeviceStats()])
        >>> run.history["process_bytes_max"][0] > 2**20
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: Any = None
        self._samples: list[dict[str, float]] = []
        self._process: Any = None
        self._nvml: Nvml | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Opens what is read, and begins to take samples."""
        self._join()
        try:
            if visible_gpus():
                self._nvml = Nvml()
        except (ImportError, RuntimeError) as error:
            self._note(str(error))
        try:
            purpose = "CPU and memory of `DeviceStats`"
            psutil: Any = checks.require("psutil", extra="report", purpose=purpose)
            self._process = psutil.Process()
            self._process.cpu_percent()  # the first call has nothing to compare with
        except ImportError as error:
            self._note(str(error))
        self._samples, self._ended = [], threading.Event()
        name = "tfamp-device-stats"
        self._thread = threading.Thread(
            target=self._run, args=(self._ended,), daemon=True, name=name
        )
        self._thread.start()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begins to sum an epoch up, in which energy counts from the sample before."""
        with self._lock:
            self._sample()
            self._samples = self._samples[-1:]

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Takes a last sample of the epoch and puts its summary into the logs."""
        with self._lock:
            self._sample()
            if self._ended.is_set() or logs is None:
                return
            before, *samples = self._samples
            for name in self._samples[-1]:
                values = [sample[name] for sample in samples if name in sample]
                if values and name.endswith(_ENERGY):
                    logs[Quiet(name)] = values[-1] - before.get(name, values[0])
                elif values:
                    logs[Quiet(f"{name}_mean")] = statistics.fmean(values)
                    logs[Quiet(f"{name}_max")] = max(values)

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(_SECONDS):
            self._sample()

    def _sample(self) -> None:
        """Takes a sample, or ends them all where it cannot."""
        with self._lock:
            try:
                if not self._ended.is_set():
                    self._samples.append(self._read())
            except Exception as error:  # whatever it is, training goes on
                self._note(f"DeviceStats is off, since reading failed: {error!r}.")
                self._close(error)

    def _read(self) -> dict[str, float]:
        """Returns the figures now, by name, without those that are not told."""
        found = {}
        if self._process is not None:
            found["cpu_percent"] = float(self._process.cpu_percent())
            found["process_bytes"] = float(self._process.memory_info().rss)
        for gpu in self._nvml.read() if self._nvml is not None else ():
            told = {x.replace("_used", ""): getattr(gpu, x) for x in _FIGURES}
            missing = [name for name, value in told.items() if value is None]
            for name in told.keys() - missing:
                found[f"gpu{gpu.index}_{name}"] = float(told[name])
            if missing or gpu.mig_slice is not None:
                self._note(
                    f"GPU:{gpu.index} ({gpu.name}, {gpu.mig_slice or 'no MIG slice'}): "
                    "on a slice memory is its own and the rest the whole GPU's; not "
                    f"told by the driver: {', '.join(missing) or 'nothing'}."
                )
        return found

    def _close(self, error: BaseException | None) -> None:
        with self._lock:
            self._ended.set()
            if self._nvml is not None:
                self._nvml.close()
            self._nvml = self._process = None
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(_SECONDS)  # it may wait for a caller's lock
