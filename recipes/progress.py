"""A progress bar for `fit`, and plain lines where output goes to a file."""

import sys
import time
from typing import IO, Any

import keras
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as Remaining


class TrainingProgress(keras.callbacks.Callback):
    """Shows one bar over all epochs on a terminal, one line an epoch elsewhere.

    It also keeps the seconds of each epoch's training steps, evaluation left out.
    Pass `verbose=0` to `fit`.

    Args:
        title: What is being trained, at the start of every line.
        stream: Where to write; standard output if None.
    """

    def __init__(self, title: str, stream: IO[str] | None = None):
        super().__init__()
        self.title = title
        self.epoch_seconds: list[float] = []
        self._console = Console(file=stream or sys.stdout, highlight=False)
        self._bar: Progress | None = None
        self._epoch = 0
        self._started = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the bar if there is a terminal to draw it on."""
        self.epoch_seconds = []
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                Remaining(),
                console=self._console,
            )
            steps = (self.params["steps"] or 0) * self.params["epochs"]
            self._task = self._bar.add_task(self.title, total=steps or None)
            self._bar.start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the epoch's clock."""
        self._epoch = epoch
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Moves the bar."""
        if self._bar is not None:
            steps = self.params["steps"] or 0
            self._bar.update(self._task, completed=self._epoch * steps + batch + 1)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Shows the epoch's metrics."""
        self._stop_clock(epoch)
        metrics = "  ".join(f"{key} {value:.4f}" for key, value in (logs or {}).items())
        text = f"{self.title}  epoch {epoch + 1}/{self.params['epochs']}  {metrics}"
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            print(text, file=self._console.file, flush=True)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Stops the epoch's clock: its metrics were read, so the device is done."""
        self._stop_clock(self._epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _stop_clock(self, epoch: int) -> None:
        if len(self.epoch_seconds) == epoch:
            self.epoch_seconds.append(time.perf_counter() - self._started)
