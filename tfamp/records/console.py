"""Tables and sentences as text of one width, as a terminal would show them."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Columns of a terminal that nothing printed here goes beyond.
WIDTH = 110
# Of columns of a table: words are broken, or stay whole, at the left or the right.
FOLD: dict[str, Any] = {"overflow": "fold"}
WHOLE: dict[str, Any] = {"no_wrap": True}
RIGHT: dict[str, Any] = {"justify": "right", "no_wrap": True}


def table(
    columns: Mapping[str, Mapping[str, Any]],
    rows: Iterable[Sequence[Any]],
    *,
    title: str | None = None,
    **how: Any,
) -> Any:
    """Returns a table for `text_of`.

    Args:
        columns: Heading -> what `add_column` of rich takes beside it.
        rows: Texts, which stand as they are ("x[0]" is no markup), or parts of rich.
        title: Above it, at the left.
        **how: What rich's `Table` takes besides.
    """
    # Here, so that `import tfamp` does not pay for it.
    from rich.table import Table
    from rich.text import Text

    heading = None if title is None else Text(title, overflow="fold")
    found = Table(title=heading, title_justify="left", **how)
    for name, options in columns.items():
        found.add_column(Text(name), **options)
    for row in rows:
        found.add_row(*(Text(x) if isinstance(x, str) else x for x in row))
    return found


def text_of(*parts: Any, width: int = WIDTH) -> str:
    """Returns what a terminal shows of tables and texts, one below the other."""
    from rich.console import Console
    from rich.text import Text

    file = io.StringIO()
    # Inside a Jupyter kernel rich would display each part, and write nothing here.
    console = Console(
        file=file,
        width=width,
        color_system=None,
        legacy_windows=False,
        force_jupyter=False,
    )
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
