"""The settings under which layers are made, and the arguments they are read from."""

import dataclasses
import difflib
import itertools
import os
import re
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from tfamp.dtypes.rules import DEFAULT_RULES, Rule
from tfamp.keras_hooks.layers import Kind, update
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
    entries = _entries(keep_float32)
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


def on_top_of(keep_float32: KeepFloat32, others: KeepFloat32) -> KeepFloat32:
    """Returns the `keep_float32` argument that has the rules of two.

    "none" in the first leaves out all others.

    Example:
        >>> on_top_of(["head"], "default"), on_top_of("default", ["head"])
        (['head', 'default'], ['head'])
        >>> on_top_of("none", ["head"])
        ['none']
    """
    given = _entries(keep_float32)
    if any(isinstance(entry, str) and entry == "none" for entry in given):
        return given
    own = [e for e in given if not (isinstance(e, str) and e == "default")]
    return [*own, *_entries(others)]


def _entries(keep_float32: KeepFloat32) -> list[Any]:
    if isinstance(keep_float32, str | keras.layers.Layer) or callable(keep_float32):
        return [keep_float32]
    try:
        return list(keep_float32)
    except TypeError:
        raise TypeError(_wrong_entry(keep_float32)) from None


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
MEASURE = "measure"
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16")


class _Asking(threading.local):
    now = False  # rules may read dtypes, too


_ASKING = _Asking()


@dataclasses.dataclass(eq=False)
class PolicySettings:
    """The settings of one `enable` or `apply`, shared by all layers under it."""

    policy: keras.DTypePolicy  # that of layers that nothing else decides
    rules: RuleSet  # rules that apply under the policy's compute dtype
    # "dynamic", a number for a static scale, or None.
    loss_scale: str | float | None = "dynamic"
    # Further arguments of the loss-scale optimizer.
    loss_scale_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # The rules that the user wrote, of other policies too.
    rules_of_user: tuple[Rule, ...] = ()
    # Names of user rules that have matched some layer, or of which that was said.
    matched: set[str] = dataclasses.field(default_factory=set)
    # The layers made so far, as long as a user rule has matched none of them.
    made: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)
    # Names of user rules whose pattern is the name or path of a layer.
    exact: set[str] = dataclasses.field(default_factory=set)
    # Layers whose `call` cannot run with what a default rule decided.
    taken_back: weakref.WeakSet[Any] = dataclasses.field(
        default_factory=weakref.WeakSet
    )
    # The argument that the rules came from, of other policies too.
    keep_float32: KeepFloat32 = "default"
    # The `PrecisionPlan` that decides in the place of the rules, if any.
    plan: Any = None
    # Whether the first `fit` times the policies, and chooses.
    is_measured: bool = False
    # Whether `compile` uses XLA where it is not told; None leaves it.
    jit_compile: bool | None = None
    # What the first training does with layers of the user's that half precision
    # spoils: "keep" in float32, "warn", or None.
    check: str | None = None
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
    def open_rules(self) -> tuple[Rule, ...]:
        """The user's rules that have matched no layer yet, where they may act."""
        if not self.is_half and not self.is_measured:
            return ()
        return tuple(r for r in self.rules_of_user if r.name not in self.matched)

    @property
    def has_defaults(self) -> bool:
        """Whether heads, operations and inputs get the default treatment."""
        return self.is_half and self.rules.has_defaults

    def leave_open(self, rules: Iterable[Rule]) -> None:
        """Leaves it to others to say which of some rules match nothing."""
        self.matched.update(rule.name for rule in rules)

    def ask(self, layer: Any, *, is_finished: bool, path: str | None = None) -> None:
        """Asks the rules in turn and keeps `layer` where one matches."""
        rules = self.rules.rules
        if not is_finished:
            rules = tuple(rule for rule in rules if not rule.needs_finished_layer)
        self._ask(layer, rules, path)

    def ask_on_read(self, layer: Any) -> None:
        """Asks the rules that need the finished layer as its dtype is read.

        The constructor may not have ended, so a rule that fails or says no is asked
        again at the first call.
        """
        if _ASKING.now:
            return
        _ASKING.now = True
        try:
            self._ask(layer, (r for r in self.rules.rules if r.needs_finished_layer))
        except (RuntimeError, TypeError):  # raised at the first call, if it lasts
            return
        finally:
            _ASKING.now = False

    def _ask(self, layer: Any, rules: Iterable[Rule], path: str | None = None) -> None:
        if not self.is_half or layer in self.taken_back:
            return
        for rule in rules:
            if rule.matches(layer, path=path, is_exact=rule.name in self.exact):
                self.keep(layer, rule)
                return

    def keep(self, layer: Any, rule: Rule) -> None:
        """Keeps `layer` in float32: float32 inside, the compute dtype out."""
        update(
            layer,
            kind=Kind.FLOAT32_INSIDE,
            rule=rule.name,
            reason=rule.reason,
            output_dtype=self.compute_dtype,
            exact_inputs=True,
            applies_to=rule.applies_to,
            inner_dtype="float32" if rule.applies_to == "own" else None,
            is_propagated=False,
        )

    def under(self, policy: str) -> "PolicySettings":
        """Returns the settings that the same arguments make with another policy."""
        made = make_settings(
            policy, self.keep_float32, self.loss_scale, self.loss_scale_options
        )
        made.leave_open(made.rules_of_user)
        made.check = self.check
        return made


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
    rules = parse(keep_float32)
    options = dict(loss_scale_options or {})
    return PolicySettings(
        policy_object,
        rules.for_dtype(policy_object.compute_dtype),
        loss_scale,
        options,
        rules_of_user=rules.of_user,
        keep_float32=keep_float32,
        **fields,
    )


def named_policy(policy: Any) -> Any:
    """Returns what names the policy: for "auto" TFAMP_POLICY, where that is set.

    A policy of Keras's stands for its name.
    """
    if isinstance(policy, keras.DTypePolicy):
        return policy.name
    is_auto = isinstance(policy, str) and policy == "auto"
    return os.environ.get(VARIABLE) or policy if is_auto else policy


def choose_policy(policy: str) -> tuple[str, str, bool]:
    """Returns the policy's name, the reason for it, and whether a user named it.

    "auto" takes the environment variable TFAMP_POLICY where it is set, else what suits
    the devices here; "measure" begins in float32. An unknown name is a ValueError.
    """
    named = named_policy(policy)
    if named == MEASURE:
        why = "the first `fit` times the policies and takes the fastest"
        return "float32", why, False
    if policy == "auto" != named:
        checks.choice(VARIABLE, named, ("auto", MEASURE, *POLICIES))
        return named, f"the environment variable TFAMP_POLICY is {named!r}", True
    checks.choice("policy", named, ("auto", MEASURE, *POLICIES))
    if policy != "auto":
        return named, "named by the caller", True
    advice = devices.recommend(devices.devices())
    return advice.policy, advice.reason, False
