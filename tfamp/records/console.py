"""Tables and sentences as a terminal would show them, and a progress bar."""

import contextlib
import copy
import io
import logging
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import rich.progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Columns of a terminal that nothing printed here goes beyond.
WIDTH = 110
# Of columns of a table: words are broken, or stay whole, at the left or the right.
FOLD: dict[str, Any] = {"overflow": "fold"}
WHOLE: dict[str, Any] = {"no_wrap": True}
RIGHT: dict[str, Any] = {"justify": "right", "no_wrap": True}
_LOGGER = logging.getLogger("tfamp")


def table(
    columns: Mapping[str, Mapping[str, Any]],
    rows: Iterable[Sequence[Any]],
    *,
    title: str | None = None,
    **how: Any,
) -> Table:
    """Returns a table for `text_of`: heading -> options of rich's columns, and rows.

    Texts in rows stand as they are ("x[0]" is no markup); other cells are rich's.
    """
    heading = None if title is None else Text(title, overflow="fold")
    found = Table(title=heading, title_justify="left", **how)
    for name, options in columns.items():
        found.add_column(Text(name), **options)
    for row in rows:
        found.add_row(*(Text(x) if isinstance(x, str) else x for x in row))
    return found


def text_of(*parts: Any, width: int = WIDTH) -> str:
    """Returns what a terminal shows of tables and texts, one below the other."""
    file = io.StringIO()
    # Inside a Jupyter kernel rich would display each part, and write nothing here.
    plain: dict[str, Any] = {"color_system": None, "legacy_windows": False}
    console = Console(file=file, width=width, force_jupyter=False, **plain)
    for part in parts:
        if isinstance(part, Table) and part.title:
            # Rich would break it where a narrow table ends.
            console.print(part.title)
            part = copy.copy(part)
            part.title = None
        console.print(Text(part) if isinstance(part, str) else part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def wrapped(text: str, indent: int = 0) -> list[str]:
    """Returns the lines of a sentence, all but the first indented."""
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False
    )


class _OnStandardError(logging.Handler):
    """Writes what is logged where the program has no handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(f"tfamp: {record.getMessage()}\n")


def say(text: str) -> None:
    """Logs a line that a script shows on standard error, at the level of INFO."""
    if not _LOGGER.handlers:
        _LOGGER.addHandler(_OnStandardError())
        if _LOGGER.level == logging.NOTSET:
            _LOGGER.setLevel(logging.INFO)
    _LOGGER.info(text)


@contextlib.contextmanager
def progress(
    description: str,
    total: int | None = None,
    *,
    unit: str = "elements",
    decimals: int = 0,
) -> Iterator[Callable[..., None]]:
    """Shows a bar on standard error, if that is a terminal, and takes it away again.

    Yields a function that takes the units done, and another description if need be.
    """
    # FORCE_COLOR, which Jupyter sets for all it starts, makes no file a terminal.
    is_terminal = sys.stderr.isatty()
    console = Console(stderr=True, force_terminal=None if is_terminal else False)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn(f"{{task.completed:,.{decimals}f}} {unit}"),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(
        *columns, console=console, disable=not is_terminal, transient=True
    ) as bar:
        task = bar.add_task(description, total=total)

        def update(done: float, description: str | None = None) -> None:
            bar.update(task, completed=done, description=description)

        yield update
