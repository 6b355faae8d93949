"""Reads the `keep_float32` argument into rules."""

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import Any

import keras

from tfamp.rules.defaults import DEFAULT_RULES
from tfamp.rules.rule import Rule

KeepFloat32 = str | Sequence[Any]


@dataclasses.dataclass(frozen=True)
class RuleSet:
    """The rules of one `keep_float32`.

    Attributes:
        rules: In order; the first that matches gives its name and reason.
        has_defaults: Whether the default rules, heads and operations included,
            are among them.
    """

    rules: tuple[Rule, ...]
    has_defaults: bool

    def for_dtype(self, dtype: str) -> "RuleSet":
        """Returns the rules that apply under the compute dtype `dtype`."""
        rules = tuple(rule for rule in self.rules if dtype in rule.dtypes)
        return dataclasses.replace(self, rules=rules)

    @property
    def of_user(self) -> tuple[Rule, ...]:
        """The rules that the user wrote."""
        return tuple(r for r in self.rules if not r.name.startswith("default: "))


def parse(keep_float32: KeepFloat32) -> RuleSet:
    """Reads the `keep_float32` argument.

    Args:
        keep_float32: "default", "none", or a sequence of layer classes, class
            names, patterns that match a whole name or path, and callables
            taking a layer; the word "default" in it stands for the default
            rules.

    Raises:
        TypeError: An entry is none of these.
        ValueError: A pattern does not compile, "none" stands beside others, or
            a lone string looks like a misspelt "default" or "none".

    Example:
        >>> [rule.name for rule in parse(["Dense", "encoder/.*"]).rules]
        ["keep_float32: 'Dense'", "keep_float32: 'encoder/.*'"]
        >>> parse(["default", "Dense"]).has_defaults
        True
    """
    if isinstance(keep_float32, str):
        _refuse_misspelt(keep_float32)
        entries: list[Any] = [] if keep_float32 == "none" else [keep_float32]
    elif isinstance(keep_float32, type) or callable(keep_float32):
        entries = [keep_float32]
    else:
        try:
            entries = list(keep_float32)
        except TypeError:
            raise TypeError(_wrong_entry(keep_float32)) from None
        if "none" in [entry for entry in entries if isinstance(entry, str)]:
            raise ValueError(
                f"Clashing `keep_float32` {keep_float32!r}: 'none' stands alone. "
                "Leave 'none' out, or pass keep_float32='none'."
            )
    rules: list[Rule] = []
    for entry in entries:
        if isinstance(entry, str) and entry == "default":
            rules.extend(DEFAULT_RULES)
        else:
            rules.append(_rule_of_user(entry))
    return RuleSet(tuple(rules), any(e == "default" for e in entries if type(e) is str))


def _refuse_misspelt(word: str) -> None:
    close = difflib.get_close_matches(word, ("default", "none"), n=1, cutoff=0.75)
    if close and word not in ("default", "none"):
        raise ValueError(
            f"Unknown `keep_float32` {word!r}; expected 'default', 'none' or a "
            f"sequence of layer classes, names, patterns and callables. Did you mean "
            f"{close[0]!r}? A pattern goes into a list: [{word!r}]."
        )


def _wrong_entry(entry: Any) -> str:
    return (
        f"Cannot use {entry!r} in `keep_float32`; expected a layer class, a class "
        "name, a pattern for names or paths, or a callable taking a layer. Wrap single "
        "values in a list."
    )


def _rule_of_user(entry: Any) -> Rule:
    reason = "named in `keep_float32`"
    if isinstance(entry, str):
        try:
            pattern = re.compile(entry)
        except re.error as error:
            raise ValueError(
                f"Cannot read pattern {entry!r} in `keep_float32`: {error}. Expected a "
                "regular expression that matches a layer's whole name or path; escape "
                "special characters with a backslash."
            ) from error
        name = f"keep_float32: {entry!r}"
        return Rule(name, reason, class_name=entry, pattern=pattern)
    if isinstance(entry, type):
        if not issubclass(entry, keras.layers.Layer):
            raise TypeError(_wrong_entry(entry))
        name = f"keep_float32: {entry.__name__}"
        return Rule(name, reason, classes=(entry,))
    if isinstance(entry, keras.layers.Layer) or not callable(entry):
        raise TypeError(_wrong_entry(entry))
    label = getattr(entry, "__name__", type(entry).__name__)
    return Rule(f"keep_float32: {label}()", reason, predicate=entry)
