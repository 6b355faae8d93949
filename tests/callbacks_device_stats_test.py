"""`DeviceStats`: samples in logs, what cannot be read, and an end with `fit`."""

import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.machine_test import Driver, Gpu
from tfamp.callbacks import DeviceStats, device_stats


@pytest.fixture
def process(monkeypatch):
    """Stands for `psutil.Process`: a load of 10, 20, 30, ... or an error at one."""
    found = types.SimpleNamespace(load=0.0, fails_at=None)

    def cpu_percent():
        found.load += 10
        if found.load == found.fails_at:
            raise OSError("the system does not tell")
        return found.load

    found.cpu_percent = cpu_percent
    found.memory_info = lambda: types.SimpleNamespace(rss=2**20)
    fake = types.SimpleNamespace(Process=lambda: found)
    monkeypatch.setitem(sys.modules, "psutil", fake)
    return found


def fit(*callbacks, epochs=2):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x, y = np.ones((6, 2), "f4"), np.ones((6, 1), "f4")
    how = {"batch_size": 2, "verbose": 0, "epochs": epochs}
    return model.fit(x, y, callbacks=list(callbacks), **how).history


def test_epochs_are_summed_up(process, monkeypatch):
    monkeypatch.setattr(device_stats, "_SECONDS", 1e-3)
    history = fit(DeviceStats(), epochs=3)
    most, means = history["cpu_percent_max"], history["cpu_percent_mean"]
    assert most == sorted(most) and most[-1] <= process.load
    assert all(mean <= top for mean, top in zip(means, most, strict=True))
    assert history["process_bytes_mean"] == [2.0**20] * 3


@pytest.mark.parametrize("load", [20, 40], ids=["first", "third"])
def test_a_reading_that_fails_ends_the_readings_and_not_the_training(process, load):
    process.fails_at = load
    watch = DeviceStats()
    assert len(fit(watch)["loss"]) == 2
    (note,) = watch.notes
    assert note.startswith("DeviceStats is off, since reading failed: OSE")


def test_a_gpu_is_read_and_its_energy_counts_from_the_beginning(monkeypatch):
    energy = [1_000_000 + 10_000 * i for i in range(20)]
    figures = {"memory": (2**30, 2**33), "load": 50, "temperature": 60}
    driver = Driver(Gpu("A100", "GPU-a", power=200_000, energy=energy, **figures))
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    visible = tf.config.get_visible_devices
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        tf.config,
        "get_visible_devices",
        lambda kind=None: [gpu] if kind == "GPU" else visible(kind),
    )
    watch = DeviceStats()
    history = fit(watch)
    assert history["gpu0_utilisation_mean"] == [0.5, 0.5]
    assert history["gpu0_memory_bytes_max"] == [2**30, 2**30]
    assert history["gpu0_power_watts_max"] == [200.0, 200.0]
    assert history["gpu0_temperature_celsius_max"] == [60.0, 60.0]
    # Ten joules from each reading to the next.
    assert all(e >= 10 and e % 10 == 0 for e in history["gpu0_energy_joules"])
    assert watch.notes == () and driver.num_open == 0


def test_without_psutil_there_is_a_line_and_no_figure(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    watch = DeviceStats()
    assert set(fit(watch)) == {"loss"}
    assert watch.notes == (
        "CPU and memory of `DeviceStats` needs psutil, which is not installed. Run "
        "`pip install 'tfamp[report]'`.",
    )
