"""The settings under which layers are made."""

import dataclasses
import itertools
import os
import weakref
from collections.abc import Mapping
from typing import Any

import keras

from tfamp.dtypes.keep_float32 import KeepFloat32, RuleSet, parse
from tfamp.machine import devices
from tfamp.records import checks
from tfamp.records.formats import HALF

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16")


@dataclasses.dataclass(eq=False)
class PolicySettings:
    """The settings of one `enable` or `apply`, shared by all layers under it.

    A layer holds its settings, so the hooks can stay exactly as long as any
    managed layer lives.

    Attributes:
        policy: The policy object of layers that nothing else decides.
        rules: Rules that apply under the policy's compute dtype.
        loss_scale: "dynamic", a number for a static scale, or None.
        loss_scale_options: Further arguments of the loss-scale optimizer.
        matched: Names of user rules that have matched some layer.
        exact: Names of user rules whose pattern is the name or path of a layer.
        taken_back: Layers whose `call` cannot run with what a default rule decided.
        float32_policy: The policy given to kept layers. One object, so that
            sublayers that are handed it count as given a dtype.
        number: Tells settings apart when they are gone.
    """

    policy: keras.DTypePolicy
    rules: RuleSet
    loss_scale: str | float | None = "dynamic"
    loss_scale_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    matched: set[str] = dataclasses.field(default_factory=set)
    exact: set[str] = dataclasses.field(default_factory=set)
    taken_back: weakref.WeakSet[Any] = dataclasses.field(
        default_factory=weakref.WeakSet
    )
    float32_policy: keras.DTypePolicy = dataclasses.field(
        default_factory=lambda: keras.DTypePolicy("float32")
    )
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


def make_settings(
    policy: str,
    keep_float32: KeepFloat32 = "default",
    loss_scale: str | float | None = "dynamic",
    loss_scale_options: Mapping[str, Any] | None = None,
) -> PolicySettings:
    """Returns the settings for a policy name and a `keep_float32` argument."""
    policy_object = keras.DTypePolicy(policy)
    rules = parse(keep_float32).for_dtype(policy_object.compute_dtype)
    return PolicySettings(
        policy_object, rules, loss_scale, dict(loss_scale_options or {})
    )


def choose_policy(policy: str) -> tuple[str, str, bool]:
    """Returns the policy's name, the reason for it, and whether a user named it.

    Args:
        policy: A name, or "auto": then the environment variable TFAMP_POLICY
            where it is set, else what suits the devices here.

    Raises:
        ValueError: The name is unknown.
    """
    named = os.environ.get("TFAMP_POLICY", "auto")
    if policy == "auto" and named != "auto":
        checks.choice("TFAMP_POLICY", named, ("auto", *POLICIES))
        return named, f"the environment variable TFAMP_POLICY is {named!r}", True
    checks.choice("policy", policy, ("auto", *POLICIES))
    if policy != "auto":
        return policy, "named by the caller", True
    advice = devices.recommend(devices.devices())
    return advice.policy, advice.reason, False
