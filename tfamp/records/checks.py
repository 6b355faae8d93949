"""Checks of arguments and optional packages, worded as errors that help.

A message may end with a page of docs/ and an anchor of it, as "lint#half-head".
"""

import difflib
import functools
import importlib
import inspect
import math
import numbers
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from tfamp.records.units import join_words

P = ParamSpec("P")
R = TypeVar("R")

# Spellings from other frameworks, too short for a likeness to be found.
_OTHER_NAMES = {
    **dict.fromkeys(("bf16", "mixed_bf16", "bf16_mixed"), "mixed_bfloat16"),
    **dict.fromkeys(("amp", "f16", "fp16", "half"), "mixed_float16"),
    **dict.fromkeys(("mixed_fp16", "16_mixed"), "mixed_float16"),
    **dict.fromkeys(("f32", "fp32"), "float32"),
}
# Packages that are not installed under the name they are imported by.
_PIP_NAMES = {
    "PIL": "pillow",
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
    "tensorflow_datasets": "tensorflow-datasets",
}

# What a line has in it that says what there was no room for.
_ON_MEMORY = re.compile(
    r"\bOOM\b|out[ _]of[ _]memory|alloc(?:at|_fail)|bad_alloc|MemoryError"
    r"|RESOURCE_?EXHAUSTED",
    re.IGNORECASE,
)


def knows_other_names(function: Callable[P, R]) -> Callable[P, R]:
    """Has a function answer an argument it lacks by the one that is probably meant."""
    names = [x for x in inspect.signature(function).parameters if x != "self"]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - names:
            meant = importlib.import_module("tfamp")._ARGUMENTS.get(name)
            meant = meant if meant in names else did_you_mean(name, names)
            advice = f"Did you mean `{meant}=`?" if meant else "Leave it out."
            known = join_words([f"`{each}`" for each in names], "and")
            raise TypeError(
                f"`{function.__name__}` has no argument `{name}`; expected {known}. "
                f"{advice}"
            )
        return function(*args, **kwargs)

    return call


def require(module: str, *, extra: str | None, purpose: str) -> types.ModuleType:
    """Imports an optional package; an ImportError says how to install it.

    `extra` of tfamp brings it, None names the package; `purpose` is who needs it, as
    the subject of a sentence with "needs".
    """
    package = module.split(".")[0]
    name = _PIP_NAMES.get(package, package)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        lacking = error.name or module
        line = f"pip install 'tfamp[{extra}]'" if extra else f"pip install {name}"
        if lacking.split(".")[0] != package:  # it is there, and not what it needs
            name = _PIP_NAMES.get(lacking, lacking)
            line = f"pip install {name}"
        text = f"{purpose} needs {name}, which is not installed. Run `{line}`."
        raise ImportError(text, name=lacking) from error


def figure(purpose: str, width: float, height: float, **how: Any) -> Any:
    """Returns an empty figure of matplotlib, its sides in inches."""
    module = require("matplotlib.figure", extra="report", purpose=purpose)
    return module.Figure(figsize=(width, height), **{"layout": "constrained", **how})


def did_you_mean(value: str, options: Iterable[str]) -> str | None:
    """Returns the option that `value` was probably meant to be, or None."""
    names = list(options)
    lowered = value.strip().lower().replace("-", "_")
    if _OTHER_NAMES.get(lowered) in names:
        return _OTHER_NAMES[lowered]
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(lowered, by_lower, n=1)
    return by_lower[close[0]] if close else None


def choice(argument: str, value: object, options: Iterable[str]) -> str:
    """Returns `value` if it is one of `options`; an error names them and the likely."""
    names = list(options)
    expected = join_words([repr(name) for name in names], "or")
    if not isinstance(value, str):
        told = f"a string: {expected}. Pass one of these names."
        raise _wrong(argument, value, told, TypeError)
    if value in names:
        return value
    guess = did_you_mean(value, names)
    advice = f"Did you mean {guess!r}?" if guess else "Pass one of these."
    raise ValueError(f"Unknown `{argument}` {value!r}; expected {expected}. {advice}")


def positive_int(argument: str, value: object, *, minimum: int = 1) -> int:
    """Returns `value` as an int of at least `minimum`, or raises."""
    expected = f"an integer of at least {minimum}. Pass a"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        told = f"{expected} whole number, as in `{argument}={max(minimum, 1)}`."
        raise _wrong(argument, value, told, TypeError)
    if int(value) < minimum:
        raise _wrong(argument, int(value), f"{expected} larger number.")
    return int(value)


def fraction(argument: str, value: object, *, closed: bool = True) -> float:
    """Returns `value` as a float in [0, 1], or between 0 and 1 if not `closed`."""
    number = _number(argument, value)
    if not (0 <= number <= 1 if closed else 0 < number < 1):
        interval = "in [0, 1]" if closed else "above 0 and below 1"
        raise _wrong(argument, number, f"a number {interval}. Pass a part of one.")
    return number


def positive(argument: str, value: object) -> float:
    """Returns `value` as a finite float above 0, or raises."""
    number = _number(argument, value)
    if not (number > 0 and math.isfinite(number)):
        told = "a finite number above 0. Pass a positive number."
        raise _wrong(argument, number, told)
    return number


def _number(argument: str, value: object) -> float:
    """Returns `value` as a float; text, booleans and arrays are type errors."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        return float(value)
    told = f"a number. Pass a float, as in `{argument}=0.5`."
    raise _wrong(argument, value, told, TypeError)


def _wrong(
    argument: str, value: object, expected: str, kind: type[Exception] = ValueError
) -> Exception:
    of_type = f", of type {type(value).__name__}" if kind is TypeError else ""
    return kind(f"`{argument}` is {value!r}{of_type}; expected {expected}")


def first_line(error: BaseException) -> str:
    """Returns the line of an error's text that tells, at most 200 characters of it."""
    lines = _lines(error)
    own = [line for line in lines if not line.startswith("Exception encountered")]
    telling = [line for line in lines if _ON_MEMORY.search(line)]
    return (telling or own or lines or [type(error).__name__])[0][:200]


def kind_and_line(error: BaseException) -> str:
    """Returns an error's class and the line of its text that tells."""
    return f"{type(error).__name__}: {first_line(error)}"


def short_error(error: BaseException) -> str:
    """Returns an error in one line: all its text, or of memory the line that tells."""
    lines = _lines(error)
    if not lines or any(map(_ON_MEMORY.search, lines)):
        return first_line(error)
    text = " ".join(" ".join(lines).split())
    return f"{type(error).__name__}: {text[:300]}{'…' * (len(text) > 300)}"


def _lines(error: BaseException) -> list[str]:
    """Returns the lines of an error's text that are not empty, without Keras's bold."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    return [line.strip() for line in text.splitlines() if line.strip()]


# setup.cfg has the same address among the project's links.
SITE = "https://tfamp.github.io/tfamp"


def address(page: str) -> str:
    """Returns the address of a page, or of a section of it behind "#"."""
    path, mark, anchor = page.partition("#")
    return f"{SITE}/{path}.html{mark}{anchor}"


def see(page: str) -> str:
    """Returns what a message ends with: no full stop, so that it can be clicked."""
    return f"See {address(page)}"


_LIBRARIES = ("tfamp", "tensorflow", "keras", "contextlib", "threading")


def level_of_user() -> int:
    """Returns the `stacklevel` of the first frame outside tfamp, Keras, TensorFlow."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "").split(".")[0]
        if module not in _LIBRARIES:
            return level
        frame, level = frame.f_back, level + 1
    return 2
