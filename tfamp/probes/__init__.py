"""Reads what a process and its GPUs use: memory, load, power."""

from tfamp._memory_records import MemoryLimit as MemoryLimit
from tfamp.probes.allocators import machine_memory as machine_memory
from tfamp.probes.limits import memory_limit as memory_limit
from tfamp.probes.memory import device_peak_bytes as device_peak_bytes
from tfamp.probes.memory import peak_process_bytes as peak_process_bytes
from tfamp.probes.memory import process_bytes as process_bytes
from tfamp.probes.memory import reset_device_peak as reset_device_peak
from tfamp.probes.memory import reset_peak as reset_peak
from tfamp.probes.nvml import GpuReading as GpuReading
from tfamp.probes.nvml import Nvml as Nvml
