"""A policy and how a model runs under it, as one word, and put in force.

Reading a word imports neither TensorFlow nor Keras, so that a command line can say
what is wrong with it at once.
"""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence

from tfamp.records import checks
from tfamp.records.formats import POLICIES
from tfamp.records.record import Record

_OPTIONS = ("xla", "rewrite", "no_rules")
_STOCK = "keras:"
_PLAN_SUFFIX = ".json"
_REWRITE = "auto_mixed_precision_onednn_bfloat16"


@dataclasses.dataclass(frozen=True)
class Variant(Record):
    """A policy, and how a model runs under it.

    Args:
        policy: A policy's name, or the path of a plan, as for `tfamp.enable`.
        is_stock: Whether Keras alone sets the policy, without tfamp.
        jit_compile: Whether XLA compiles the model, whatever `compile` was told.
        rewrite: Whether TensorFlow rewrites graphs for bfloat16 on CPUs besides.
        has_rules: Whether the default rules keep layers in float32.

    Example:
        >>> Variant.parse("keras:mixed_bfloat16+xla").jit_compile
        True
        >>> str(Variant("mixed_bfloat16", has_rules=False))
        'mixed_bfloat16+no_rules'
    """

    policy: str
    is_stock: bool = False
    jit_compile: bool = False
    rewrite: bool = False
    has_rules: bool = True

    @classmethod
    def parse(cls, text: object, argument: str = "policies") -> "Variant":
        """Returns the variant that a word stands for."""
        if not isinstance(text, str):
            raise TypeError(
                f"`{argument}` holds {text!r}, of type {type(text).__name__}; expected "
                "names of policies, such as 'mixed_bfloat16' or 'float32+xla'."
            )
        # The name of a plan's file may hold a plus.
        path, suffix, rest = text.strip().rpartition(_PLAN_SUFFIX)
        word, *options = rest.split("+")
        word = path + suffix + word
        policy = word.removeprefix(_STOCK)
        if not policy.endswith(_PLAN_SUFFIX):
            checks.choice(argument, policy, POLICIES)
        for option in options:
            checks.choice(f"{argument} option", option, _OPTIONS)
        found = cls(
            policy,
            is_stock=word.startswith(_STOCK),
            jit_compile="xla" in options,
            rewrite="rewrite" in options,
            has_rules="no_rules" not in options,
        )
        if found.is_plan and not found.has_rules:
            raise ValueError(
                f"`{argument}` holds {text!r}, but a plan says of every layer what it "
                "computes in; expected it without 'no_rules'. Leave that out."
            )
        if found.is_stock and (
            policy == "auto" or found.is_plan or not found.has_rules
        ):
            raise ValueError(
                f"`{argument}` holds {text!r}, but stock Keras has no 'auto', no plan "
                "and no rules; expected a policy of Keras after 'keras:'. Leave "
                "'keras:' or the option out."
            )
        return found

    @classmethod
    def named(cls, text: object, argument: str = "policies") -> "Variant":
        """Returns what `parse` does, for work to come, which needs a plan's file."""
        found = cls.parse(text, argument)
        if found.is_plan and not os.path.isfile(found.policy):
            raise ValueError(
                f"`{argument}` is {text!r}; expected the file of a plan, and there is "
                "none. Make one with `tfamp tune script.py --out=plan.json`."
            )
        return found

    @property
    def is_plan(self) -> bool:
        """Whether it is the file of a `PrecisionPlan`."""
        return self.policy.endswith(_PLAN_SUFFIX)

    @property
    def is_float32(self) -> bool:
        """Whether it can be what others are compared with: nothing in half."""
        return self.policy == "float32" and not self.rewrite

    def __str__(self) -> str:
        """Returns the word that `parse` reads."""
        given = (self.jit_compile, self.rewrite, not self.has_rules)
        words = [self.policy, *itertools.compress(_OPTIONS, given)]
        return (_STOCK if self.is_stock else "") + "+".join(words)


def short_names(policies: Sequence[str]) -> dict[str, str]:
    """Returns what policies are called for people: plans by the names of their files.

    Example:
        >>> short_names(["float32", "runs/plan.json+xla"])
        {'float32': 'float32', 'runs/plan.json+xla': 'plan.json+xla'}
    """
    short = [
        os.path.basename(each) if _PLAN_SUFFIX in each else each for each in policies
    ]
    return {
        policy: name if short.count(name) == 1 else policy
        for policy, name in zip(policies, short, strict=True)
    }


@contextlib.contextmanager
def in_force(variant: Variant) -> Iterator[tuple[str, str]]:
    """Puts a variant in force, and afterwards what was in force before.

    Yields the policy that it comes to, and why.
    """
    import tensorflow as tf

    import tfamp
    from tfamp.dtypes.in_force import stock_policy
    from tfamp.machine import cpus

    if variant.rewrite or variant.is_stock:
        # `tfamp.enable` does so for the policies that need it.
        cpus.avoid_broken_amx()
    with contextlib.ExitStack() as stack:
        if variant.rewrite:
            rewrite = tf.config.optimizer.set_experimental_options
            rewrite({_REWRITE: True})
            stack.callback(rewrite, {_REWRITE: False})
        if variant.is_stock:
            stack.enter_context(stock_policy(variant.policy))
            yield variant.policy, "stock Keras"
        else:
            kept = "default" if variant.has_rules else "none"
            status = stack.enter_context(tfamp.scope(variant.policy, keep_float32=kept))
            yield status.policy, status.why
