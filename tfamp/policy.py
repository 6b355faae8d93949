"""Turns mixed precision on and off, and tells what is on."""

import contextlib
import dataclasses
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn

import keras

from tfamp.dtypes import hooks
from tfamp.dtypes.rules import DEFAULT_OPERATIONS, KeepFloat32
from tfamp.dtypes.settings import (
    IN_FORCE,
    MEASURE,
    PolicySettings,
    choose_policy,
    make_settings,
    named_policy,
)
from tfamp.keras_hooks.replicas import warn_of_idle_distribution
from tfamp.loss_scale.rule import check_loss_scale
from tfamp.machine import devices as hardware
from tfamp.machine.speeds import Device
from tfamp.plan import PrecisionPlan, read_plan
from tfamp.records import checks, console
from tfamp.records import versions as _versions
from tfamp.records.record import Record

# What is known by name; a path of a plan is a text, too.
PolicyName = Literal[
    "auto",
    "measure",
    "float32",
    "mixed_float16",
    "mixed_bfloat16",
    "float16",
    "bfloat16",
]


@dataclasses.dataclass(frozen=True)
class RuleStatus(Record):
    """One rule in force: its name and its reason."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Status(Record):
    """What tfamp does at this moment; `print(status)` shows it as tables."""

    enabled: bool  # whether new layers are managed
    policy: str  # the name of the policy of new layers
    why: str  # why that policy, in one sentence
    devices: tuple[Device, ...]  # that TensorFlow sees
    rules: tuple[RuleStatus, ...]  # what stays in float32
    # "dynamic", a number, or None; used where a layer computes in float16.
    loss_scale: str | float | None
    hooks: tuple[str, ...]  # what is replaced in Keras now
    versions: dict[str, str | None]  # of the packages that matter

    @property
    def reason(self) -> str:
        """The same as `why`, named as in the records of hardware and rules."""
        return self.why

    def __enter__(self) -> NoReturn:
        """Refuses a `with` block, which only `scope` ends."""
        raise TypeError(
            "`tfamp.enable(...)` stands in a `with` block; expected a line of its own, "
            "as it holds until `tfamp.disable()`. For a block write "
            "`with tfamp.scope(...):`."
        )

    def __exit__(self, *error: object) -> None:
        """Is looked for ahead of `__enter__`."""

    def __str__(self) -> str:
        facts = [
            ("tfamp", "enabled" if self.enabled else "not enabled"),
            ("policy", self.policy),
            ("why", self.why),
            *([("loss scale", str(self.loss_scale))] if self.loss_scale else []),
            *(("device", f"{each.kind}: {each.name}") for each in self.devices),
            ("versions", ", ".join(f"{k} {v}" for k, v in self.versions.items())),
            ("hooks", f"{len(self.hooks)} installed"),
        ]
        look: dict[str, Any] = {"show_header": False, "box": None, "pad_edge": False}
        parts = [console.table({"fact": {}, "value": {}}, facts, **look)]
        if self.rules:
            kept = [(rule.name, rule.reason) for rule in self.rules]
            parts.append(console.table({"stays in float32": {}, "because": {}}, kept))
        return console.text_of(*parts, width=100)


@checks.knows_other_names
def enable(
    policy: PolicyName | str | os.PathLike[str] | PrecisionPlan = "auto",
    *,
    keep_float32: KeepFloat32 = "default",
    loss_scale: str | float | None = "dynamic",
    loss_scale_options: Mapping[str, Any] | None = None,
    check: Literal["keep", "warn"] | None = "keep",
) -> Status:
    """Makes every layer built from now on compute in the cheapest right dtype.

    Call it before the model is built; nothing else in the code changes. Calling it
    again replaces the settings for models to come. It logs a line that says what is in
    force and why, which `logging.getLogger("tfamp").setLevel("WARNING")` keeps quiet.

    Args:
        policy: "auto" takes what is fastest on the devices here, and never one that is
            slower than float32, or the environment variable TFAMP_POLICY where it is
            set; else "float32", "mixed_float16", "mixed_bfloat16", "float16" or
            "bfloat16". "measure" times the policies on the data of the first `fit`, for
            20 s at most, and trains under the fastest. Or a `PrecisionPlan`, or the
            path of its ".json" file: the model that it is for computes as it says,
            another one is an error when it is compiled.
        keep_float32: "default", "none", or a sequence of layers, layer classes,
            class names, patterns for whole names or paths, and callables taking
            a layer. A sequence adds to the default rules, unless "none" is in it.
        loss_scale: "dynamic", a number for a static scale, or None for no
            scaling. Used where a layer computes in float16.
        loss_scale_options: Further arguments of the loss-scale optimizer. With
            `reduce_dtype` optimizers of models without float16 are wrapped too, at a
            scale of 1 unless float16 is sent.
        check: What the first `fit` of a model does with layers of your own that half
            precision spoils, which no rule can know: it runs some examples of the
            first batch through them, and keeps them in float32 ("keep"), warns
            ("warn"), or does not look (None). Models on replicas are not looked at.

    Returns:
        The `Status` after the call.

    Raises:
        ValueError: An argument is unknown, or the loss scale could have no
            effect under an explicit policy without float16.
        TypeError: An entry of `keep_float32` is no layer, class, text or callable.
        ValueError, ImportError: Keras runs on another backend, or a version of
            Python, Keras or TensorFlow is out of range.
        HookError: This version of Keras is not among the tested ones, and does not
            behave as they do. If TensorFlow has not started yet, the first call of
            a layer raises it.

    Example:
        >>> status = enable("mixed_bfloat16")
        >>> keras.layers.Dense(4).compute_dtype, keras.layers.Softmax().compute_dtype
        ('bfloat16', 'float32')
        >>> disable()
        >>> keras.layers.Dense(4).compute_dtype
        'float32'
    """
    in_force_now = _enable(policy, keep_float32, loss_scale, loss_scale_options, check)
    rules = len(in_force_now.rules)
    kept = f"; {rules} rules keep layers in float32" if rules else ""
    fault = _versions.keras_fault(in_force_now.versions["keras"]) or ()
    text = f"{in_force_now.policy} ({in_force_now.why.removesuffix('.')}){kept}."
    console.say(" ".join([text, *fault]))
    return in_force_now


def _enable(
    policy: PolicyName | str | os.PathLike[str] | PrecisionPlan,
    keep_float32: KeepFloat32,
    loss_scale: str | float | None,
    loss_scale_options: Mapping[str, Any] | None,
    check: str | None,
) -> Status:
    _versions.check_environment()
    if check is not None:
        checks.choice("check", check, ("keep", "warn"))
    settings, reason, explicit = settings_for(policy, keep_float32, make_settings)
    # What is given of the loss scale takes the place of a plan's.
    settings.loss_scale_options = dict(
        loss_scale_options or settings.loss_scale_options
    )
    if loss_scale != "dynamic":
        settings.loss_scale = loss_scale
    name, options = settings.policy.name, settings.loss_scale_options
    check_loss_scale(name, settings.loss_scale, options, explicit)
    objection = hardware.objection(name, hardware.devices()) if explicit else None
    if objection is not None:
        warnings.warn(objection, UserWarning, stacklevel=checks.level_of_user())
    may_be_half = settings.is_half or settings.is_measured
    if check is not None and settings.plan is None and may_be_half:
        settings.check = check
        # By name, as it stands above this file: it adds itself to what `fit` does.
        importlib.import_module("tfamp.numerics.first_check")
    hooks.install(settings)
    warn_of_idle_distribution()
    IN_FORCE.put(settings, reason)
    return status()


def settings_for(
    policy: Any, keep_float32: KeepFloat32, make: Callable[..., PolicySettings]
) -> tuple[PolicySettings, str, bool]:
    """Returns the settings for a policy or plan, why, and whether a user named it.

    `make` gives those of a policy's name and `keep_float32`.
    """
    named = named_policy(policy)
    plan = read_plan(named)
    if plan is not None:
        if keep_float32 != "default":
            raise ValueError(
                f"`keep_float32` {keep_float32!r} stands beside a plan, which says of "
                "every layer what it computes in; expected one of the two. Leave it "
                "out, or make another plan with `PrecisionPlan.from_model`."
            )
        return plan.settings(), plan.why, True
    name, why, is_named = choose_policy(policy)
    settings = make(name, keep_float32)
    if named == MEASURE:
        settings.is_measured = True
        # By name, as it stands above this file: it adds itself to what `fit` does.
        importlib.import_module("tfamp.tuning.first_fit")
    return settings, why, is_named


def disable() -> None:
    """Leaves models that are built from now on to Keras as it was.

    Models built or applied while tfamp was enabled keep their dtypes and the
    hooks that go with them. Does nothing where tfamp is not enabled.

    Example:
        >>> _ = enable("mixed_bfloat16")
        >>> disable()
        >>> keras.config.dtype_policy().name
        'float32'
    """
    if IN_FORCE.settings is not None:
        IN_FORCE.put(None)


@checks.knows_other_names
@contextlib.contextmanager
def scope(
    policy: PolicyName | str | os.PathLike[str] | PrecisionPlan = "auto",
    *,
    keep_float32: KeepFloat32 = "default",
    loss_scale: str | float | None = "dynamic",
    loss_scale_options: Mapping[str, Any] | None = None,
    check: Literal["keep", "warn"] | None = "keep",
) -> Iterator[Status]:
    """Enables tfamp for the models built inside a `with` block; gives the `Status`.

    What was in force before is in force after it, on exceptions too. Scopes
    nest, and hold for the thread or task that runs the block. Arguments and errors
    are those of `enable`.

    Example:
        >>> with scope("mixed_bfloat16"):
        ...     inside = keras.layers.Dense(4)
        >>> inside.compute_dtype, keras.layers.Dense(4).compute_dtype
        ('bfloat16', 'float32')
    """
    with IN_FORCE.block():
        yield _enable(policy, keep_float32, loss_scale, loss_scale_options, check)


def status() -> Status:
    """Returns what tfamp does at this moment.

    Example:
        >>> status().enabled
        False
    """
    IN_FORCE.prepare_thread()
    settings, rules = IN_FORCE.settings, list[RuleStatus]()
    if settings is not None and settings.is_half:
        rules += [RuleStatus(rule.name, rule.reason) for rule in settings.rules]
        operations = DEFAULT_OPERATIONS if settings.has_defaults else ()
        rules += [RuleStatus(*row) for row in operations]
    return Status(
        enabled=settings is not None,
        policy=keras.config.dtype_policy().name,
        why=IN_FORCE.present.why,
        devices=hardware.devices(),
        rules=tuple(rules),
        loss_scale=settings.loss_scale if settings and settings.is_half else None,
        hooks=hooks.installed(),
        versions=_versions.installed_versions(),
    )
