"""`DeviceStats`: samples in logs and files, the thread's life, what cannot be read."""

import csv
import sys
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.callbacks_monitor_test import events
from tests.refusals import refused_arguments
from tfamp.callbacks import DeviceStats

NUM_BATCHES = 3
FIGURES = ("load", "gpu0_energy_joules")


class Reader:
    """Gives 10, 20, 30, … as a load, and a joule more for each ten."""

    def __init__(self):
        self.value = 0.0
        self.is_closed = False
        self.has_begun = threading.Event()

    def __call__(self):
        self.value += 10
        if self.value >= 20:
            self.has_begun.set()
        return dict(zip(FIGURES, (self.value, 100 + self.value / 10), strict=True))

    def close(self):
        self.is_closed = True


class Begun(keras.callbacks.Callback):
    """Waits until the thread of a reader has taken its first sample."""

    def __init__(self, reader):
        super().__init__()
        self.reader = reader

    def on_train_begin(self, logs=None):
        assert self.reader.has_begun.wait(60)


def compiled(**settings):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **(settings or {"run_eagerly": True}))
    return model


def fit(model, *callbacks, epochs=2, **settings):
    x, y = np.ones((2 * NUM_BATCHES, 2), "f4"), np.ones((2 * NUM_BATCHES, 1), "f4")
    settings = {"batch_size": 2, "verbose": 0} | settings
    return model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **settings).history


def stats(reader, **settings):
    """A callback with a fake reader and a clock; its thread takes one sample."""
    ticks = iter(range(1000, 2000))
    settings = {"clock": lambda: next(ticks), "interval_seconds": 1e6} | settings
    return DeviceStats(readers=(reader,), **settings)


