"""The answers of `estimate_memory`: bytes by kind and layer, tables and pictures."""

import bisect
import collections
import dataclasses
import itertools
import os
import textwrap
from collections.abc import Iterator
from typing import Any

import keras
from rich import box
from rich.table import Table

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
    "parameters",
    "optimizer slots",
    "inputs",
    "activations",
    "gradients",
    "casts",
    "workspace",
    PROCESS,
)
# What belongs to no layer: the loss, the optimizer, the train step itself.
_OUTSIDE = "(outside layers)"
_COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#f58518", "#72b7b2")
_MAX_LAYERS = 8
# Batches are not looked for beyond it.
_LARGEST = 2**40


@dataclasses.dataclass(frozen=True)
class MemoryEstimate(TableRecord):
    """What one step will hold in memory when it holds most.

    Args:
        model: Name of the model.
        policy: The policy it computes under.
        batch_size: Examples of a step, of all replicas.
        training: Whether it is a training step or one of `predict`.
        source: "graph" where it was traced, "measured" where it was trained.
        peak_bytes: All of it: what is there before the step, and what the step makes.
        by_kind: Bytes of parameters, optimizer slots, inputs, activations, gradients,
            casts of weights to half precision, workspace, and what the process holds
            besides, where it was measured.
        by_layer: Bytes of each layer that holds any, the largest first.
        at: The operation that runs at the peak.
        curve: (batch size, peak bytes) around `batch_size`, smaller sizes first.
        notes: What else a reader should know.
    """

    model: str
    policy: str
    batch_size: int
    training: bool
    source: str
    peak_bytes: int
    by_kind: dict[str, int] = dataclasses.field(hash=False)
    by_layer: dict[str, int] = dataclasses.field(hash=False)
    at: str
    curve: tuple[tuple[int, int], ...]
    notes: tuple[str, ...] = ()

    @property
    def step_bytes(self) -> int:
        """Bytes above what model and optimizer hold between two steps."""
        standing = ("parameters", "optimizer slots", PROCESS)
        return self.peak_bytes - sum(self.by_kind.get(kind, 0) for kind in standing)

    def bytes_at(self, batch_size: int) -> int:
        """Returns the peak with another batch size, from the sizes that were computed.

        Between two of them it is never below the truth, since the peak is the largest
        of sums that grow evenly with the batch.
        """
        size = checks.positive_int("batch_size", batch_size)
        pairs = list(itertools.pairwise(self.curve))
        for (low, small), (high, large) in pairs:
            if size <= high or (low, small) == pairs[-1][0]:
                return round(small + (large - small) / (high - low) * (size - low))
        return self.peak_bytes

    def largest_batch(self, limit_bytes: int, *, multiple_of: int = 1) -> int:
        """Returns the largest batch size whose step fits into a limit.

        Args:
            limit_bytes: The memory that may be taken in all: of a GPU; of a whole
                process, as a container's, where it was measured.
            multiple_of: What the size has to be a multiple of, such as 8.

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
        if count == len(sizes):
            raise ValueError(
                f"Every batch fits into {format_bytes(limit)}; expected a step whose "
                "memory grows with the batch. Pass `data=` with a batch of yours."
            )
        return sizes[count - 1]

    def table(self) -> str:
        """Returns the bytes by kind, and those of the largest layers, as text."""
        return MemoryEstimates((self,)).table()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws memory against batch size into a PNG, SVG or PDF file."""
        MemoryEstimates((self,)).plot(path)


