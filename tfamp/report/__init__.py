"""What was measured, written up: as one HTML file, as Markdown, as a table."""

from tfamp.report.html import to_html as to_html
from tfamp.report.markdown import to_markdown as to_markdown
from tfamp.report.table import table as table
