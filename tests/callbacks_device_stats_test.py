"""`DeviceStats`: samples in logs, the thread's life, what cannot be read."""

import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp.callbacks import DeviceStats, device_stats

NUM_BATCHES = 3


class Process:
    """Stands for `psutil.Process`: a load of 10, 20, 30, ... or an error at one."""

    def __init__(self, fails_at=None):
        self.load, self.fails_at = 0.0, fails_at

    def cpu_percent(self):
        self.load += 10
        if self.load == self.fails_at:
            raise OSError("the system does not tell")
        return self.load

    def memory_info(self):
        return types.SimpleNamespace(rss=2**20)


@pytest.fixture
def process(monkeypatch):
    found = Process()
    fake = types.SimpleNamespace(Process=lambda: found)
    monkeypatch.setitem(sys.modules, "psutil", fake)
    return found


def compiled(**settings):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **(settings or {"run_eagerly": True}))
    return model


def fit(model, *callbacks, epochs=2, **settings):
    x, y = np.ones((2 * NUM_BATCHES, 2), "f4"), np.ones((2 * NUM_BATCHES, 1), "f4")
    settings = {"batch_size": 2, "verbose": 0} | settings
    return model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **settings).history


def test_epochs_are_summed_up(process, monkeypatch):
    monkeypatch.setattr(device_stats, "_SECONDS", 1e-3)
    history = fit(compiled(), DeviceStats(), epochs=3)
    most, means = history["cpu_percent_max"], history["cpu_percent_mean"]
    assert most == sorted(most) and most[-1] <= process.load
    assert all(mean <= top for mean, top in zip(means, most, strict=True))
    assert history["process_bytes_mean"] == [2.0**20] * 3


@pytest.mark.parametrize("load", [20, 40], ids=["first", "third"])
def test_a_reading_that_fails_ends_the_readings_and_not_the_training(process, load):
    process.fails_at = load
    watch = DeviceStats()
    history = fit(compiled(), watch)
    assert len(history["loss"]) == 2
    (note,) = watch.notes
    assert note.startswith("DeviceStats is off, since reading failed: OSE")


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
def test_a_gpu_is_read_and_its_energy_counts_from_the_beginning(monkeypatch):
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
    watch = DeviceStats()
    history = fit(compiled(), watch)
    assert history["gpu0_utilisation_mean"] == [0.5, 0.5]
    assert history["gpu0_memory_bytes_max"] == [2**30, 2**30]
    assert history["gpu0_power_watts_max"] == [200.0, 200.0]
    assert history["gpu0_temperature_celsius_max"] == [60.0, 60.0]
    # Ten joules from each reading to the next.
    assert all(e >= 10 and e % 10 == 0 for e in history["gpu0_energy_joules"])
    assert watch.notes == () and fake.closed == [1]


def test_without_psutil_there_is_a_line_and_no_figure(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    watch = DeviceStats()
    history = fit(compiled(), watch)
    assert set(history) == {"loss"}
    assert watch.notes == (
        "CPU and memory of `DeviceStats` needs psutil, which is not installed. Run "
        "`pip install 'tfamp[report]'`.",
    )
