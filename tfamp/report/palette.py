"""One colour and one short name for each policy, the same in every plot."""

import dataclasses

from tfamp.evidence import Evidence
from tfamp.report import sentences, svg

# The colours of the style sheet, the reference's first; more policies begin anew,
# with broken lines.
NUM_COLOURS = 6
# Letters that a name may have beside a plot.
_MAX_LETTERS = 18


@dataclasses.dataclass(frozen=True)
class Look:
    """How a policy is drawn.

    Args:
        policy: As it was asked for.
        name: With what it came to.
        short: The same in few letters.
        style: Classes of the style sheet.
    """

    policy: str
    name: str
    short: str
    style: str

    @property
    def width(self) -> float:
        """Room that the short name takes, in units of a drawing."""
        return svg.LETTER * len(self.short)


def looks(evidence: Evidence) -> tuple[Look, ...]:
    """Returns the look of each policy that has a run, the reference first."""
    asked = [evidence.reference, *evidence.candidates]
    found: list[Look] = []
    for number, policy in enumerate(asked):
        style = f"c{number % NUM_COLOURS}"
        if number >= NUM_COLOURS:
            style += " broken"
        short = shortened(policy)
        if any(look.short == short for look in found):
            short = f"{short[: _MAX_LETTERS - 3]}·{number}"
        name = sentences.named(evidence, policy)
        found.append(Look(policy, name, short, style))
    return tuple(found)


def shortened(name: str) -> str:
    """Returns a name with the middle left out where it is long.

    Example:
        >>> shortened("mixed_bfloat16"), shortened("keras:mixed_bfloat16+xla")
        ('mixed_bfloat16', 'keras:mix…at16+xla')
    """
    if len(name) <= _MAX_LETTERS:
        return name
    half = _MAX_LETTERS // 2
    return f"{name[:half]}…{name[-(_MAX_LETTERS - half - 1) :]}"


def room(chosen: tuple[Look, ...]) -> float:
    """Returns the width that the longest short name takes."""
    return max((look.width for look in chosen), default=0.0)
