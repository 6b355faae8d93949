"""The record of a proof: what a step computes in which dtype, and why."""

import dataclasses
from typing import Literal

from tfamp.numerics.proof.records import Cast, Cause, Product, Unaligned
from tfamp.numerics.proof.text import render
from tfamp.records.record import Device, TableRecord


@dataclasses.dataclass(frozen=True)
class Proof(TableRecord):
    """What a step computes in which dtype, and why it is not faster.

    Args:
        model: The model's name.
        step: "train" or "inference".
        batch_size: Examples in the batch, over all replicas.
        half_share_of_flops: Part of the FLOPs of matrix products and convolutions that
            run in float16 or bfloat16, in [0, 1]; 0 where there are none.
        flops: FLOPs of matrix products and convolutions in a step.
        operations: Each product and convolution.
        casts: Casts between floating-point dtypes, most bytes first. Scalars are left
            out.
        causes: Why it is not faster, the largest figure first.
        unaligned: Layers in half precision whose sizes are not multiples of 8.
        moved_bytes: Bytes that all operations read and write, if nothing is fused.
        reasons: Why a layer with products in float32 is in float32, by its path.
        devices: The devices that the step runs on.
        tf32: Whether products of float32 run as TF32 on them.
        source: What the dtypes were read from last: the traced "graph", the program
            that "XLA" compiled, or the graph after TensorFlow's "rewrite" of it.
        num_replicas: Replicas in step.
        possible_gain: What a perfect input would save of a step, None unmeasured.
        notes: What else a reader should know.
    """

    model: str
    step: Literal["train", "inference"]
    batch_size: int
    half_share_of_flops: float
    flops: int
    operations: tuple[Product, ...]
    casts: tuple[Cast, ...]
    causes: tuple[Cause, ...]
    unaligned: tuple[Unaligned, ...]
    moved_bytes: int
    reasons: dict[str, str] = dataclasses.field(hash=False)
    devices: tuple[Device, ...]
    tf32: bool = False
    source: Literal["graph", "XLA", "rewrite"] = "graph"
    num_replicas: int = 1
    possible_gain: float | None = None
    notes: tuple[str, ...] = ()

    def share_of_flops(self, dtype: str) -> float:
        """Returns the part of the FLOPs that runs in a dtype, in [0, 1]."""
        found = sum(p.step_flops for p in self.operations if p.runs_in == dtype)
        return found / self.flops if self.flops else 0.0

    def table(self) -> str:
        """Returns layers, casts and causes as text of at most 110 columns."""
        return render(self)
