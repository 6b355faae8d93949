"""What all trials of a search have in common, as a file that their processes read."""

import dataclasses
from typing import ClassVar

from tfamp.records.record import Record

# What a trial leaves: facts before it trains, and its answer.
FACTS, ANSWER = "facts.json", "answer.json"


@dataclasses.dataclass(frozen=True)
class Plan(Record):
    """The settings of a search that its trials need.

    Args:
        title: What is trained.
        steps: Steps to time, at least.
        allowed_bytes: What a trial may hold; None where there is no limit.
        target_batch_size: Examples of one update, None where that is left open.
        data_batch_size: Examples of a batch of the data; None where only
            `build_model` or a function knows it.
        num_examples: Examples of the data, None where that is not known.
    """

    FILE: ClassVar[str] = "plan.json"

    title: str
    steps: int
    allowed_bytes: int | None = None
    target_batch_size: int | None = None
    data_batch_size: int | None = None
    num_examples: int | None = None
