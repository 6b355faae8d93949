"""One rule of the linter: its name, what it has to see, and how its findings read."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from tfamp.numerics.lint.subject import Subject
from tfamp.records.findings import Finding, Severity

# What a rule may have to see besides the layers.
Need = Literal["graph", "data", "loss", "optimizer"]
_DOCUMENTATION = "docs/lint.md"


class Found(NamedTuple):
    """What a rule found, without what all its findings share.

    Attributes:
        severity: "error", "warning" or "note".
        message: What was found, with the figure, and what follows from it.
        remedy: What to do.
        layer: Path of the layer it is about, None if it is about none.
        figure: The number that decided, None where there is no such number.
        details: More numbers behind the message.
    """

    severity: Severity
    message: str
    remedy: str
    layer: str | None = None
    figure: float | None = None
    details: dict[str, int | float | str | None] | None = None


class CannotTellError(Exception):
    """Raised by a rule that could not look; its text is the reason."""


@dataclasses.dataclass(frozen=True)
class LintRule:
    """A rule of the linter.

    Args:
        id: Its name, in words joined by "-"; its section in the documentation.
        needs: What it has to see besides the layers.
        check: Yields what it finds in a subject.
    """

    id: str
    needs: tuple[Need, ...]
    check: Callable[[Subject], Iterator[Found]]

    @property
    def documentation(self) -> str:
        """Where the rule is explained."""
        return f"{_DOCUMENTATION}#{self.id}"

    def findings(self, subject: Subject) -> list[Finding]:
        """Returns what the rule finds, each with a link to its explanation.

        Raises:
            CannotTellError: Something that the rule has to see is missing.
        """
        for need in self.needs:
            if need in subject.missing:
                raise CannotTellError(subject.missing[need])
        return [self._finding(found) for found in self.check(subject)]

    def _finding(self, found: Found) -> Finding:
        return Finding(
            self.id,
            found.severity,
            found.message,
            f"{found.remedy} See {self.documentation}.",
            layer=found.layer,
            figure=None if found.figure is None else float(found.figure),
            details={
                **(found.details or {}),
                "documentation": self.documentation,
            },
        )


def rule(
    id: str, *, needs: tuple[Need, ...] = ()
) -> Callable[[Callable[[Subject], Iterator[Found]]], LintRule]:
    """Makes a rule of the function below it.

    Args:
        id: The rule's name.
        needs: What it has to see besides the layers.
    """
    return lambda check: LintRule(id, needs, check)
