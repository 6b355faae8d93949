"""A progress bar for work that takes more than two seconds."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.progress

# Shorter work is over before one has read what it is.
SHOWN_AFTER_SECONDS = 2.0


@contextlib.contextmanager
def progress(
    description: str,
    total: int | None = None,
    *,
    unit: str = "elements",
    decimals: int = 0,
    console: rich.console.Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[..., None]]:
    """Shows a bar on standard error, if that is a terminal, and takes it away again.

    Yields a function that takes the number of units done so far, of `total` if that is
    known, and another description where that changes.
    """
    if console is None:
        # FORCE_COLOR, which Jupyter sets for all it starts, makes no file a terminal.
        is_forced = None if sys.stderr.isatty() else False
        console = rich.console.Console(stderr=True, force_terminal=is_forced)
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn(f"{{task.completed:,.{decimals}f}} {unit}"),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("left" if total else ""),
        rich.progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        speed_estimate_period=3600,
    )
    task = bar.add_task(description, total=total)
    started = clock()
    is_shown = False

    def update(done: float, description: str | None = None) -> None:
        nonlocal is_shown
        late = clock() - started >= SHOWN_AFTER_SECONDS
        if late and not is_shown and console.is_terminal:
            is_shown = True
            bar.start()
        bar.update(task, completed=done, description=description)

    try:
        yield update
    finally:
        if is_shown:
            bar.stop()
