"""The settings under which layers are made, and the arguments they are read from."""

import dataclasses
import difflib
import itertools
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfamp.dtypes.rules import DEFAULT_RULES, Rule
from tfamp.keras_hooks.variables import READ_HOOKS
from tfamp.machine import devices
from tfamp.records import checks
from tfamp.records.formats import HALF

KeepFloat32 = str | Sequence[Any]


@dataclasses.dataclass(frozen=True)
class RuleSet:
    """The rules of one `keep_float32`."""

    # In order; the first that matches gives its name and reason.
    rules: tuple[Rule, ...]
    # Whether the default rules, heads and operations included, are among them.
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

    What it names comes on top of the default rules: naming one layer never takes the
    others' safety away. What is the name or path of a layer is no pattern for others.
    "none" in a sequence leaves the default rules out; "default" changes nothing.

    Raises:
        TypeError: An entry is no layer, class, text or callable.
        ValueError: A pattern does not compile, "none" stands beside "default", or
            a lone string looks like a misspelt one of the two.

    Example:
        >>> rules = parse(["Dense", "encoder/.*"])
        >>> [rule.name for rule in rules.of_user], rules.has_defaults
        (["keep_float32: 'Dense'", "keep_float32: 'encoder/.*'"], True)
        >>> parse(["none", "Dense"]).has_defaults
        False
    """
    if isinstance(keep_float32, str):
        _refuse_misspelt(keep_float32)
        entries: list[Any] = [keep_float32]
    elif isinstance(keep_float32, keras.layers.Layer) or callable(keep_float32):
        entries = [keep_float32]
    else:
        try:
            entries = list(keep_float32)
        except TypeError:
            raise TypeError(_wrong_entry(keep_float32)) from None
    words = {entry for entry in entries if isinstance(entry, str)}
    if {"none", "default"} <= words:
        raise ValueError(
            f"Clashing `keep_float32` {keep_float32!r}: 'none' leaves the default "
            "rules out, and 'default' stands for them. Leave one of the two out."
        )
    has_defaults = "none" not in words
    rules = [
        _rule_of_user(entry)
        for entry in entries
        if not (isinstance(entry, str) and entry in ("none", "default"))
    ]
    return RuleSet((*rules, *(DEFAULT_RULES if has_defaults else ())), has_defaults)


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
        "name, a layer, a pattern for names or paths, or a callable taking a layer. "
        "Wrap single values in a list."
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
                "special characters with a backslash, or pass the layer itself."
            ) from error
        name = f"keep_float32: {entry!r}"
        return Rule(name, reason, class_name=entry, pattern=pattern)
    if isinstance(entry, type):
        if not issubclass(entry, keras.layers.Layer):
            raise TypeError(_wrong_entry(entry))
        name = f"keep_float32: {entry.__name__}"
        return Rule(name, reason, classes=(entry,))
    if isinstance(entry, keras.layers.Layer):
        name = f"keep_float32: layer {entry.name!r}"
        return Rule(name, reason, predicate=lambda layer: layer is entry)
    if not callable(entry):
        raise TypeError(_wrong_entry(entry))
    label = getattr(entry, "__name__", type(entry).__name__)
    return Rule(f"keep_float32: {label}()", reason, predicate=entry)


VARIABLE = "TFAMP_POLICY"
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16")


@dataclasses.dataclass(eq=False)
class PolicySettings:
    """The settings of one `enable` or `apply`, shared by all layers under it.

    A layer holds its settings, so the hooks can stay exactly as long as any
    managed layer lives.
    """

    policy: keras.DTypePolicy  # the policy object of layers that nothing else decides
    rules: RuleSet  # rules that apply under the policy's compute dtype
    # "dynamic", a number for a static scale, or None.
    loss_scale: str | float | None = "dynamic"
    # Further arguments of the loss-scale optimizer.
    loss_scale_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Names of user rules that have matched some layer.
    matched: set[str] = dataclasses.field(default_factory=set)
    # Names of user rules whose pattern is the name or path of a layer.
    exact: set[str] = dataclasses.field(default_factory=set)
    # Layers whose `call` cannot run with what a default rule decided.
    taken_back: weakref.WeakSet[Any] = dataclasses.field(
        default_factory=weakref.WeakSet
    )
    # The policy given to kept layers. One object, so that sublayers that are handed it
    # count as given a dtype.
    float32_policy: keras.DTypePolicy = dataclasses.field(
        default_factory=lambda: keras.DTypePolicy("float32")
    )
    # The argument that the rules came from, of other policies too.
    keep_float32: KeepFloat32 = "default"
    # The `PrecisionPlan` that decides in the place of the rules, if any.
    plan: Any = None
    # "measure" where the first `fit` times the policies, "look up" where it takes what
    # an earlier run has measured; "" where it is chosen.
    chosen_at_fit: str = ""
    # Whether `compile` uses XLA where it is not told; None leaves it.
    jit_compile: bool | None = None
    # What was measured before this was decided, as plain JSON values.
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Tells settings apart when they are gone.
    number: int = dataclasses.field(default_factory=itertools.count(1).__next__)

    @property
    def compute_dtype(self) -> str:
        """The dtype in which ordinary layers compute."""
        return self.policy.compute_dtype

    @property
    def is_half(self) -> bool:
        """Whether ordinary layers compute in half precision."""
        return self.compute_dtype in HALF

    @property
    def has_defaults(self) -> bool:
        """Whether heads, operations and inputs get the default treatment."""
        return self.is_half and self.rules.has_defaults

    def policies(self) -> dict[str, keras.DTypePolicy]:
        """Returns the policy objects that layers are to share, by name."""
        return {each.name: each for each in (self.policy, self.float32_policy)}

    def under(self, policy: str) -> "PolicySettings":
        """Returns the settings that the same arguments make with another policy."""
        return make_settings(
            policy, self.keep_float32, self.loss_scale, self.loss_scale_options
        )


def make_settings(
    policy: str,
    keep_float32: KeepFloat32 = "default",
    loss_scale: str | float | None = "dynamic",
    loss_scale_options: Mapping[str, Any] | None = None,
    **fields: Any,
) -> PolicySettings:
    """Returns the settings for a policy name and a `keep_float32` argument.

    Further `fields` are those of `PolicySettings`.
    """
    policy_object = keras.DTypePolicy(policy)
    rules = parse(keep_float32).for_dtype(policy_object.compute_dtype)
    options = dict(loss_scale_options or {})
    settings = PolicySettings(
        policy_object, rules, loss_scale, options, keep_float32=keep_float32, **fields
    )
    if options.get("reduce_dtype") == "auto":  # also in loops with a plain optimizer
        READ_HOOKS.hold(settings)
    return settings


def choose_policy(policy: str) -> tuple[str, str, bool]:
    """Returns the policy's name, the reason for it, and whether a user named it.

    "auto" takes the environment variable TFAMP_POLICY where it is set, else what suits
    the devices here. An unknown name is a ValueError.
    """
    named = os.environ.get(VARIABLE, "auto")
    if policy == "auto" and named != "auto":
        checks.choice(VARIABLE, named, ("auto", *POLICIES))
        return named, f"the environment variable TFAMP_POLICY is {named!r}", True
    checks.choice("policy", policy, ("auto", *POLICIES))
    if policy != "auto":
        return policy, "named by the caller", True
    advice = devices.recommend(devices.devices())
    return advice.policy, advice.reason, False
