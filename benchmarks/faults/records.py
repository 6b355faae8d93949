"""What a case says: how to build it, and what a tool has to find."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Paths = frozenset[str]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of which is known what float16 and bfloat16 would spoil.

    Attributes:
        name: Unique name.
        kind: What is wrong, such as "overflow"; "healthy" for a control.
        build: Takes a seed, returns (compiled float32 model, list of batches).
        guilty: By dtype, the sets of layer paths of which any is right; paths as
            `tfamp.assignment` gives them, operations of a Functional graph as the path
            of their model and their name.
        verdict: By dtype, "safe", "layers", "loss scale" or "amplification".
        reasons: By dtype, the words of which any is right; empty where nothing is.
        style: "functional", "sequential", "subclassed" or "nested".
        depth: Layers and operations that compute.
        split: "develop" or "final".
    """

    name: str
    kind: str
    build: Callable[[int], tuple[Any, list[Any]]]
    guilty: Mapping[str, frozenset[Paths]]
    verdict: Mapping[str, str]
    reasons: Mapping[str, frozenset[str]]
    style: str
    depth: int
    split: str = ""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A training step that went wrong, or did not, and why.

    Attributes:
        name: Unique name.
        build: Takes a seed, returns (compiled model in its policy, failing batch). The
            batch is `(x, y)` or `(x, y, sample_weight)`. `policy=` builds the same
            under another.
        cause: What `tfamp.triage(...).cause` has to be.
        layers: Paths of which any is right; empty where no layer is to be named.
        split: "develop" or "final".
    """

    name: str
    build: Callable[..., tuple[Any, Any]]
    cause: str
    layers: Paths = frozenset()
    split: str = ""

    @property
    def layer(self) -> str | None:
        """The layer to name, the first where several are right, else None."""
        return min(self.layers) if self.layers else None

    @property
    def kind(self) -> str:
        """What the split is balanced over."""
        return self.cause


def split(cases: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the cases with every second of each kind in the final set.

    The order within a kind is that of a hash of the name, so nobody chose. Of a kind
    with an odd number, kinds take turns in which set gets the one more.
    """
    cases = list(cases)
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        doubled = tuple(sorted({name for name in names if names.count(name) > 1}))
        raise ValueError(
            f"Got the names {doubled} more than once; expected unique names of cases. "
            "Rename one of each."
        )
    place, final = 0, set()
    for kind in sorted({case.kind for case in cases}):
        own = [case.name for case in cases if case.kind == kind]
        for name in sorted(own, key=_hash):
            if place % 2:
                final.add(name)
            place += 1
    return tuple(
        dataclasses.replace(case, split="final" if case.name in final else "develop")
        for case in cases
    )


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
