"""The result of `tfamp.compare`: evidence that can be printed and written up."""

import dataclasses
import os

from tfamp.comparison.evidence.evidence import Evidence
from tfamp.comparison.report.html import to_html
from tfamp.comparison.report.markdown import to_markdown
from tfamp.comparison.report.table import table


@dataclasses.dataclass(frozen=True)
class Comparison(Evidence):
    """What a comparison measured and what it comes to; `print` shows it as a table.

    Its fields are those of `Evidence`: `.verdict` is the answer for the best policy,
    `.verdicts` has each with its reason, `.runs` every figure, and `.to_json(path)`
    writes all of it.
    """

    def table(self) -> str:
        """Returns verdict, figures and ratios as text of at most 110 columns."""
        return table(self)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the report as one page that opens without a network.

        Args:
            path: File to write it to; its folder exists.

        Raises:
            ImportError: jinja2 or matplotlib is not installed.
            OSError: The file cannot be written.
        """
        return to_html(self, path)

    def to_markdown(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns a summary in Markdown, and writes it where a path is given."""
        return to_markdown(self, path)

    def __str__(self) -> str:
        """Returns the table."""
        return self.table()
