"""The settings under which layers are made: policy, rules, loss scale."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tfamp.dtypes.rules import DEFAULT_RULES, FOUND_RULES, KeepFloat32, Rule, parse
from tfamp.keras_hooks import layers
from tfamp.keras_hooks.in_force import IN_FORCE, NOT_ENABLED
from tfamp.keras_hooks.layers import Kind
from tfamp.machine import devices
from tfamp.records import checks
from tfamp.records.formats import HALF

VARIABLE = "TFAMP_POLICY"
MEASURE = "measure"
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16")


@dataclasses.dataclass(eq=False)
class PolicySettings:
    """The settings of one `enable` or `apply`, shared by all layers under it."""

    policy: keras.DTypePolicy  # that of layers that nothing else decides
    rules_of_user: tuple[Rule, ...] = ()
    with_defaults: bool = True  # whether the default rules are not left out
    loss_scale: str | float | None = "dynamic"  # or a static scale, or none
    # Further arguments of the loss-scale optimizer.
    loss_scale_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # The `PrecisionPlan` that decides in the place of the rules, if any.
    plan: Any = None
    # Whether `compile` uses XLA where it is not told; None leaves it.
    jit_compile: bool | None = None
    # What was measured before this was decided, as plain JSON values.
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_measured: bool = False  # whether the first `fit` times the policies, and chooses
    # What the first training does with layers of the user's that half precision
    # spoils: "keep" in float32, "warn", or None.
    check: str | None = None
    # Names of user rules that have matched some layer, or of which that was said.
    matched: set[str] = dataclasses.field(default_factory=set)
    # The layers made so far, as long as a user rule has matched none of them, and those
    # whose `call` cannot run with what a default rule decided.
    made: Any = dataclasses.field(default_factory=weakref.WeakSet)
    taken_back: Any = dataclasses.field(default_factory=weakref.WeakSet)
    # The layers that could not run in half precision, by class and reason.
    told: Any = dataclasses.field(default_factory=collections.Counter)
    # Tells settings apart when they are gone.
    number: int = dataclasses.field(default_factory=itertools.count(1).__next__)

    @property
    def compute_dtype(self) -> str:
        """The dtype in which ordinary layers compute."""
        return self.policy.compute_dtype

    @functools.cached_property
    def is_half(self) -> bool:
        """Whether ordinary layers compute in half precision."""
        return self.compute_dtype in HALF

    @property
    def has_defaults(self) -> bool:
        """Whether heads, operations and inputs get the default treatment."""
        return self.is_half and self.with_defaults

    @functools.cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that act under this policy, those of the user first."""
        known = (*self.rules_of_user, *(DEFAULT_RULES if self.with_defaults else ()))
        return tuple(rule for rule in known if self.compute_dtype in rule.dtypes)

    @property
    def open_rules(self) -> tuple[Rule, ...]:
        """The user's rules that have matched no layer yet, where they may act."""
        if not self.rules_of_user or not (self.is_half or self.is_measured):
            return ()
        return tuple(r for r in self.rules_of_user if r.name not in self.matched)

    def ask(self, layer: Any, path: str | None = None) -> None:
        """Asks the rules in turn and keeps `layer` where one matches."""
        known = self.rules if layer not in self.taken_back else ()
        for rule in known:
            if rule.matches(layer, path=path):
                self.keep(layer, rule)
                return

    def keep(self, layer: Any, rule: Rule) -> None:
        """Keeps `layer` in float32: float32 inside, the compute dtype out."""
        how = rule.name, rule.reason, rule.applies_to
        layers.keep(layer, Kind.FLOAT32_INSIDE, *how)

    def keep_found(self, layer: Any, rule: str) -> None:
        """Keeps a layer by a rule of `FOUND_RULES`, unless it could not run so."""
        if layer not in self.taken_back:
            self.keep(layer, FOUND_RULES[rule])

    def under(
        self, policy: str, keep_float32: KeepFloat32 = "default"
    ) -> "PolicySettings":
        """Returns settings for another policy, with further rules on top of these.

        "none" among those leaves these out. It is said elsewhere which match nothing.
        """
        rules, with_defaults = parse(keep_float32)
        if with_defaults:
            rules, with_defaults = (*rules, *self.rules_of_user), self.with_defaults
        scale = self.loss_scale, self.loss_scale_options
        made = PolicySettings(keras.DTypePolicy(policy), rules, with_defaults, *scale)
        made.matched.update(rule.name for rule in self.rules_of_user)
        made.check = self.check
        return made


def make_settings(
    policy: str,
    keep_float32: KeepFloat32 = "default",
    loss_scale: str | float | None = "dynamic",
    loss_scale_options: Mapping[str, Any] | None = None,
    **fields: Any,
) -> PolicySettings:
    """Returns the settings for a policy name and a `keep_float32` argument."""
    rules, with_defaults = parse(keep_float32)
    scale = loss_scale, dict(loss_scale_options or {})
    return PolicySettings(
        keras.DTypePolicy(policy), rules, with_defaults, *scale, **fields
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
    is_variable = policy == "auto" != named
    name = VARIABLE if is_variable else "policy"
    checks.choice(name, named, ("auto", MEASURE, *POLICIES))
    if named == MEASURE:
        why = "the first `fit` times the policies and takes the fastest"
        return "float32", why, False
    if is_variable:
        return named, f"the environment variable TFAMP_POLICY is {named!r}", True
    if policy != "auto":
        return named, "named by the caller", True
    advice = devices.recommend(devices.devices())
    return advice.policy, advice.reason, False


@contextlib.contextmanager
def stock_policy(policy: str | keras.DTypePolicy) -> Iterator[None]:
    """Leaves layers that are made inside the block to Keras, under its own policy."""
    with IN_FORCE.block(settings=None, why=NOT_ENABLED):
        keras.config.set_dtype_policy(policy)
        yield
