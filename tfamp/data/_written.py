"""A pipeline as it was written down: a source, and stages in the order of the calls."""

import dataclasses
from typing import TypeVar

from tfamp.data._sources import Source
from tfamp.data._stages import Stage

# Dropping elements for one reason and then for another is dropping for both.
_REPEATABLE = {"filter"}

WrittenType = TypeVar("WrittenType", bound="Written")


@dataclasses.dataclass(frozen=True)
class Written:
    """A source and stages.

    Attributes:
        source: What a `from_...` method made; not made by hand.
        stages: The stages so far, as they were written.
    """

    source: Source
    stages: tuple[Stage, ...] = ()

    def _with(self: WrittenType, stage: Stage) -> WrittenType:
        is_there = any(type(stage) is type(other) for other in self.stages)
        if is_there and stage.name not in _REPEATABLE:
            advice = (
                "Call both functions from one"
                if stage.name == "map"
                else "Keep the one that is meant"
            )
            raise ValueError(
                f"`.{stage.name}` came twice; expected each stage once, since the "
                f"order they run in does not follow the order of the calls. {advice}."
            )
        return dataclasses.replace(self, stages=(*self.stages, stage))
