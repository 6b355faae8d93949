"""Which of NVML's GPUs are the ones that TensorFlow sees.

NVML lists all of the machine in the order of their slots. CUDA shows those that
CUDA_VISIBLE_DEVICES names, in its order, and of a GPU cut by MIG one slice.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class _Part(NamedTuple):
    """A GPU, or a MIG slice of one.

    Attributes:
        slot: Its GPU's place in NVML's order.
        uuid: Its identity, "" where unknown.
        name: The maker's name, "" where unknown.
        handle: What NVML is asked with.
        whole: Handle of the GPU.
    """

    slot: int
    uuid: str
    name: str
    handle: Any
    whole: Any


def handles_of(
    pynvml: Any, gpus: Sequence[tuple[int, str]], environ: Mapping[str, str]
) -> dict[int, tuple[Any, Any]]:
    """Returns for each GPU of TensorFlow its NVML handle and that of the whole GPU.

    The two differ on a MIG slice. CUDA puts the fastest GPU first unless
    CUDA_DEVICE_ORDER says otherwise, so where the names disagree they decide, and not
    the place.

    Args:
        pynvml: The module, initialised.
        gpus: Number among those CUDA shows, and name or "".
        environ: Where CUDA_VISIBLE_DEVICES stands.
    """
    parts = _parts(pynvml)
    shown = _shown(parts, environ.get("CUDA_VISIBLE_DEVICES"))
    found: dict[int, tuple[Any, Any]] = {}
    free = [*shown, *(part for part in parts if part not in shown)]
    for number, name in gpus:
        at_place = shown[number] if number < len(shown) else None
        named = [part for part in free if name and part.name == name]
        if at_place in free and (not name or not named or at_place in named):
            part = at_place
        elif named:
            part = named[0]
        else:
            continue
        free.remove(part)
        found[number] = (part.handle, part.whole)
    return found


def _parts(pynvml: Any) -> list[_Part]:
    """Returns all GPUs, and the slices in place of one that is cut."""
    found = []
    for slot in range(_asked(pynvml, "nvmlDeviceGetCount", default=0)):
        whole = _asked(pynvml, "nvmlDeviceGetHandleByIndex", slot)
        if whole is None:
            continue
        for handle in _slices(pynvml, whole) or [whole]:
            uuid = _text(_asked(pynvml, "nvmlDeviceGetUUID", handle, default=""))
            name = _text(_asked(pynvml, "nvmlDeviceGetName", handle, default=""))
            found.append(_Part(slot, uuid, name, handle, whole))
    return found


def _slices(pynvml: Any, whole: Any) -> list[Any]:
    """Returns the slices of a GPU, none where it is not cut."""
    number = _asked(pynvml, "nvmlDeviceGetMaxMigDeviceCount", whole, default=0)
    asked = (
        _asked(pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", whole, index)
        for index in range(number)
    )
    return [handle for handle in asked if handle is not None]


def _shown(parts: Sequence[_Part], listed: str | None) -> list[_Part]:
    """Returns what CUDA shows, in its order.

    The list ends at the first entry that names nothing.

    Args:
        parts: All there is.
        listed: CUDA_VISIBLE_DEVICES: numbers, or the beginnings of UUIDs.

    Source: NVIDIA, CUDA C++ Programming Guide, section "CUDA Environment Variables";
    MIG User Guide, section "CUDA Visible Devices".
    """
    if listed is None:
        return _first_of_each_gpu(parts)
    found: list[_Part] = []
    for entry in listed.split(","):
        part = _named(parts, entry.strip())
        if part is None:
            break
        found.append(part)
    return found


def _named(parts: Sequence[_Part], entry: str) -> _Part | None:
    """Returns what an entry of CUDA_VISIBLE_DEVICES means, None for nothing."""
    if entry.isdecimal():
        matching = [part for part in parts if part.slot == int(entry)]
    else:
        matching = [part for part in parts if entry and part.uuid.startswith(entry)]
    return matching[0] if matching else None


def _first_of_each_gpu(parts: Iterable[_Part]) -> list[_Part]:
    by_slot: dict[int, _Part] = {}
    for part in parts:
        by_slot.setdefault(part.slot, part)
    return list(by_slot.values())


def _asked(pynvml: Any, name: str, *arguments: Any, default: Any = None) -> Any:
    """Returns the answer to a query, `default` where it is refused."""
    try:
        return getattr(pynvml, name)(*arguments)
    except (pynvml.NVMLError, AttributeError):
        return default


def _text(value: str | bytes) -> str:
    """Returns text; older libraries give bytes."""
    return value.decode() if isinstance(value, bytes) else value
