"""Keras's own global policy, kept to what tfamp has in force in each thread."""

import contextlib
import warnings
from collections.abc import Iterator

import keras

from tfamp.dtypes.in_force import IN_FORCE
from tfamp.keras_hooks import state

_warned_policies: set[str] = set()


@contextlib.contextmanager
def policy_in_force() -> Iterator[None]:
    """Has Keras's global policy be the one in force inside the block.

    `keras.utils.clear_session()` resets it, and a new thread starts without it. The
    thread that enabled tfamp keeps it; another one would not hear of `disable`.
    """
    settings = IN_FORCE.settings
    if settings is None or state.is_marked(settings):
        yield
        return
    before = state.present_policy()
    state.mark(settings, settings.policy)
    try:
        yield
    finally:
        if not IN_FORCE.owns_thread:
            state.unmark(before)


def restore_thread(before: keras.DTypePolicy | None) -> None:
    """Gives this thread the policy in force at the end of a block.

    Args:
        before: Keras's policy ahead of the block.
    """
    settings = IN_FORCE.settings
    if settings is not None and IN_FORCE.owns_thread:
        state.mark(settings, settings.policy)
    else:
        state.unmark(before)


def is_in_force(policy: str) -> bool:
    """States whether new layers come under the policy of this name."""
    settings = IN_FORCE.settings
    if settings is None:
        return False
    return policy in (settings.policy.name, IN_FORCE.present.loaded)


def warn_of_foreign_policy(policy: keras.DTypePolicy | None) -> None:
    """Warns once of a policy that other code set while tfamp was enabled."""
    name = "float32" if policy is None else policy.name
    if name in _warned_policies:
        return
    _warned_policies.add(name)
    warnings.warn(
        f"Keras's global policy was set to {name!r} by other code while tfamp was "
        "enabled, so new layers take it and tfamp's rules do not act on them. Call "
        "`tfamp.enable(...)` again, or use `tfamp.scope(...)` instead of "
        "`keras.config.set_dtype_policy`.",
        UserWarning,
        stacklevel=4,
    )


def forget_warnings() -> None:
    """Lets each warning be given once more, as after `enable`."""
    _warned_policies.clear()
