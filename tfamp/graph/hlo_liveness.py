"""Which buffers of a program that XLA compiled live at the same time, at the most."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable

from tfamp.graph.hlo import operands_of
from tfamp.graph.liveness import Held, Peak

_BITS = re.compile(r"[a-z]+(\d+)")
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<sizes>[^\]]*)\]")
_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) "
    r"(?P<op>[\w\-]+)\((?P<operands>[^)]*)\)"
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{\s*$")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls)=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ALIAS = re.compile(r"\{(\d*)\}: \(\d+")
# Give what they get, or parts of it.
_SHARING = frozenset(
    ("bitcast", "get-tuple-element", "tuple", "while", "optimization-barrier")
)
_GIVEN = frozenset(("parameter", "constant", "iota", "partition-id", "replica-id"))
_NEVER_IN_PLACE = frozenset(("dot", "convolution", "custom-call", "sort", "reduce"))
_INNER = frozenset(("while", "call", "conditional"))


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    op: str
    num_bytes: int
    operands: tuple[str, ...]
    called: tuple[str, ...]
    op_name: str
    is_root: bool


def find_program_peak(text: str) -> Peak:
    """Returns the most memory that a compiled program needs beside its arguments.

    Instructions run in the order in which they stand. A buffer lives until its last
    reader; what has the size of an operand that nobody needs any more is written over
    it. Variables that the program updates keep their buffers.

    Args:
        text: What `experimental_get_compiler_ir` gives at stage "optimized_hlo".

    Raises:
        ValueError: The text has no schedule.

    Example:
        >>> text = '''HloModule m, is_scheduled=true
        ... ENTRY %main (a: f32[256]) -> f32[] {
        ...   %a = f32[256]{0} parameter(0)
        ...   %b = f32[256]{0} exponential(%a)
        ...   %c = f32[256]{0} negate(%b)
        ...   ROOT %d = f32[] reduce(%c), to_apply=%sum
        ... }'''
        >>> find_program_peak(text).num_bytes
        1028
    """
    head, _, _ = text.partition("\n")
    if "is_scheduled=true" not in head:
        raise ValueError(
            f"The program begins with {head[:80]!r}; expected `is_scheduled=true` in "
            "it. Read the stage 'optimized_hlo'."
        )
    computations, entry = _read(text.splitlines())
    updated = {int(index or 0) for index in _ALIAS.findall(head)}
    return _walk(computations[entry], computations, updated)


def _read(lines: Iterable[str]) -> tuple[dict[str, list[_Instruction]], str]:
    found: dict[str, list[_Instruction]] = {}
    entry = current = ""
    for line in lines:
        if (opened := _COMPUTATION.match(line)) and " = " not in line.split("{")[0]:
            current = opened["name"]
            found[current] = []
            entry = current if opened["entry"] else entry
        elif current and (each := _INSTRUCTION.match(line)):
            op_name = _OP_NAME.search(line)
            found[current].append(
                _Instruction(
                    each["name"],
                    each["op"],
                    _num_bytes(each["shape"]),
                    tuple(operands_of(each["operands"])),
                    tuple(_CALLED.findall(line)) if each["op"] in _INNER else (),
                    op_name[1] if op_name else each["name"],
                    bool(each["root"]),
                )
            )
    return found, entry


def _walk(
    instructions: list[_Instruction],
    computations: dict[str, list[_Instruction]],
    updated: set[int] | None,
) -> Peak:
    roots: dict[str, set[str]] = {}
    buffers: dict[str, _Instruction] = {}
    uses: collections.Counter[str] = collections.Counter()
    free = _written_over_arguments(instructions, updated)
    arguments = {each.name for each in instructions if each.op == "parameter"}
    for each in instructions:
        if each.op in _SHARING:
            shared = [roots.get(name, {name}) for name in each.operands]
            roots[each.name] = set[str]().union(*shared)
        else:
            roots[each.name] = {each.name}
    for each in instructions:
        if each.op in _SHARING and not each.is_root and each.op != "while":
            continue
        for name in each.operands:
            uses.update(roots.get(name, {name}))
    total = most = 0
    held: tuple[Held, ...] = ()
    at = ""
    alive: dict[str, int] = {}
    for each in instructions:
        inner = _inner(each, computations)
        read = set[str]().union(*(roots.get(name, {name}) for name in each.operands))
        size = each.num_bytes
        # XLA puts such copies ahead of updates in place; run, they take no memory of
        # their own: benchmarks/memory.py, 551 MiB measured, 736 with them, 544 without.
        is_guard = each.op == "copy" and set(each.operands) <= arguments
        if is_guard or each.op in _SHARING | _GIVEN or each.name in free:
            size = 0
        is_over = [n for n in read if uses[n] == 1 and alive.get(n) == size and size]
        if is_over and each.op not in _NEVER_IN_PLACE:
            total -= alive.pop(is_over[0])
        alive[each.name] = size
        buffers[each.name] = each
        total += size
        if total + inner.num_bytes > most:
            most, at = total + inner.num_bytes, each.op_name
            held = (*_describe(alive, buffers), *inner.held)
        if each.op in _SHARING and not each.is_root and each.op != "while":
            continue
        for name in read:
            uses[name] -= 1
            if uses[name] <= 0:
                total -= alive.pop(name, 0)
    return Peak(most, held, at)


def _inner(each: _Instruction, computations: dict[str, list[_Instruction]]) -> Peak:
    """Returns what the dearest of the called computations holds."""
    # What a call gives is written to where its caller has it.
    given = set[int]() if each.op == "while" else None
    peaks = [
        _walk(computations[name], computations, given)
        for name in each.called
        if name in computations
    ]
    return max(peaks, key=lambda peak: peak.num_bytes, default=Peak(0, (), ""))


def _written_over_arguments(
    instructions: list[_Instruction], updated: set[int] | None
) -> set[str]:
    """Returns the instructions whose results have a place already.

    Args:
        instructions: Of a computation.
        updated: Numbers of the results that take the place of arguments; None for all.
    """
    root = next((each for each in instructions if each.is_root), None)
    if root is None:
        return set()
    if root.op != "tuple":
        return {root.name} if updated is None or 0 in updated else set()
    return {
        name for i, name in enumerate(root.operands) if updated is None or i in updated
    }


def _describe(
    alive: dict[str, int], buffers: dict[str, _Instruction]
) -> tuple[Held, ...]:
    return tuple(
        Held(size, buffers[name].op_name, buffers[name].op)
        for name, size in alive.items()
        if size
    )


def _num_bytes(shape: str) -> int:
    total = 0
    for found in _SHAPE.finditer(shape):
        bits = _BITS.match(found["dtype"])
        each = int(bits[1]) / 8 if bits else 1
        sizes = [int(size.strip("<=")) for size in found["sizes"].split(",") if size]
        total += math.ceil(math.prod(sizes) * each)
    return total
