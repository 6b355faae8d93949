"""What all runs of a comparison have in common, as a file that their processes read."""

import dataclasses
import hashlib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfamp.records import checks
from tfamp.records.record import Record
from tfamp.trials.variant import Variant

FILE = "job.json"


@dataclasses.dataclass(frozen=True)
class Job(Record):
    """The settings of a comparison.

    Args:
        title: What is trained.
        policies: What is compared, as `Variant` reads them.
        seeds: One run for each, under each policy.
        epochs: Passes over the training data.
        batch_size: For arrays; None takes Keras's 32. Datasets have their own.
        latency_batch_sizes: Examples in the timed calls of the trained model.
        profile_steps: Training steps to profile at the end; 0 for none.
        max_memory_bytes: What a process may hold in the search for the largest batch;
            None leaves that search out.
        keeps_models: Whether the trained models of the first seed stay until the end.
        source: Fingerprint of the file that the model is built by, "" if unknown.
        command: How to repeat it from a shell, "" if it was called from Python.
    """

    title: str
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    epochs: int
    batch_size: int | None = None
    latency_batch_sizes: tuple[int, ...] = (1, 8, 32)
    profile_steps: int = 0
    max_memory_bytes: int | None = None
    keeps_models: bool = False
    source: str = ""
    command: str = ""

    def order(self) -> tuple[tuple[str, int], ...]:
        """Returns policies and seeds in the order they are run.

        All policies of a seed follow one another, so that a machine that gets slower
        slows them alike, and each goes first in its turn.

        Example:
            >>> Job("", ("a", "b"), (0, 1), 1).order()
            (('a', 0), ('b', 0), ('b', 1), ('a', 1))
        """
        count = len(self.policies)
        return tuple(
            (self.policies[(turn + place) % count], seed)
            for turn, seed in enumerate(self.seeds)
            for place in range(count)
        )

    def differences(self, other: "Job") -> tuple[str, ...]:
        """Returns the settings that make runs of another job no runs of this one.

        Policies and seeds may be others: their runs stand for themselves, whether
        their models are there or not.
        """
        free = ("policies", "seeds", "command", "title", "keeps_models")
        return tuple(
            field.name
            for field in dataclasses.fields(self)
            if field.name not in free
            and getattr(self, field.name) != getattr(other, field.name)
        )


def file_name(policy: str, seed: int) -> str:
    """Returns what a run's files are called, without their ending.

    Example:
        >>> file_name("keras:float32+xla", 3)
        'keras-float32+xla_seed3'
        >>> file_name("runs/plan.json", 0)
        'runs-plan.json_seed0'
    """
    word = re.sub(r"[:/\\]", "-", str(Variant.parse(policy)))
    return f"{word}_seed{seed}"


def fingerprint(function: Any) -> str:
    """Returns a digest of the file that a function stands in, "" where there is none.

    Notebooks and prompts have no file, so there the function's own text is taken.
    """
    function = inspect.unwrap(function)
    try:
        path = inspect.getsourcefile(function)
        text = Path(path).read_bytes() if path else b""
    except (OSError, TypeError):
        text = b""
    if not text:
        try:
            text = inspect.getsource(function).encode()
        except (OSError, TypeError):
            return ""
    return hashlib.sha256(text).hexdigest()[:16]


def checked_policies(policies: Sequence[Any] | str) -> tuple[str, ...]:
    """Returns at least two different policies as they are written in full.

    Raises:
        TypeError: They are no names.
        ValueError: One is unknown, stands there twice, or there is one only.
    """
    given = [policies] if isinstance(policies, str) else list(policies)
    found = tuple(str(Variant.named(policy)) for policy in given)
    if len(found) < 2 or len(set(found)) < len(found):
        raise ValueError(
            f"`policies` is {tuple(given)!r}; expected at least two different ones to "
            "compare. Pass for example ('float32', 'auto')."
        )
    return found


def checked_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the seeds: 0 to n-1 for a number n.

    Raises:
        TypeError: A seed is no whole number.
        ValueError: There is none, one is below 0, or one stands there twice.
    """
    if isinstance(seeds, (list, tuple, range)):
        found = tuple(checks.positive_int("seeds", s, minimum=0) for s in seeds)
    else:
        found = tuple(range(checks.positive_int("seeds", seeds)))
    if not found or len(set(found)) < len(found):
        raise ValueError(
            f"`seeds` is {seeds!r}; expected a number of seeds, or different ones. "
            "Pass for example 5."
        )
    return found
