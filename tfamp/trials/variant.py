"""A policy, by tfamp or stock Keras, with XLA or without, as one word; put in force.

Reading a word imports neither TensorFlow nor Keras, so that a command line can say
what is wrong with it at once.
"""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfamp.records import checks
from tfamp.records.formats import POLICIES
from tfamp.records.record import Record

_STOCK, _XLA, _PLAN_SUFFIX = "keras:", "+xla", ".json"


@dataclasses.dataclass(frozen=True)
class Variant(Record):
    """A policy, and how a model runs under it."""

    policy: str  # its name, or the path of a plan, as for `tfamp.enable`
    jit_compile: bool = False  # whether XLA compiles the model
    is_stock: bool = False  # whether Keras alone sets the policy, without tfamp

    @classmethod
    def parse(cls, text: object, argument: str = "policies") -> "Variant":
        """Returns the variant that a word stands for."""
        if not isinstance(text, str):
            raise TypeError(
                f"`{argument}` holds {text!r}, of type {type(text).__name__}; expected "
                "names of policies, such as 'mixed_bfloat16' or 'float32+xla'."
            )
        word = text.strip().removesuffix(_XLA)
        policy = word.removeprefix(_STOCK)
        found = cls(policy, text.strip() != word, policy != word)
        if not found.is_plan:
            checks.choice(argument, policy, POLICIES)
        if found.is_stock and (policy == "auto" or found.is_plan):
            raise ValueError(
                f"`{argument}` holds {text!r}, but stock Keras has no 'auto' and no "
                "plan; expected a policy of Keras after 'keras:'. Leave that out."
            )
        return found

    @classmethod
    def named(cls, text: object, argument: str = "policies") -> "Variant":
        """Returns what `parse` does; a plan's file has to be there."""
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

    def __str__(self) -> str:
        """Returns the word that `parse` reads."""
        return _STOCK * self.is_stock + self.policy + _XLA * self.jit_compile


def short_names(policies: Sequence[str]) -> dict[str, str]:
    """Returns what policies are called for people: plans by their files' names."""
    short = [os.path.basename(p) if _PLAN_SUFFIX in p else p for p in policies]
    pairs = zip(policies, short, strict=True)
    return {p: name if short.count(name) == 1 else p for p, name in pairs}


@contextlib.contextmanager
def in_force(variant: Variant) -> Iterator[tuple[str, str]]:
    """Puts a variant in force, and afterwards what was in force before."""
    import tfamp
    from tfamp.dtypes.settings import stock_policy
    from tfamp.machine import cpus

    if variant.is_stock:
        cpus.avoid_broken_amx()  # which `tfamp.enable` does where it is needed
        with stock_policy(variant.policy):
            yield variant.policy, "stock Keras"
        return
    with tfamp.scope(variant.policy) as status:
        yield status.policy, status.why


def plan_file(folder: Path, policy: Any) -> Any:
    """Returns the path of a plan's file in a folder; any other policy as it is."""
    from tfamp.plan import PrecisionPlan

    if not isinstance(policy, PrecisionPlan):
        return policy
    digest = hashlib.sha256(policy.to_json().encode()).hexdigest()[:8]
    path = folder / f"plan-{digest}.json"
    policy.to_json(path)
    return str(path)
