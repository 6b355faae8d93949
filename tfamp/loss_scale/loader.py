"""What an optimizer takes of a file's scale and counters, which may be another's."""

from typing import NamedTuple

from tfamp.loss_scale.tally import STATIC, STATIC_BORN, Counters, Levels, Snapshot


class ScaleOfFile(NamedTuple):
    """Keras's two variables of a loss scale, as a file has them."""

    good_steps: int
    scale: float


def without_counters(
    own: Snapshot, found: ScaleOfFile, *, is_dynamic: bool
) -> Snapshot:
    """Returns the values after loading a file of stock Keras, which has no counters.

    Its scale is a dynamic one; a static optimizer keeps its own.

    Args:
        own: The values before.
        found: The scale in the file.
        is_dynamic: Whether the optimizer was made with a dynamic scale.
    """
    if not is_dynamic:
        return own
    counters = own.counters._replace(is_probing=0)  # there is a scale now
    return own._replace(
        scale=found.scale, good_steps=found.good_steps, counters=counters
    )


def with_counters(
    own: Snapshot,
    found: ScaleOfFile,
    counters: Counters,
    levels: Levels,
    *,
    is_dynamic: bool,
    has_window: bool,
) -> Snapshot:
    """Returns the values after loading a file that tfamp wrote.

    A scale goes from a dynamic optimizer to a dynamic one and, where it was set by
    hand, from a static one to a static one; the counters go to any.

    Args:
        own: The values before.
        found: The scale in the file.
        counters: The counters in the file.
        levels: The real numbers in the file.
        is_dynamic: Whether the optimizer was made with a dynamic scale.
        has_window: Whether the file's window of accumulation can be gone on with.
    """
    if not has_window:
        counters = counters._replace(microbatches=0)
        levels = levels._replace(weight=0.0)
    was_dynamic = counters.is_frozen not in STATIC_BORN
    if was_dynamic != is_dynamic:
        kept = own.counters
        counters = counters._replace(
            is_frozen=kept.is_frozen, is_probing=kept.is_probing, overflows=0, streak=0
        )
        levels = levels._replace(good_scale=0.0, peak=0.0, scale_before=own.scale)
        return Snapshot(own.scale, own.good_steps, counters, levels)
    scale = own.scale if counters.is_frozen == STATIC else found.scale
    return Snapshot(scale, found.good_steps, counters, levels)
