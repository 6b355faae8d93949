"""Memory of the process and figures of the GPU, from a faked driver and files."""

import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from tfamp.machine import memory as process_memory
from tfamp.machine.nvml import GpuReading, Nvml

MIB = 2**20


class NVMLError(Exception):
    """What the fake driver raises."""


class Gpu:
    """A GPU of the fake driver; what is not given is refused."""

    def __init__(self, name, uuid, *, slices=(), **figures):
        self.name, self.uuid, self.slices, self.figures = name, uuid, slices, figures


class Driver:
    """Stands for the module `pynvml`."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *gpus, is_dead=False):
        self.gpus, self.is_dead, self.open = gpus, is_dead, 0

    def nvmlInit(self):
        if self.is_dead:
            raise NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= len(self.gpus):
            raise NVMLError("Invalid Argument")
        return self.gpus[index]

    def nvmlDeviceGetName(self, gpu):
        return gpu.name

    def nvmlDeviceGetUUID(self, gpu):
        return gpu.uuid

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu):
        return 7 if gpu.slices else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu, index):
        if index >= len(gpu.slices):
            raise NVMLError("Not Found")
        return gpu.slices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for gpu in self.gpus:
            for each in (gpu, *gpu.slices):
                if each.uuid == uuid:
                    return each
        raise NVMLError("Not Found")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part):
        for gpu in self.gpus:
            if part in gpu.slices:
                return gpu
        raise NVMLError("Invalid Argument")

    def nvmlDeviceGetMemoryInfo(self, gpu):
        used, total = self.figure(gpu, "memory")
        return types.SimpleNamespace(used=used, total=total)

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return types.SimpleNamespace(gpu=self.figure(gpu, "load"), memory=99)

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        return self.figure(gpu, "temperature")

    def nvmlDeviceGetPowerUsage(self, gpu):
        return self.figure(gpu, "power")

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):
        return self.figure(gpu, "energy")

    @staticmethod
    def figure(gpu, name):
        if name not in gpu.figures:
            raise NVMLError("Not Supported")
        value = gpu.figures[name]
        return value.pop(0) if isinstance(value, list) else value


def full(name="NVIDIA A100", uuid="GPU-a"):
    return Gpu(
        name,
        uuid,
        memory=(3 * MIB, 8 * MIB),
        load=25,
        temperature=61,
        power=150_500,
        energy=7_250,
    )


def test_a_gpu_is_read_in_the_units_of_the_names():
    driver = Driver(full())
    with Nvml(driver, gpus=[(0, "NVIDIA A100")], environ={}) as nvml:
        assert driver.open == 1
        (reading,) = nvml.read()
    assert driver.open == 0
    assert reading == GpuReading(
        index=0,
        name="NVIDIA A100",
        mig_slice=None,
        utilisation=0.25,
        memory_used_bytes=3 * MIB,
        memory_total_bytes=8 * MIB,
        temperature_celsius=61.0,
        power_watts=150.5,
        energy_joules=7.25,
    )
    assert GpuReading.from_json(reading.to_json()) == reading


def test_memory_is_the_slices_and_power_the_whole_gpus_under_mig():
    part = Gpu("NVIDIA A100 MIG 1g.5gb", "MIG-1", memory=(MIB, 5 * MIB), power=1)
    other = Gpu("NVIDIA A100 MIG 3g.20gb", "MIG-2", memory=(0, 20 * MIB))
    whole = Gpu(
        "NVIDIA A100", "GPU-a", slices=(part, other), power=90_000, memory=(9, 9)
    )
    with Nvml(Driver(whole), gpus=[(0, part.name)], environ={}) as nvml:
        (reading,) = nvml.read()
    assert reading.mig_slice == "1g.5gb"
    assert (reading.memory_used_bytes, reading.memory_total_bytes) == (MIB, 5 * MIB)
    assert reading.power_watts == 90.0
    assert reading.utilisation is None
    listed = {"CUDA_VISIBLE_DEVICES": "MIG-2"}
    with Nvml(Driver(whole), gpus=[(0, other.name)], environ=listed) as nvml:
        (reading,) = nvml.read()
    assert (reading.mig_slice, reading.power_watts) == ("3g.20gb", 90.0)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")
def test_the_peak_follows_an_allocation_and_begins_anew():
    size = 96 * MIB
    can_reset = process_memory.reset_peak()
    before, now = process_memory.peak_process_bytes(), process_memory.process_bytes()
    block = np.ones(size, np.uint8)
    assert process_memory.process_bytes() - now > size / 2
    del block
    peak = process_memory.peak_process_bytes()
    assert peak >= process_memory.process_bytes()
    if not can_reset:
        pytest.skip("the kernel keeps the peak of the whole process")
    assert peak - before > size / 2
    assert process_memory.reset_peak()
    assert peak - process_memory.peak_process_bytes() > size / 2


def fake_gpus(monkeypatch, peaks):
    """Lets TensorFlow have GPUs whose allocators peaked there; None keeps no count."""

    def info(name):
        peak = peaks[int(name.removeprefix("GPU:"))]
        if peak is None:
            raise ValueError("no count")
        return {"current": 1, "peak": peak}

    def reset(name):
        info(name)
        peaks[int(name.removeprefix("GPU:"))] = 1

    config = tf.config
    monkeypatch.setattr(config, "list_logical_devices", lambda kind: peaks)
    monkeypatch.setattr(config.experimental, "get_memory_info", info)
    monkeypatch.setattr(config.experimental, "reset_memory_stats", reset)


def test_the_peak_of_the_fullest_gpu_counts_and_begins_anew(monkeypatch):
    peaks = [3 * MIB, 5 * MIB, 2 * MIB]
    fake_gpus(monkeypatch, peaks)
    assert process_memory.device_peak_bytes() == 5 * MIB
    assert process_memory.reset_device_peak()
    assert peaks == [1, 1, 1]