@dataclasses.dataclass(frozen=True)
class MemoryEstimates(TableRecord):
    """Estimates of several batch sizes and policies.

    Args:
        estimates: One for each, policies in the order given and sizes within them.
    """

    estimates: tuple[MemoryEstimate, ...]

    def __iter__(self) -> Iterator[MemoryEstimate]:
        return iter(self.estimates)

    def __len__(self) -> int:
        return len(self.estimates)

    def __getitem__(self, index: int) -> MemoryEstimate:
        return self.estimates[index]

    def table(self) -> str:
        """Returns the estimates beside one another, as text of at most 110 columns."""
        first, *others = self.estimates
        step = "training step" if first.training else "step of predict"
        parts = [f"Memory of a {step} of {first.model!r}", self._kinds()]
        lines = []
        if not others:
            parts.append(_layers(first.by_layer))
            lines.append(f"Peak at {first.at}.")
        notes = dict.fromkeys(note for each in self for note in each.notes)
        lines += [f"Note: {note}" for note in notes]
        parts += ["\n".join(textwrap.wrap(line, console.WIDTH)) for line in lines]
        return console.text_of(*parts)

    def _kinds(self) -> Table:
        """Returns a row for each kind of bytes, a column for each estimate."""
        found = Table(box=box.SIMPLE, show_edge=False)
        found.add_column("")
        for each in self:
            heading = f"{each.policy}\nbatch {each.batch_size:,}"
            found.add_column(heading, justify="right")

        def add(name: str, sizes: list[int | None]) -> None:
            found.add_row(name, *(format_bytes(n) if n else "-" for n in sizes))

        for kind in KINDS:
            if any(kind in each.by_kind for each in self):
                add(kind, [each.by_kind.get(kind) for each in self])
        found.add_section()
        add("peak", [each.peak_bytes for each in self])
        add("of which the step makes", [each.step_bytes for each in self])
        return found

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws memory against batch size into a file.

        There is a line for each policy, and a dot for each size that was asked for.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = checks.figure("`MemoryEstimate.plot`", 8.0, 5.0)
        axes = figure.subplots()
        for number, policy in enumerate(dict.fromkeys(each.policy for each in self)):
            own = [each for each in self if each.policy == policy]
            colour = _COLOURS[number % len(_COLOURS)]
            curve = sorted({point for each in own for point in each.curve})
            axes.plot(*zip(*curve, strict=True), color=colour, label=policy)
            asked = [(each.batch_size, each.peak_bytes) for each in own]
            axes.plot(*zip(*asked, strict=True), "o", color=colour)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: format_bytes(value))
        axes.set_xlabel("batch size")
        axes.set_ylabel("peak memory")
        axes.set_title(f"Memory of a step of {self.estimates[0].model}")
        axes.grid(alpha=0.3)
        axes.legend(title="policy")
        figure.savefig(path)


def _layers(by_layer: dict[str, int]) -> Any:
    """Returns a table of the largest layers."""
    sizes = list(by_layer.items())
    rows = [(path, format_bytes(size)) for path, size in sizes[:_MAX_LAYERS]]
    if rest := sizes[_MAX_LAYERS:]:
        others = format_bytes(sum(size for _, size in rest))
        rows.append((f"{len(rest)} others", others))
    columns = {"largest layers": console.FOLD, "at the peak": console.RIGHT}
    return console.table(columns, rows, box=box.SIMPLE, show_edge=False)


def by_kind(peak: Peak, model: keras.Model, marks: Marks) -> dict[str, int]:
    """Returns the bytes of what a step made and holds at its peak, by kind."""
    shapes = {num_bytes(variable) for variable in model.trainable_variables}
    sizes = shapes | {size // 2 for size in shapes}
    found: collections.Counter[str] = collections.Counter()
    for held in peak.held:
        in_layer = bool(marks.layer_of(held.name))
        found[_kind(held, sizes, in_layer=in_layer)] += held.num_bytes
    return {kind: found[kind] for kind in KINDS if found[kind]}


def _kind(held: Held, weights: set[int], *, in_layer: bool) -> str:
    if held.op == "scratch":
        return "workspace"
    if held.op == "Cast" and held.source == "ReadVariableOp":
        return "casts"
    if is_backward(held.name):
        return "gradients" if held.num_bytes in weights else "workspace"
    # The optimizer computes with numbers of the weights' sizes.
    return "activations" if in_layer or held.num_bytes not in weights else "workspace"


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
        size = bytes_of(own)
        # Slots have the shapes of what is trained.
        share = sum(num_bytes(w) for w in own if getattr(w, "trainable", False))
        found[path] += size + slots * share // trainable
    return {path: size for path, size in found.most_common() if size}
