"""The settings under which layers are made, and which of them are in force.

`enable` acts on the whole process. A `scope`, and the loading of a file, act on the
thread or task that runs their block, so two threads never see each other's. Keras's own
global policy, which every thread has of its own, says what is in force.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras

from tfamp.dtypes.rules import DEFAULT_RULES, EXACT_RULE, KeepFloat32, Rule, parse
from tfamp.keras_hooks import layers
from tfamp.keras_hooks.layers import Kind, update
from tfamp.machine import devices
from tfamp.records import checks
from tfamp.records.formats import HALF

VARIABLE = "TFAMP_POLICY"
MEASURE = "measure"
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16")
NOT_ENABLED = "tfamp is not enabled"


@dataclasses.dataclass(eq=False)
class PolicySettings:
    """The settings of one `enable` or `apply`, shared by all layers under it."""

    policy: keras.DTypePolicy  # that of layers that nothing else decides
    rules_of_user: tuple[Rule, ...] = ()
    with_defaults: bool = True  # whether the default rules are not left out
    # "dynamic", a number for a static scale, or None.
    loss_scale: str | float | None = "dynamic"
    # Further arguments of the loss-scale optimizer.
    loss_scale_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keep_float32: KeepFloat32 = "default"  # the argument that the rules came from
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

    def leave_open(self, rules: Iterable[Rule]) -> None:
        """Leaves it to others to say which of some rules match nothing."""
        self.matched.update(rule.name for rule in rules)

    def ask(
        self, layer: Any, *, is_finished: bool = True, path: str | None = None
    ) -> None:
        """Asks the rules in turn and keeps `layer` where one matches.

        Those with a predicate need a finished layer.
        """
        for rule in self.rules if layer not in self.taken_back else ():
            is_early = rule.predicate is not None and not is_finished
            if not is_early and self.matches(rule, layer, path):
                self.keep(layer, rule)
                return

    def matches(self, rule: Rule, layer: Any, path: str | None) -> bool:
        """Returns whether a rule keeps a layer, whose path is given where it is known.

        Until then, what may be a name or a pattern counts as a name.
        """
        is_exact = rule.name in self.exact or (path is None and rule.may_be_name)
        return rule.matches(layer, path=path, is_exact=is_exact)

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

    def keep_exact(self, layer: Any) -> None:
        """Keeps a layer in float32 that makes whole numbers of what it is given."""
        if layer not in self.taken_back:
            self.keep(layer, EXACT_RULE)

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
    rules, with_defaults = parse(keep_float32)
    options = dict(loss_scale_options or {})
    return PolicySettings(
        keras.DTypePolicy(policy),
        rules,
        with_defaults,
        loss_scale,
        options,
        keep_float32,
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


@dataclasses.dataclass
class Setting:
    """What new layers come under."""

    # The settings of managed layers, None where they are left to Keras.
    settings: PolicySettings | None = None
    why: str = NOT_ENABLED  # why the policy was chosen
    # The policy of the saved model that is being loaded, under whatever settings.
    loaded: str | None = None
    # Tells the time since tfamp was enabled from others, and one change from another.
    token: tuple[Any, Any] = (None, None)

    @property
    def next_token(self) -> tuple[Any, Any]:
        """The token of the change that comes."""
        is_enabled = self.settings is not None
        return (self.token[0] if is_enabled else object()), object()


_BLOCK: contextvars.ContextVar[Setting | None] = contextvars.ContextVar(
    "tfamp_block", default=None
)


class InForce:
    """The setting of the process, and that of the innermost block that is open."""

    def __init__(self) -> None:
        self._everywhere = Setting()
        self._warned: set[str] = set()

    @property
    def present(self) -> Setting:
        """The setting that holds here."""
        return _BLOCK.get() or self._everywhere

    @property
    def settings(self) -> PolicySettings | None:
        """The settings that new layers come under here."""
        return self.present.settings

    def put(self, settings: PolicySettings | None, why: str = NOT_ENABLED) -> None:
        """Changes the setting that holds here; other threads hear of it in time."""
        present = self.present
        present.token = present.next_token
        present.settings, present.why = settings, why
        self._warned.clear()
        self._tell_thread()

    @contextlib.contextmanager
    def block(self, **changes: Any) -> Iterator[None]:
        """Gives the block a setting of its own: the present one with `changes`."""
        changes["token"] = self.present.next_token
        token = _BLOCK.set(dataclasses.replace(self.present, **changes))
        try:
            with layers.global_policy_restored():
                self._tell_thread()
                yield
        finally:
            _BLOCK.reset(token)

    def _name(self) -> str | None:
        return None if self.settings is None else self.settings.policy.name

    def _tell_thread(self) -> None:
        layers.tell_thread(self._name, self.present.token)

    def prepare_thread(self) -> None:
        """Has a thread hear of the policy in force that has not, or forgot it."""
        present = self.present
        is_told = layers.token_of_thread() is present.token
        if present.settings is not None and not is_told:
            self._tell_thread()

    def holds(self, policy: str) -> bool:
        """States whether new layers come under the policy of this name."""
        present = self.present
        return present.settings is not None and policy in (self._name(), present.loaded)

    def warn_of_foreign(self, policy: keras.DTypePolicy) -> None:
        """Warns once of a policy that other code set while tfamp was enabled."""
        name = policy.name
        if name in self._warned:
            return
        self._warned.add(name)
        warnings.warn(
            f"Keras's global policy was set to {name!r} by other code while tfamp was "
            "enabled, so new layers take it and tfamp's rules do not act on them. "
            f"Leave that line out, or name the policy in `tfamp.enable({name!r})`; for "
            "some layers alone use `tfamp.scope(...)`.",
            UserWarning,
            stacklevel=checks.level_of_user(),
        )


IN_FORCE = InForce()


@contextlib.contextmanager
def stock_policy(policy: str | keras.DTypePolicy) -> Iterator[None]:
    """Leaves layers that are made inside the block to Keras, under its own policy."""
    with IN_FORCE.block(settings=None, why=NOT_ENABLED):
        keras.config.set_dtype_policy(policy)
        yield
