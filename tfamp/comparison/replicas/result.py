"""`Scaling`: what a measurement of replicas found, to be printed and written."""

import dataclasses

from tfamp.comparison.replicas.records import Findings
from tfamp.comparison.replicas.text import table
from tfamp.records.record import TableRecord


@dataclasses.dataclass(frozen=True)
class Scaling(Findings, TableRecord):
    """What more replicas bring, and what holds them up.

    Its fields are those of `Findings`: `.verdict`, `.reason` and `.advice` are the
    answer, `.points` has each figure, and `.to_json(path)` writes all of it.
    """

    def table(self) -> str:
        """Returns figures, verdict and advice as text of at most 110 columns."""
        return table(self)
