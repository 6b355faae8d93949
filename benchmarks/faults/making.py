"""Makes cases of a part that half precision spoils, in a trunk that it does not."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.faults.building import in_trunk
from benchmarks.faults.records import Case

SAFE: tuple[()] = ()
_PREFIX = {"nested": "inner/", "nested stage": "stage/"}


def answers(*paths: str) -> frozenset[frozenset[str]]:
    """Returns the one right answer, a set of paths."""
    return frozenset({frozenset(paths)})


def make_case(
    name: str,
    kind: str,
    build: Callable[[int], Any],
    *,
    float16: Sequence[str] = SAFE,
    bfloat16: Sequence[str] = SAFE,
    reasons: Sequence[str] = (),
    style: str,
    depth: int,
    verdict: str = "layers",
) -> Case:
    """Returns a case; without guilty layers in a dtype it is safe there.

    Args:
        name: Unique name.
        kind: What is wrong.
        build: As in `Case`.
        float16: Paths guilty in float16.
        bfloat16: Paths guilty in bfloat16.
        reasons: Words of which any is right; `kind` if none are given.
        style: As in `Case`.
        depth: As in `Case`.
        verdict: In a dtype that has guilty paths.
    """
    guilty = {"float16": float16, "bfloat16": bfloat16}
    words = frozenset(reasons or (kind,))
    return Case(
        name=name,
        kind=kind,
        build=build,
        guilty={dtype: answers(*paths) for dtype, paths in guilty.items()},
        verdict={d: verdict if paths else "safe" for d, paths in guilty.items()},
        reasons={d: words if paths else frozenset() for d, paths in guilty.items()},
        style=style.split()[0],
        depth=depth,
    )


def short_case(
    name: str,
    kind: str,
    build: Callable[[int], Any],
    float16: Sequence[str] = SAFE,
    bfloat16: Sequence[str] = SAFE,
    *,
    reasons: Sequence[str] = (),
    style: str = "sequential",
    depth: int = 4,
) -> Case:
    """Returns a case of a small model; the arguments are those of `make_case`."""
    return make_case(
        name,
        kind,
        build,
        float16=float16,
        bfloat16=bfloat16,
        reasons=reasons,
        style=style,
        depth=depth,
    )


def trunk_case(
    name: str,
    kind: str,
    part: Callable[[], list[Any]],
    *,
    style: str,
    float16: Sequence[str] = SAFE,
    bfloat16: Sequence[str] = SAFE,
    reasons: Sequence[str] = (),
    trunk: str = "dense",
    depth: int = 6,
    **options: Any,
) -> Case:
    """Returns a case of a part in a trunk; the depth counts both and the head.

    Args:
        name: Unique name.
        kind: What is wrong.
        part: Makes the part's elements anew.
        style: As for `assemble`.
        float16: Names of the part's layers that are guilty in float16.
        bfloat16: Likewise.
        reasons: As for `make_case`.
        trunk: Kind of the trunk.
        depth: Layers of the trunk.
        **options: Further arguments of `in_trunk`.
    """
    prefix = _PREFIX.get(style, "")
    return make_case(
        name,
        kind,
        in_trunk(part, style=style, kind=trunk, depth=depth, **options),
        float16=[prefix + path for path in float16],
        bfloat16=[prefix + path for path in bfloat16],
        reasons=reasons,
        style=style,
        depth=depth + len(part_names(part)) + 2,
    )


def part_names(part: Callable[[], list[Any]]) -> list[str]:
    """Returns a name for each element of a part."""
    return [getattr(element, "name", "branch") for element in part()]
