"""`Scaling`: what a measurement of replicas found, to be printed and written."""

import dataclasses
import os

from tfamp.comparison.replicas.records import Findings
from tfamp.comparison.replicas.text import table
from tfamp.records.record import TableRecord


@dataclasses.dataclass(frozen=True)
class Scaling(Findings, TableRecord):
    """What more replicas bring, and what holds them up.

    Its fields are those of `Findings`: `.verdict`, `.reason` and `.advice` are the
    answer, `.points` has each figure, `.to_json(path)` writes all of it, and
    `.to_html(path)` a page to look at.
    """

    def table(self) -> str:
        """Returns figures, verdict and advice as text of at most 110 columns."""
        return table(self)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns all of it as one HTML file, which loads nothing from elsewhere.

        Args:
            path: Where to write it too; the folder has to exist.

        Raises:
            ImportError: jinja2 or matplotlib is missing; `pip install
                'tfamp[report]'` brings both.
        """
        from tfamp.comparison.replicas import html  # jinja2 is asked for in there

        return html.to_html(self, path)
