"""The most memory that a program of XLA needs at one time, from its text."""

import collections
import dataclasses
import math
import re

from tfamp.graph.liveness import Held, Peak

_BITS = re.compile(r"[a-z]+(\d+)")
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<sizes>[^\]]*)\]")
# "%name = f32[4,32]{1,0} dot(%a, %b), ..."; a call may return a tuple.
_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT\s+)?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) "
    r"(?P<op>[\w\-]+)\((?P<operands>[^)]*)\)"
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{\s*$")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls)=%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
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
    shape: str  # as it is written, of a tuple with all its parts
    operands: tuple[str, ...]
    called: tuple[str, ...]
    target: str
    op_name: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        total = 0
        for found in _SHAPE.finditer(self.shape):
            bits = _BITS.match(found["dtype"])
            each = int(bits[1]) / 8 if bits else 1
            sizes = [int(s.strip("<=")) for s in found["sizes"].split(",") if s]
            total += math.ceil(math.prod(sizes) * each)
        return total


def _instruction(line: str) -> _Instruction | None:
    each = _INSTRUCTION.match(line)
    if each is None:
        return None
    operands, op = each["operands"], each["op"]
    # "f32[2,3]{1,0} %a, f32[3]{0} %b", or names alone without a sign.
    names = re.findall(r"%([\w.\-]+)", operands)
    if not names:
        names = [name.split()[-1] for name in operands.split(",") if name.strip()]
    target, op_name = _TARGET.search(line), _OP_NAME.search(line)
    return _Instruction(
        each["name"],
        op,
        each["shape"],
        tuple(names),
        tuple(_CALLED.findall(line)) if op in _INNER else (),
        target[1] if target else "",
        op_name[1] if op_name else "",
        bool(each["root"]),
    )


def find_program_peak(text: str) -> Peak:
    """Returns the most memory that an "optimized_hlo" needs beside its arguments.

    Instructions run in the order in which they stand; a text without a schedule is a
    ValueError. A buffer lives until its last reader; what has the size of an operand
    that nobody needs any more is written over it. Variables that the program updates
    keep their buffers.

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
    computations: dict[str, list[_Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if (opened := _COMPUTATION.match(line)) and " = " not in line.split("{")[0]:
            current = opened["name"]
            computations[current] = []
            entry = current if opened["entry"] else entry
        elif current and (each := _instruction(line)):
            computations[current].append(each)
    updated = {int(index or 0) for index in _ALIAS.findall(head)}
    return _walk(computations[entry], computations, updated)


def _walk(
    instructions: list[_Instruction],
    computations: dict[str, list[_Instruction]],
    updated: set[int] | None,
) -> Peak:
    roots: dict[str, set[str]] = {}
    buffers = {each.name: each for each in instructions}
    uses: collections.Counter[str] = collections.Counter()
    free = _written_over_arguments(instructions, updated)
    arguments = {each.name for each in instructions if each.op == "parameter"}

    def read_by(each: _Instruction) -> set[str]:
        return set[str]().union(*(roots.get(name, {name}) for name in each.operands))

    def only_shares(each: _Instruction) -> bool:
        return each.op in _SHARING and not each.is_root and each.op != "while"

    for each in instructions:
        roots[each.name] = read_by(each) if each.op in _SHARING else {each.name}
    for each in instructions:
        if not only_shares(each):
            for name in each.operands:
                uses.update(roots.get(name, {name}))
    total = most = 0
    held: tuple[Held, ...] = ()
    at = ""
    alive: dict[str, int] = {}
    for each in instructions:
        inner = _inner(each, computations)
        read = read_by(each)
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
        total += size
        if total + inner.num_bytes > most:
            most, at = total + inner.num_bytes, each.op_name or each.name
            made = [(buffers[name], size) for name, size in alive.items() if size]
            own = (Held(size, b.op_name or b.name, b.op) for b, size in made)
            held = (*own, *inner.held)
        if only_shares(each):
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
    called = [computations[name] for name in each.called if name in computations]
    peaks = [_walk(instructions, computations, given) for instructions in called]
    return max(peaks, key=lambda peak: peak.num_bytes, default=Peak(0, (), ""))


def _written_over_arguments(
    instructions: list[_Instruction], updated: set[int] | None
) -> set[str]:
    """Returns the instructions whose results have a place already.

    `updated` are the numbers of the results that take the place of arguments, None for
    all.
    """
    root = next((each for each in instructions if each.is_root), None)
    if root is None:
        return set()
    results = root.operands if root.op == "tuple" else (root.name,)
    return {n for i, n in enumerate(results) if updated is None or i in updated}
