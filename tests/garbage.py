"""Waits for what nobody holds to be gone."""

import gc
import time
import weakref


def holders_of(reference: weakref.ref) -> list[str]:
    """Returns what holds an object that should be gone, nothing if it is.

    A collection does nothing while another thread's is under way, so it is repeated.
    """
    for _ in range(50):
        gc.collect()
        if reference() is None:
            return []
        time.sleep(0.02)
    found = gc.get_referrers(reference())
    return [f"{type(each).__name__}: {str(each)[:200]}" for each in found]
