"""`DeviceStats`: samples in logs and files, the thread's life, what cannot be read."""

import csv
import gc
import sys
import threading
import types
import weakref

import keras
import numpy as np
import psutil
import pytest

import tfamp
from tests.callbacks_monitor_test import events
from tests.refusals import refused_arguments
from tests.replicas import two_replicas
from tfamp.callbacks import DeviceStats, PrecisionMonitor, Throughput, device_stats
from tfamp.callbacks.device_stats import Sampler
from tfamp.machine.nvml import GpuReading

NUM_BATCHES = 3
FIGURES = ("load", "gpu0_energy_joules")


class Reader:
    """Gives 10, 20, 30, … as a load, and a joule more for each ten."""

    def __init__(self):
        self.value = 0.0
        self.is_closed = False

    def __call__(self):
        self.value += 10
        return dict(zip(FIGURES, (self.value, 100 + self.value / 10), strict=True))

    def close(self):
        self.is_closed = True


class SampleOnce:
    """In place of the thread: takes one sample when started."""

    def __init__(self, owner, interval_seconds):
        self.owner, self.interval_seconds = weakref.ref(owner), interval_seconds
        self.is_running = False

    def start(self):
        self.is_running = True
        self.owner().sample()

    def stop(self):
        self.is_running = False


@pytest.fixture
def no_thread(monkeypatch):
    monkeypatch.setattr(device_stats, "Sampler", SampleOnce)


def compiled(**settings):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **(settings or {"run_eagerly": True}))
    return model


def fit(model, *callbacks, epochs=2, **settings):
    x, y = np.ones((2 * NUM_BATCHES, 2), "f4"), np.ones((2 * NUM_BATCHES, 1), "f4")
    settings = {"batch_size": 2, "verbose": 0} | settings
    return model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **settings).history


def stats(*given, **settings):
    """A callback with fake readers, and a clock that counts seconds."""
    ticks = iter(range(1000, 2000))
    settings = {"clock": lambda: next(ticks)} | settings
    return DeviceStats(readers=given or (Reader(),), **settings)


