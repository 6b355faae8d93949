"""A progress bar for passes over data that take more than two seconds."""

import contextlib
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
    console: rich.console.Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[int], None]]:
    """Shows a bar on standard error, if that is a terminal, and takes it away again.

    Args:
        description: What is being done, as "Reading labels".
        total: How many units there are, None where unknown.
        unit: What is counted.
        console: Where to draw; None for standard error.
        clock: Gives seconds.

    Yields:
        A function that takes the number of units done so far.
    """
    console = console or rich.console.Console(stderr=True)
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn(f"{{task.completed:,.0f}} {unit}"),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(description, total=total)
    started = clock()
    is_shown = False

    def update(done: int) -> None:
        nonlocal is_shown
        late = clock() - started >= SHOWN_AFTER_SECONDS
        if late and not is_shown and console.is_terminal:
            is_shown = True
            bar.start()
        bar.update(task, completed=done)

    try:
        yield update
    finally:
        if is_shown:
            bar.stop()
