"""The answers of `estimate_memory`: bytes of a step, by kind and by layer."""

import dataclasses
import itertools
import os
from collections.abc import Iterator

from tfamp.records import checks
from tfamp.records.record import TableRecord
from tfamp.records.units import format_bytes


@dataclasses.dataclass(frozen=True)
class MemoryEstimate(TableRecord):
    """What one step will hold in memory when it holds most.

    Args:
        model: Name of the model.
        policy: The policy it computes under.
        batch_size: Examples of a step, of all replicas.
        training: Whether it is a training step or one of `predict`.
        source: What was read: the "graph", or the program of "XLA".
        peak_bytes: All of it: what is there before the step, and what the step makes.
        by_kind: Bytes of parameters, optimizer slots, inputs, activations, gradients,
            casts of weights to half precision, and workspace.
        by_layer: Bytes of each layer that holds any, the largest first.
        at: The operation that runs at the peak.
        curve: (batch size, peak bytes) around `batch_size`, smaller sizes first.
        notes: What else a reader should know.
        resident_bytes: On a CPU, what the whole process will show at its peak in a run
            of such steps: what it holds now, TensorFlow's runtime, and tensors with
            what the allocator keeps of those that are freed. None where not known.
        resident_curve: (batch size, resident bytes), as `curve`.
        allocator: What `resident_bytes` counts on, or why it is None.
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
    resident_bytes: int | None = None
    resident_curve: tuple[tuple[int, int], ...] = ()
    allocator: str = ""

    @property
    def step_bytes(self) -> int:
        """Bytes above what model and optimizer hold between two steps."""
        standing = ("parameters", "optimizer slots")
        return self.peak_bytes - sum(self.by_kind.get(kind, 0) for kind in standing)

    def bytes_at(self, batch_size: int, *, resident: bool = False) -> int:
        """Returns the peak with another batch size, from the sizes that were computed.

        Between two of them it is never below the truth, since the peak is the largest
        of sums that grow evenly with the batch.

        Args:
            batch_size: The size.
            resident: Whether to tell the resident size of the process.

        Raises:
            ValueError: The resident size is not known.
        """
        size = checks.positive_int("batch_size", batch_size)
        if resident and self.resident_bytes is None:
            raise ValueError(
                "`resident` is True, but the resident size is not known "
                f"({self.allocator or 'not computed'}); expected False. Leave it out "
                "to ask what a step holds."
            )
        curve = self.resident_curve if resident else self.curve
        pairs = list(itertools.pairwise(curve))
        for (low, small), (high, large) in pairs:
            if size <= high or (low, small) == pairs[-1][0]:
                return round(small + (large - small) / (high - low) * (size - low))
        return (self.resident_bytes or 0) if resident else self.peak_bytes

    def largest_batch(
        self,
        limit_bytes: int,
        *,
        multiple_of: int = 1,
        resident: bool | None = None,
    ) -> int:
        """Returns the largest batch size whose step fits into a limit.

        Args:
            limit_bytes: The memory that may be taken in all.
            multiple_of: What the size has to be a multiple of, such as 8.
            resident: Whether the limit is for the whole process, as a container's is;
                False for what the step holds, as on a GPU; None for the first where it
                is known, which it is on CPUs.

        Raises:
            ValueError: Not even the smallest fits, or the memory does not depend on
                the batch, or the resident size is asked for and not known.
        """
        limit = checks.positive_int("limit_bytes", limit_bytes)
        step = checks.positive_int("multiple_of", multiple_of)
        whole = self.resident_bytes is not None if resident is None else resident
        if self.bytes_at(step, resident=whole) > limit:
            raise ValueError(self._too_small(limit, step, whole))
        low, high = 1, 2
        while self.bytes_at(high * step, resident=whole) <= limit:
            low, high = high, 2 * high
            if high > 2**40:
                raise ValueError(
                    f"Every batch fits into {format_bytes(limit)}; expected a step "
                    "whose memory grows with the batch. Pass `data=` with a batch of "
                    "yours."
                )
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.bytes_at(middle * step, resident=whole) <= limit
            low, high = (middle, high) if fits else (low, middle)
        return low * step

    def _too_small(self, limit: int, size: int, resident: bool) -> str:
        """Returns what to say of a limit that not even one batch fits into."""
        text = (
            f"`limit_bytes` is {format_bytes(limit)}, and a batch of {size} takes "
            f"{format_bytes(self.bytes_at(size, resident=resident))}, of which model "
            f"and optimizer hold {format_bytes(self.peak_bytes - self.step_bytes)}"
        )
        if resident:
            text += (
                ", in a process that shows all it holds; expected a limit that this "
                "fits into, or, for memory that holds tensors alone, as a GPU's, "
                "`resident=False`"
            )
        else:
            text += "; expected a limit that this fits into"
        return (
            f"{text}. Use `tfamp.remat`, a policy of less precision, an optimizer with "
            "fewer slots, or a smaller model."
        )

    def table(self) -> str:
        """Returns the bytes by kind, and those of the largest layers, as text."""
        from tfamp.memory.estimate.text import table

        return table((self,))

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
        """Returns the estimates beside one another as text."""
        from tfamp.memory.estimate.text import table

        return table(self.estimates)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws memory against batch size, a line for each policy, into a file."""
        from tfamp.memory.estimate.text import plot

        plot(self.estimates, path)
