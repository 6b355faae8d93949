"""The progress of a comparison: a bar with the time left on a terminal."""

import contextlib
from collections.abc import Callable, Iterator

import rich.console
import rich.progress


@contextlib.contextmanager
def bar(
    num_runs: int, *, console: rich.console.Console | None = None
) -> Iterator[Callable[[float, str], None]]:
    """Shows how many runs are done and how long the rest will take.

    Args:
        num_runs: Runs of the comparison.
        console: Where to draw; None for standard error. Nothing is drawn where that is
            no terminal.

    Yields:
        A function of the runs done, the present one in part, and what it is called.
    """
    console = console or rich.console.Console(stderr=True)
    progress = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn(f"{{task.completed:.1f}} of {num_runs} runs"),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("left"),
        rich.progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=3600,
    )
    with progress:
        task = progress.add_task("Starting", total=num_runs)
        yield lambda done, what: progress.update(task, completed=done, description=what)
