"""How often a snapshot is taken: as often as is needed, and as rarely as is cheap."""

import math


def calls_to_next(
    snapshot_seconds: float, call_seconds: float, num_kept: int, *, max_share: float
) -> int:
    """Returns after how many calls of the training function the next snapshot is due.

    With at most `num_kept` calls between two snapshots, the batches that are kept lead
    from the last one to any failing step. Where that costs more than `max_share` of the
    time, snapshots are rarer.

    Args:
        snapshot_seconds: What a snapshot costs.
        call_seconds: What a call takes.
        num_kept: Calls whose batches are kept, at least 1.
        max_share: Part of the time that snapshots may take.

    Example:
        >>> calls_to_next(0.001, 0.1, 8, max_share=0.01)
        8
        >>> calls_to_next(0.5, 0.1, 8, max_share=0.01)
        500
    """
    if not call_seconds > 0:
        return num_kept
    return max(num_kept, math.ceil(snapshot_seconds / (max_share * call_seconds)))
