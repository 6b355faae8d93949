"""What a recipe's `--guard` does: failures are recorded, named and recovered from."""

import types
from pathlib import Path
from typing import Any

import keras
from absl import flags

import comparing
import tfamp
from tfamp.callbacks import FlightRecorder, NanRecovery


def define_flags(values: flags.FlagValues) -> None:
    """Adds the flag `--guard`, which no comparison takes."""
    flags.DEFINE_string(
        "guard",
        None,
        "Folder that gets good snapshots, and a bundle of each failing step, which "
        "`tfamp replay` repeats. Training goes back and on by itself. Each run wants a "
        "folder of its own.",
        flag_values=values,
    )
    comparing.leave_out(values, "guard", "a run that was mended is not comparable")


class Guard:
    """The callbacks that `--guard` adds to a `fit`, and what they did.

    Args:
        settings: Values of the flags.
        name: Of this `fit`, where a recipe has several.

    Attributes:
        callbacks: For `fit`; none without the flag.
    """

    def __init__(self, settings: types.SimpleNamespace, name: str = "") -> None:
        self.callbacks: list[keras.callbacks.Callback] = []
        if settings.guard is None:
            return
        # Several policies are trained one after the other.
        folder = Path(settings.guard, tfamp.status().policy, name)
        self._recorder = FlightRecorder(folder / "bundles")
        # A bad batch comes again in each epoch.
        budget = settings.epochs + 3
        # These models are small, and so is what a snapshot costs.
        self._recovery = NanRecovery(
            folder / "good", every_seconds=0, max_recoveries=budget
        )
        self.callbacks = [self._recorder, self._recovery]

    def report(self) -> dict[str, Any]:
        """Prints what was recovered from, and returns it for the line of JSON."""
        if not self.callbacks:
            return {}
        for recovery in self._recovery.recoveries:
            print(recovery.line())
        for bundle in self._recorder.bundles:
            print(f"Replay a failing step: tfamp replay {bundle}")
        return {
            "recoveries": [each.to_dict() for each in self._recovery.recoveries],
            "bundles": list(self._recorder.bundles),
        }
