"""Which share of a step each operation takes, by a roofline with round numbers.

A product takes the longer of computing and moving its bytes, all else takes the
moving. That needs one ratio of a device: floating-point operations in the time of
moving a byte. Ratios of devices differ by a factor of two or three and caches are left
out, so shares order causes and foretell no speed.
"""

import dataclasses
from collections.abc import Sequence

from tfamp.graph.bodies import Operation
from tfamp.graph.products import flops_of, is_product
from tfamp.machine import devices as hardware
from tfamp.machine.speeds import Device
from tfamp.records.formats import HALF

# FLOPs a byte. Source: NVIDIA, GPU Performance Background User's Guide (2023), table 1:
# V100 15.7 and 125 TFLOPS at 900 GB/s; A100 data sheet: 19.5, 156 (TF32) and 312 TFLOPS
# at 1555 GB/s. CPU: a core with two AVX-512 units at 2.5 GHz and 12 GB/s; bfloat16
# instructions double it at least.
_GPU = {"float32": 17.0, "tfloat32": 100.0, "half": 140.0}
_CPU = {"float32": 13.0, "half": 26.0}
_TPU = {"float32": 60.0, "half": 120.0}
# Operations that move nothing: TensorFlow hands the same memory on.
_FREE = frozenset(
    "Const Placeholder Identity IdentityN ReadVariableOp VarHandleOp Reshape Squeeze "
    "ExpandDims Shape ShapeN Rank Size StopGradient PreventGradient NoOp "
    "CheckNumerics TensorListFromTensor TensorListReserve TensorListStack "
    "TensorListGetItem TensorListSetItem TensorListPushBack TensorListPopBack "
    "EmptyTensorList VariableShape BroadcastGradientArgs".split()
)
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclasses.dataclass(frozen=True)
class Roofline:
    """How many floating-point operations devices do in the time of a byte.

    The slowest kind of them counts; `tf32` says whether float32 products run as TF32.
    """

    devices: Sequence[Device]
    tf32: bool = False

    def flops_per_byte(self, dtype: str) -> float:
        """Returns the ratio for products in a dtype."""
        return min((self._of(device, dtype) for device in self.devices), default=13.0)

    def cost(self, operation: Operation, dtype: str = "") -> float:
        """Returns the time of one run of an operation, in that of moving a byte."""
        moved = float(num_bytes(operation))
        if is_product(operation):
            ratio = self.flops_per_byte(dtype or product_dtype(operation))
            moved = max(moved, (flops_of(operation) or 0) / ratio)
        return moved

    def _of(self, device: Device, dtype: str) -> float:
        table = {"gpu": _GPU, "tpu": _TPU}.get(device.kind, _CPU)
        if dtype in HALF and dtype in hardware.fast_dtypes(device):
            return table["half"]
        if self.tf32 and dtype == "float32":
            return table.get("tfloat32", table["float32"])
        return table["float32"]


def computing(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Returns the devices that models run on: the CPU only when it is alone."""
    return tuple(d for d in devices if d.kind != "cpu") or tuple(devices)


def num_bytes(operation: Operation) -> int:
    """Returns the bytes that one run reads and writes; sizes not known count 0."""
    if operation.op_type in _FREE:
        return 0
    if operation.op_type == "Cast":
        read, written = _BYTES.get(operation.dtype("SrcT"), 0), operation.dtype("DstT")
        elements = _elements(operation.outputs[:1])
        return elements * (read + _BYTES.get(written, 0)) if read else 0
    size = _BYTES.get(product_dtype(operation), 0)
    return size * (_elements(operation.inputs) + _elements(operation.outputs))


def product_dtype(operation: Operation) -> str:
    """Returns the dtype that an operation computes in, the wider of two factors."""
    found = [operation.dtype(name) for name in ("T", "Ta", "Tb", "dtype")]
    return max((name for name in found if name), key=_width, default="")


def _width(dtype: str) -> int:
    return _BYTES.get(dtype, 0)


def _elements(shapes: Sequence[tuple[int | None, ...] | None]) -> int:
    total = 0
    for shape in shapes:
        size = 1
        for dim in shape if shape is not None else (0,):
            size *= dim or 0
        total += size
    return total
