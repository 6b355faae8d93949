"""NVIDIA's figures of the GPUs that TensorFlow uses: load, memory, power, energy."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp.machine.limits import GpuReading
from tfamp.records import checks

_MIG = re.compile(r"\bMIG (\S+)")


class Nvml:
    """Reads the GPUs that TensorFlow sees in this process; close it, or use `with`.

    A query that fails gives None. An ImportError says that nvidia-ml-py is not
    installed, a RuntimeError that no GPU answers. `handles` are NVML's by TensorFlow's
    number: of what it computes on, and of the whole GPU, which differ on a MIG slice.
    """

    def __init__(
        self,
        pynvml: Any = None,
        *,
        gpus: Sequence[tuple[int, str]] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        gpus = visible_gpus() if gpus is None else gpus
        if not gpus:
            raise RuntimeError("TensorFlow sees no GPU, so NVML has nothing to read.")
        self._pynvml: Any = pynvml or checks.require(
            "pynvml", extra="gpu", purpose="Figures of the GPU"
        )
        try:
            self._pynvml.nvmlInit()
        except self._pynvml.NVMLError as error:
            raise RuntimeError(
                f"NVML does not answer ({error}); expected NVIDIA's driver. Run "
                "`nvidia-smi`, and in a container start it with the GPU's driver files."
            ) from error
        shown = environ.get("CUDA_VISIBLE_DEVICES")
        self.handles: dict[int, tuple[Any, Any]] = {}
        for number, _ in gpus:
            entries = [str(number)] if shown is None else shown.split(",")[number:]
            handles = self._handles(entries[0].strip()) if entries else None
            if handles is not None:
                self.handles[number] = handles
        if not self.handles:
            self.close()
            raise RuntimeError(
                f"NVML knows none of TensorFlow's GPUs {tuple(gpus)!r}; expected "
                "NVIDIA's, as listed by `nvidia-smi -L`."
            )

    @classmethod
    def open(cls, pynvml: Any = None, **options: Any) -> "Nvml | None":
        """Returns a reader, or None where it cannot be had (no GPU, no NVML)."""
        with contextlib.suppress(ImportError, RuntimeError):
            return cls(pynvml, **options)
        return None

    def read(self) -> tuple[GpuReading, ...]:
        """Returns the figures now, a reading for each GPU; about a millisecond each."""
        return tuple(self._one(index, *both) for index, both in self.handles.items())

    def close(self) -> None:
        """Lets NVML go."""
        self.ask("nvmlShutdown")

    def __enter__(self) -> "Nvml":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Returns the answer to a query of the library, None where there is none."""
        try:
            answer = getattr(self._pynvml, name)(*arguments)
        except (self._pynvml.NVMLError, AttributeError):
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def _handles(self, entry: str) -> tuple[Any, Any] | None:
        """Returns the handles behind an entry of CUDA_VISIBLE_DEVICES."""
        if not entry.isdecimal():
            part = self.ask("nvmlDeviceGetHandleByUUID", entry)
            whole = self.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part)
            return None if part is None else (part, whole or part)
        whole = self.ask("nvmlDeviceGetHandleByIndex", int(entry))
        for index in range(self.ask("nvmlDeviceGetMaxMigDeviceCount", whole) or 0):
            part = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", whole, index)
            if part is not None:
                return part, whole
        return None if whole is None else (whole, whole)

    def _one(self, index: int, part: Any, whole: Any) -> GpuReading:
        def scaled(answer: Any, factor: float = 1.0) -> float | None:
            return None if answer is None else answer * factor

        name = self.ask("nvmlDeviceGetName", part) or "GPU"
        named = _MIG.search(name)
        memory = self.ask("nvmlDeviceGetMemoryInfo", part)
        load = self.ask("nvmlDeviceGetUtilizationRates", part)
        return GpuReading(
            index,
            name,
            named[1] if named else None if part is whole else "MIG",
            None if load is None else load.gpu / 100,
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
            scaled(self.ask("nvmlDeviceGetTemperature", whole, 0)),
            scaled(self.ask("nvmlDeviceGetPowerUsage", whole), 1e-3),
            scaled(self.ask("nvmlDeviceGetTotalEnergyConsumption", whole), 1e-3),
        )


def visible_gpus() -> list[tuple[int, str]]:
    """Returns number and name of each GPU that TensorFlow may use here."""
    return [
        (number_of(gpu), details_of(gpu).get("device_name", ""))
        for gpu in tf.config.get_visible_devices("GPU")
    ]


def number_of(gpu: Any) -> int:
    """Returns the number of one of TensorFlow's physical devices."""
    return int(gpu.name.rsplit(":", 1)[1])


def details_of(device: Any) -> dict[str, Any]:
    """Returns TensorFlow's details of a device, {} where it has none to give."""
    with contextlib.suppress(ValueError, RuntimeError, tf.errors.OpError):
        return dict(tf.config.experimental.get_device_details(device))
    return {}
