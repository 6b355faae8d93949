"""What scaling in the tape needs of `tf.GradientTape`.

Relies on: a tape deciding by `_persistent` as it is entered whether it can be asked
again; one that cannot letting go of `_tape` at its first `gradient`, and of its place
on the stack of tapes by `_pop_tape`; `record.could_possibly_record` telling whether any
tape of the thread records.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from tfamp.keras_hooks.backend import HALF
from tfamp.keras_hooks.patches import Patch, like

_ONCE = "_tfamp_asked_once"
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "If", "While", "StatelessWhile")


def patches(wrap_gradient: Callable[[Callable[..., Any]], Any]) -> list[Patch]:
    """Returns the patches on a tape; `wrap_gradient` makes the new `gradient`."""

    def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def __init__(
            self: Any, persistent: bool = False, watch_accessed_variables: bool = True
        ) -> None:
            # It costs no memory where a tape around keeps what this one keeps. Others
            # stay as they are: loops have another gradient under persistent tapes.
            once = not persistent and is_recording()
            original(self, persistent or once, watch_accessed_variables)
            setattr(self, _ONCE, once)

        return __init__

    return [
        Patch(tf.GradientTape, "__init__", wrap_init),
        Patch(tf.GradientTape, "gradient", wrap_gradient),
    ]


def is_recording() -> bool:
    """Returns whether any gradient tape of this thread records."""
    return bool(record.could_possibly_record())


def can_be_asked_again(tape: tf.GradientTape) -> bool:
    """Returns whether more than one gradient can be computed inside `asked`."""
    return bool(tape._persistent)


def may_compute_in_half() -> bool:
    """Returns whether a function is being traced that may compute in half precision.

    What it calls as a function of its own is not looked into, and may.
    """
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return any(
        operation.type in _CALLS or any(t.dtype in HALF for t in operation.outputs)
        for operation in graph.get_operations()
    )


@contextlib.contextmanager
def asked(tape: tf.GradientTape) -> Iterator[None]:
    """Uses a tape up, as one that is not persistent is by its first gradient."""
    if not getattr(tape, _ONCE, False) or tape._tape is None:
        yield
        return
    if tape._recording:
        tape._pop_tape()
    yield
    tape._watched_variables = tape._tape.watched_variables()
    tape._tape, tape._persistent = None, False
