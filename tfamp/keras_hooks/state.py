"""Keras's global policy, which `clear_session` and new threads reset.

Relies on: `global_state` keeping the policy and anything else by name, per
thread, and `clear_session` dropping all of it at once.
"""

from typing import Any

import keras
from keras.src.backend.common import global_state

_MARK = "tfamp_lease"
_POLICY = "dtype_policy"


def is_marked(settings: Any) -> bool:
    """Returns whether this thread's state still carries the mark of `settings`."""
    return global_state.get_global_attribute(_MARK) is settings


def mark(settings: Any, policy: keras.DTypePolicy) -> None:
    """Sets this thread's global policy and marks the state as `settings`'s."""
    global_state.set_global_attribute(_MARK, settings)
    global_state.set_global_attribute(_POLICY, policy)


def unmark(policy: keras.DTypePolicy | None) -> None:
    """Takes the mark away and puts back the `policy` from before."""
    global_state.set_global_attribute(_MARK, None)
    global_state.set_global_attribute(_POLICY, policy)


def present_policy() -> keras.DTypePolicy | None:
    """Returns this thread's global policy object, None where none was set."""
    return global_state.get_global_attribute(_POLICY)
