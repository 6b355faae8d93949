"""Updates of an optimizer in parts, a variable at a time.

Relies on: Keras's optimizers updating one variable and its slots in `update_step`,
and decaying weights in `_apply_weight_decay`, both looked up on the instance.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Around = Callable[[Any], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def around_each_variable(optimizers: Sequence[Any], around: Around) -> Iterator[None]:
    """Puts a context around what an update does to each variable and its slots.

    Args:
        optimizers: Those whose `apply` is called inside the block; none inside them.
        around: Gives the context for a variable, or its part on one replica.
    """

    def wrap(own: dict[str, Any], update: Any, decay: Any) -> None:
        def update_step(gradient: Any, variable: Any, *args: Any) -> Any:
            with around(variable):
                return update(gradient, variable, *args)

        def apply_weight_decay(variables: Sequence[Any]) -> None:
            for variable in variables:
                with around(variable):
                    decay([variable])

        own.update(update_step=update_step, _apply_weight_decay=apply_weight_decay)

    try:
        for each in optimizers:
            wrap(vars(each), each.update_step, each._apply_weight_decay)
        yield
    finally:
        for each in optimizers:
            vars(each).pop("update_step", None)
            vars(each).pop("_apply_weight_decay", None)