def rows(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


# The columns are found by a first reading. Then one sample when training begins,
# before its first epoch, and one at the end of each: 20, 30, 40.
@pytest.mark.usefixtures("no_thread")
def test_mean_and_most_of_each_epoch_are_in_the_history():
    reader = Reader()
    history = fit(compiled(), stats(reader))
    assert history["load_mean"] == [30.0, 40.0]
    assert history["load_max"] == [30.0, 40.0]
    assert reader.is_closed


@pytest.mark.usefixtures("no_thread")
def test_an_epoch_is_summed_up_over_all_of_its_samples():
    watch = stats()

    class More(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            watch.sample()

    history = fit(compiled(), More(), watch)
    # 30, 40, 50 and at the end 60; then 70, 80, 90, 100.
    assert history["load_mean"] == [45.0, 85.0]
    assert history["load_max"] == [60.0, 100.0]
    # From 101 when training began to 106, then to 110.
    assert history["gpu0_energy_joules"] == [5.0, 4.0]


@pytest.mark.usefixtures("no_thread")
def test_energy_that_is_not_told_at_first_counts_from_where_it_is():
    # The columns, the beginning, and the ends of four epochs.
    told = iter([None, None, None, 5000.0, 5003.0, 5010.0])
    watch = stats(lambda: {"gpu0_energy_joules": next(told)})
    history = fit(compiled(), watch, epochs=4)
    assert history["gpu0_energy_joules"] == [3.0, 7.0]


@pytest.mark.usefixtures("no_thread")
def test_rows_and_scalars_hold_every_sample(tmp_path):
    watch = stats(csv_path=tmp_path / "stats.csv", log_dir=tmp_path / "events")
    fit(compiled(), watch)
    fit(compiled(), watch, epochs=1)
    assert rows(tmp_path / "stats.csv") == [
        ["step", "time", *FIGURES],
        ["0", "1000", "20.0", "102.0"],
        ["3", "1001", "30.0", "103.0"],
        ["6", "1002", "40.0", "104.0"],
        ["0", "1003", "60.0", "106.0"],
        ["3", "1004", "70.0", "107.0"],
    ]
    assert events(tmp_path / "events")[0][6, "load"] == 40.0


@pytest.mark.usefixtures("no_thread")
def test_it_works_beside_the_other_callbacks_on_two_replicas():
    strategy = two_replicas()
    with strategy.scope():
        model = compiled()
        model.compile(tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0), "mse")
    history = fit(model, PrecisionMonitor(), Throughput(), stats())
    assert history["load_max"] == [30.0, 40.0]
    assert history["applied_steps"] == [3, 6]


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


@pytest.mark.usefixtures("no_thread")
def test_a_reading_that_fails_ends_the_readings_and_not_the_training():
    reader = Failing()
    watch = stats(reader)
    history = fit(compiled(), watch)
    text = (
        "DeviceStats is off, since reading or writing failed: "
        "OSError('the driver went away')."
    )
    assert watch.notes == (text,)
    assert len(history["loss"]) == 2
    assert "load_mean" not in history
    assert reader.is_closed


def test_a_reader_that_fails_from_the_beginning_does_not_end_training():
    def fail():
        raise OSError("never there")

    watch = stats(fail)
    assert set(fit(compiled(), watch)) == {"loss"}
    assert "OSError('never there')" in watch.notes[0]


@pytest.mark.usefixtures("no_thread")
def test_a_full_disk_ends_the_readings_and_not_the_training(tmp_path, monkeypatch):
    def full(self, rows):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tfamp.callbacks._fit_callback.EventWriter.write", full)
    watch = stats(csv_path=tmp_path / "stats.csv")
    fit(compiled(), watch)
    assert "No space left on device" in watch.notes[0]
    assert len(watch.notes) == 1


class Bad(Exception):
    """What a callback raises."""


class Raising(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise Bad


@pytest.mark.usefixtures("no_thread")
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


@pytest.mark.usefixtures("no_thread")
def test_a_loop_of_ones_own_is_read_until_it_says_that_it_ends():
    watch = stats()

    def begin():
        watch.on_train_begin()

    watch.set_model(compiled())
    begin()
    assert watch.sample()
    watch.on_train_end()
    assert not watch.sample()


class Owner:
    """Counts samples; ends after some."""

    def __init__(self, most):
        self.count, self.most = 0, most
        self.done = threading.Event()

    def sample(self):
        self.count += 1
        if self.count == self.most:
            self.done.set()
            return False
        return True


LIMIT = 60  # seconds after which a thread that should have ended is a failure


def test_a_thread_samples_until_there_is_no_more():
    waits = []

    class Counting(Sampler):
        def wait(self):
            waits.append(self.interval_seconds)
            return False

    owner = Owner(most=4)
    sampler = Counting(owner, 2.5)
    sampler.start()
    assert owner.done.wait(LIMIT)
    sampler.stop()
    assert (owner.count, waits) == (4, [2.5] * 3)
    assert not sampler.is_alive()


def waiting_sampler(owner):
    """A sampler that has taken its first sample and waits for the next."""
    waiting = threading.Event()

    class Waiting(Sampler):
        def wait(self):
            waiting.set()
            return self.ended.wait(LIMIT)

    sampler = Waiting(owner, 1e6)
    sampler.start()
    assert waiting.wait(LIMIT)
    return sampler


def test_a_thread_that_waits_ends_at_once_when_stopped():
    owner = Owner(most=None)
    sampler = waiting_sampler(owner)
    sampler.stop()
    sampler.stop()
    assert (owner.count, sampler.is_alive()) == (1, False)


def test_a_thread_ends_with_what_it_samples():
    owner = Owner(most=None)
    sampler, gone = waiting_sampler(owner), weakref.ref(owner)
    del owner
    gc.collect()
    was_gone, was_running = gone() is None, sampler.is_alive()
    sampler.stop()
    assert (was_gone, was_running) == (True, False)


def test_load_is_cpu_time_over_time_of_one_core(monkeypatch):
    cpu = iter([(1.0, 0.5), (2.0, 0.5), (2.0, 0.6), (5.0, 1.5)])
    process = types.SimpleNamespace(
        cpu_times=lambda: types.SimpleNamespace(
            **dict(zip(("user", "system"), next(cpu), strict=True))
        ),
        memory_info=lambda: types.SimpleNamespace(rss=12345),
    )
    times = iter([10.0, 12.0, 12.01, 14.0])
    monkeypatch.setattr(psutil, "Process", lambda: process)
    now = types.SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr(device_stats, "time", now)
    read = device_stats.ProcessReader()
    # 1 s in 2 s; too soon for another; 4 s in 2 s since the one before the last.
    assert read() == {"cpu_percent": 50.0, "process_bytes": 12345.0}
    assert read()["cpu_percent"] == 50.0
    assert read()["cpu_percent"] == 200.0


class Driver:
    """In place of `Nvml`: what it gives, one after the other."""

    def __init__(self, *readings):
        self.readings, self.is_closed = list(readings), False

    def read(self):
        return (self.readings.pop(0) if len(self.readings) > 1 else self.readings[0],)

    def close(self):
        self.is_closed = True


def gpu_reader(monkeypatch, *readings):
    driver = Driver(*readings)
    monkeypatch.setattr(device_stats, "Nvml", lambda: driver)
    return device_stats.GpuReader(), driver


def test_gpus_are_read_under_their_numbers_and_energy_from_the_beginning(monkeypatch):
    full = GpuReading(1, "A100", None, 0.5, 10, 20, 60.0, 200.0, 1000.0, "counter")
    later = GpuReading(1, "A100", None, 1.0, 12, 20, 65.0, 300.0, 1250.0, "counter")
    reader, driver = gpu_reader(monkeypatch, full, later)
    assert reader() == {
        "gpu1_utilisation": 1.0,
        "gpu1_memory_bytes": 12.0,
        "gpu1_temperature_celsius": 65.0,
        "gpu1_power_watts": 300.0,
        "gpu1_energy_joules": 250.0,
    }
    assert reader.notes == ()
    reader.close()
    assert driver.is_closed


def test_what_a_slice_does_not_tell_is_left_out_and_said(monkeypatch):
    part = GpuReading(0, "A100 MIG 1g.5gb", "1g.5gb", None, 10, 20)
    reader, _ = gpu_reader(monkeypatch, part)
    assert reader.names == ("gpu0_memory_bytes",)
    assert reader.notes == (
        "GPU:0 is the MIG slice 1g.5gb of A100 MIG 1g.5gb: memory is its own; "
        "temperature, power and energy, where told, are those of the whole GPU.",
        "GPU:0 does not tell utilisation, temperature_celsius, power_watts, "
        "energy_joules: its driver refuses that here, as under MIG and in some "
        "containers.",
    )


@pytest.mark.usefixtures("no_thread")
def test_a_gpu_without_the_library_is_said_with_the_line_to_run(monkeypatch):
    monkeypatch.setattr(device_stats, "visible_gpus", lambda: [(0, "A100")])
    monkeypatch.setattr("tfamp.machine.nvml.visible_gpus", lambda: [(0, "A100")])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    watch = DeviceStats()
    fit(compiled(), watch)
    assert watch.notes == (
        "No figures of the GPU: Figures of the GPU needs nvidia-ml-py, which is not "
        "installed. Run `pip install 'tfamp[gpu]'`.",
    )


@pytest.mark.usefixtures("no_thread")
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


def test_a_file_that_cannot_be_written_ends_training_before_it_begins(tmp_path):
    reader = Reader()
    watch = stats(reader, csv_path=tmp_path / "no" / "stats.csv")
    model = compiled()
    with pytest.raises(ValueError, match="there is no folder"):
        fit(model, watch)
    assert int(model.optimizer.iterations) == 0
    assert reader.is_closed
