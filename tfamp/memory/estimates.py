"""The answer of `estimate_memory`: bytes by kind and layer, and their table."""

import bisect
import collections
import dataclasses
import itertools
from typing import Any

import keras
from rich import box

from tfamp.graph.bodies import is_backward
from tfamp.graph.liveness import Held, Peak
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.structure import bytes_of, num_bytes
from tfamp.records import checks, console
from tfamp.records.record import TableRecord
from tfamp.records.units import format_bytes
from tfamp.stepping.step_traces import Marks

# What a process holds besides, where it was measured.
PROCESS = "process"
# Of bytes, in the order of a table.
KINDS = (
    *("parameters", "optimizer slots", "inputs", "activations", "gradients", "casts"),
    *("workspace", PROCESS),
)
# What belongs to no layer: the loss, the optimizer, the train step itself.
_OUTSIDE = "(outside layers)"
_MAX_LAYERS = 8
# Batches are not looked for beyond it.
_LARGEST = 2**40


@dataclasses.dataclass(frozen=True)
class MemoryEstimate(TableRecord):
    """What one step will hold in memory when it holds most, by `KINDS` and layers."""

    model: str
    policy: str
    batch_size: int  # examples of a step, of all replicas
    training: bool  # or a step of `predict`
    source: str  # "graph" where it was traced, "measured" where it was trained
    peak_bytes: int  # what is there before the step, and what the step makes
    by_kind: dict[str, int] = dataclasses.field(hash=False)
    by_layer: dict[str, int] = dataclasses.field(hash=False)  # the largest first
    at: str  # the operation that runs at the peak
    curve: tuple[tuple[int, int], ...]  # batch size, peak bytes; smaller sizes first
    notes: tuple[str, ...] = ()

    @property
    def step_bytes(self) -> int:
        """Bytes above what model and optimizer hold between two steps."""
        standing = ("parameters", "optimizer slots", PROCESS)
        return self.peak_bytes - sum(self.by_kind.get(kind, 0) for kind in standing)

    def bytes_at(self, batch_size: int) -> int:
        """Returns the peak with another batch size, between those of the curve."""
        size = checks.positive_int("batch_size", batch_size)
        pairs = list(itertools.pairwise(self.curve))
        pair = next((pair for pair in pairs if size <= pair[1][0]), pairs[-1])
        (low, small), (high, large) = pair
        return round(small + (large - small) / (high - low) * (size - low))

    def largest_batch(self, limit_bytes: int, *, multiple_of: int = 1) -> int:
        """Returns the largest batch size whose step fits into a limit.

        The limit is of a GPU, or of a whole process where it was measured.

        Raises:
            ValueError: Not even the smallest fits, or the memory does not depend on
                the batch.
        """
        limit = checks.positive_int("limit_bytes", limit_bytes)
        step = checks.positive_int("multiple_of", multiple_of)
        sizes = range(step, step * (_LARGEST + 1), step)
        count = bisect.bisect_right(sizes, limit, key=self.bytes_at)
        if not count:
            raise ValueError(
                f"`limit_bytes` is {format_bytes(limit)}, and a batch of {step} takes "
                f"{format_bytes(self.bytes_at(step))}, of which model and optimizer "
                f"hold {format_bytes(self.peak_bytes - self.step_bytes)}; expected a "
                "limit that this fits into. Use `tfamp.remat`, a policy of less "
                "precision, an optimizer with fewer slots, or a smaller model."
            )
        if count == _LARGEST:
            raise ValueError(
                f"Every batch fits into {format_bytes(limit)}; expected a step whose "
                "memory grows with the batch. Pass `data=` with a batch of yours."
            )
        return sizes[count - 1]

    def table(self) -> str:
        """Returns the bytes by kind, and those of the largest layers, as text."""
        title = (
            f"Memory of a {'training step' if self.training else 'step of predict'} of "
            f"{self.model!r}, {self.policy}, batch {self.batch_size:,}"
        )
        kinds = {kind: self.by_kind[kind] for kind in KINDS if kind in self.by_kind}
        kinds |= {"peak": self.peak_bytes, "of which the step makes": self.step_bytes}
        sizes = list(self.by_layer.items())
        layers = dict(sizes[:_MAX_LAYERS])
        if rest := sizes[_MAX_LAYERS:]:
            layers[f"{len(rest)} others"] = sum(size for _, size in rest)
        look: dict[str, Any] = {"box": box.SIMPLE, "show_edge": False}
        heads = ("", "bytes"), ("largest layers", "at the peak")
        tables = [
            console.table(
                {left: console.FOLD, right: console.RIGHT},
                [(name, format_bytes(size)) for name, size in each.items()],
                **look,
            )
            for (left, right), each in zip(heads, (kinds, layers), strict=True)
        ]
        told = [f"Peak at {self.at}.", *(f"Note: {note}" for note in self.notes)]
        lines = ["\n".join(console.wrapped(each)) for each in told]
        return console.text_of(title, *tables, *lines)


def by_kind(peak: Peak, model: keras.Model, marks: Marks) -> dict[str, int]:
    """Returns the bytes of what a step made and holds at its peak, by kind."""
    shapes = {num_bytes(variable) for variable in model.trainable_variables}
    sizes = shapes | {size // 2 for size in shapes}
    found: collections.Counter[str] = collections.Counter()
    for held in peak.held:
        in_layer = bool(marks.layer_of(held.name))
        found[_kind(held, held.num_bytes in sizes, in_layer)] += held.num_bytes
    return found


def _kind(held: Held, is_like_a_weight: bool, in_layer: bool) -> str:
    if held.op == "scratch":
        return "workspace"
    if held.op == "Cast" and held.source == "ReadVariableOp":
        return "casts"
    if is_backward(held.name):
        return "gradients" if is_like_a_weight else "workspace"
    # The optimizer computes with numbers of the weights' sizes.
    return "activations" if in_layer or not is_like_a_weight else "workspace"


def by_layer(
    peak: Peak, model: keras.Model, marks: Marks, slots: int
) -> dict[str, int]:
    """Returns the bytes of each layer: weights, slots, and what the step holds."""
    found: collections.Counter[str] = collections.Counter()
    for held in peak.held:
        found[marks.layer_of(held.name) or _OUTSIDE] += held.num_bytes
    trainable = sum(map(num_bytes, model.trainable_variables)) or 1
    counted: set[int] = set()
    for path, layer, _ in structure.walk(model):
        own = [w for w in structure.own_weights(layer) if id(w) not in counted]
        counted |= {id(w) for w in own}
        # Slots have the shapes of what is trained.
        share = sum(num_bytes(w) for w in own if getattr(w, "trainable", False))
        found[path] += bytes_of(own) + slots * share // trainable
    return {path: size for path, size in found.most_common() if size}