def rows(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


# The columns are found by a first reading. Then one sample when training begins,
# before its first epoch, and one at the end of each: 20, 30, 40.
def test_mean_and_most_of_each_epoch_are_in_the_history():
    reader = Reader()
    history = fit(compiled(), stats(reader), Begun(reader))
    assert history["load_mean"] == [30.0, 40.0]
    assert history["load_max"] == [30.0, 40.0]
    assert reader.is_closed


def test_an_epoch_is_summed_up_over_all_of_its_samples():
    reader = Reader()
    watch = stats(reader)

    class More(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            watch.sample()

    history = fit(compiled(), More(), watch, Begun(reader))
    # 30, 40, 50 and at the end 60; then 70, 80, 90, 100.
    assert history["load_mean"] == [45.0, 85.0]
    assert history["load_max"] == [60.0, 100.0]
    # From 101 when training began to 106, then to 110.
    assert history["gpu0_energy_joules"] == [5.0, 4.0]


def test_rows_and_scalars_hold_every_sample(tmp_path):
    reader = Reader()
    watch = stats(reader, csv_path=tmp_path / "stats.csv", log_dir=tmp_path / "events")
    fit(compiled(), watch, Begun(reader))
    assert rows(tmp_path / "stats.csv") == [
        ["step", "time", *FIGURES],
        ["0", "1000", "20.0", "102.0"],
        ["3", "1001", "30.0", "103.0"],
        ["6", "1002", "40.0", "104.0"],
    ]
    assert events(tmp_path / "events")[0][6, "load"] == 40.0


def test_a_real_fit_reads_this_process_and_leaves_no_thread(tmp_path):
    watch = DeviceStats(csv_path=tmp_path / "stats.csv")
    history = fit(compiled(), watch)
    assert all(value > 2**20 for value in history["process_bytes_max"])
    header, *lines = rows(tmp_path / "stats.csv")
    assert header[:4] == ["step", "time", "cpu_percent", "process_bytes"]
    assert len(lines) >= 2
    assert "tfamp-device-stats" not in {t.name for t in threading.enumerate()}


class Failing(Reader):
    """Fails at its third reading."""

    def __call__(self):
        if self.value == 20:
            raise OSError("the driver went away")
        return super().__call__()


def test_a_reading_that_fails_ends_the_readings_and_not_the_training():
    reader = Failing()
    watch = stats(reader)
    history = fit(compiled(), watch, Begun(reader))
    text = (
        "DeviceStats is off, since reading or writing failed: "
        "OSError('the driver went away')."
    )
    assert watch.notes == (text,)
    assert len(history["loss"]) == 2
    assert "load_mean" not in history
    assert reader.is_closed


def test_a_file_that_goes_away_ends_the_readings_and_not_the_training(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    reader = Reader()
    watch = stats(reader, csv_path=folder / "stats.csv")

    class Remove(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                (folder / "stats.csv").unlink()
                folder.rmdir()

    history = fit(compiled(), watch, Begun(reader), Remove(), epochs=3)
    assert len(history["loss"]) == 3
    assert len(watch.notes) == 1 and "FileNotFoundError" in watch.notes[0]


class Bad(Exception):
    """What a callback raises."""


class Raising(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise Bad


def test_an_error_in_fit_ends_the_readings():
    reader = Reader()
    watch = stats(reader)
    with pytest.raises(Bad):
        fit(compiled(), watch, Raising())
    value = reader.value
    assert not watch.sample()
    assert (reader.value, reader.is_closed) == (value, True)
    assert watch.notes == ()
    # And the next training is read again.
    assert len(fit(compiled(), watch)["load_max"]) == 2


def driver(**figures):
    """Stands for the module `pynvml`, with one GPU; what is not given is refused."""

    class NVMLError(Exception):
        pass

    def told(name):
        def query(*arguments):
            if name not in figures:
                raise NVMLError("Not Supported")
            value = figures[name]
            return value.pop(0) if isinstance(value, list) else value

        return query

    fake = types.ModuleType("pynvml")
    names = (
        *("Name", "MemoryInfo", "UtilizationRates", "Temperature", "PowerUsage"),
        *("TotalEnergyConsumption", "HandleByIndex"),
    )
    for name in names:
        setattr(fake, f"nvmlDeviceGet{name}", told(name))
    fake.NVMLError, fake.closed = NVMLError, []
    fake.nvmlInit, fake.nvmlShutdown = lambda: None, lambda: fake.closed.append(1)
    return fake


@pytest.fixture
def one_gpu(monkeypatch):
    """TensorFlow has a GPU, as far as its configuration is asked."""
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    visible = tf.config.get_visible_devices
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        tf.config,
        "get_visible_devices",
        lambda kind=None: [gpu] if kind == "GPU" else visible(kind),
    )


MEMORY = types.SimpleNamespace(used=2**30, total=2**33)


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_is_read_and_its_energy_counts_from_the_beginning(monkeypatch, tmp_path):
    fake = driver(
        HandleByIndex=0,
        Name="A100",
        MemoryInfo=MEMORY,
        UtilizationRates=types.SimpleNamespace(gpu=50),
        Temperature=60,
        PowerUsage=200_000,
        TotalEnergyConsumption=[1_000_000 + 10_000 * i for i in range(20)],
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    watch = DeviceStats(csv_path=tmp_path / "stats.csv", interval_seconds=1e6)
    history = fit(compiled(), watch)
    assert history["gpu0_utilisation_mean"] == [0.5, 0.5]
    assert history["gpu0_memory_bytes_max"] == [2**30, 2**30]
    assert history["gpu0_power_watts_max"] == [200.0, 200.0]
    assert history["gpu0_temperature_celsius_max"] == [60.0, 60.0]
    # Ten joules from each sample to the next.
    assert history["gpu0_energy_joules"][1] == 10.0
    assert watch.notes == () and fake.closed == [1]


@pytest.mark.usefixtures("one_gpu")
def test_what_a_slice_does_not_tell_is_left_out_and_said(monkeypatch):
    fake = driver(HandleByIndex=0, Name="A100 MIG 1g.5gb", MemoryInfo=MEMORY)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    watch = DeviceStats()
    history = fit(compiled(), watch)
    told = {name for name in history if name.startswith("gpu0")}
    assert told == {"gpu0_memory_bytes_mean", "gpu0_memory_bytes_max"}
    assert "GPU:0 is the MIG slice 1g.5gb" in watch.notes[0]
    assert "GPU:0 does not tell utilisation, temperature_celsius" in watch.notes[1]


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_without_the_library_is_said_with_the_line_to_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    watch = DeviceStats()
    fit(compiled(), watch)
    (line,) = watch.notes
    assert line.startswith("Figures of the GPU needs nvidia-ml-py") and "[gpu]" in line


def test_without_psutil_there_is_a_line_and_no_figure(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    watch = DeviceStats()
    history = fit(compiled(), watch)
    assert set(history) == {"loss"}
    assert watch.notes == (
        "CPU and memory of `DeviceStats` needs psutil, which is not installed. Run "
        "`pip install 'tfamp[report]'`.",
    )


test_wrong_arguments_are_named = refused_arguments(
    DeviceStats,
    ("interval_seconds", 0.0, "; expected a finite number above 0."),
    ("log_dir", 1, ", of type int; expected a path.", TypeError),
)


@pytest.mark.slow
def test_a_file_that_cannot_be_written_ends_training_before_it_begins(tmp_path):
    reader = Reader()
    watch = stats(reader, csv_path=tmp_path / "no" / "stats.csv")
    model = compiled()
    with pytest.raises(ValueError, match="there is no folder"):
        fit(model, watch)
    assert int(model.optimizer.iterations) == 0
    assert reader.is_closed
