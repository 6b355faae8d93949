"""Functions that a command names as "module:function", and how they are called."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from tfamp.records import checks


def load(text: str) -> Callable[..., Any]:
    """Returns the function that "module:function" names.

    The current folder is looked in first, and the module may import its neighbours, as
    when it is run as a script.

    Raises:
        ImportError: There is no such module.
        ValueError: The text has another form, or the module no such function.
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise ValueError(
            f"`build_model` is {text!r}; expected 'module:function', such as "
            "'recipes.train_digits:build'."
        )
    where = os.getcwd()
    if where not in sys.path:
        sys.path.insert(0, where)
    neighbours = os.path.join(where, *module_name.split(".")[:-1])
    if neighbours not in sys.path:
        sys.path.append(neighbours)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ImportError(
                f"There is no module {error.name!r} for {text!r}; expected one below "
                f"{where!r} or an installed one. Run from the folder it lies in.",
                name=error.name,
            ) from error
        raise
    found = getattr(module, name, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if inspect.isroutine(value)]
        guess = checks.did_you_mean(name, names)
        advice = f"Did you mean {guess!r}?" if guess else f"It has {tuple(names)!r}."
        raise ValueError(f"Module {module_name!r} has no function {name!r}. {advice}")
    return found


def call(function: Callable[..., Any], **offered: Any) -> Any:
    """Calls a function with those of the offered arguments that it has by name.

    Example:
        >>> call(lambda seed: seed + 1, seed=1, epochs=5)
        2
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = {
        name: value
        for name, value in offered.items()
        if name in parameters and parameters[name].kind in kinds
    }
    return function(**taken)
