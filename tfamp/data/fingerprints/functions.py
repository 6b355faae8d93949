"""What counts of functions: code, what it closes over, and what it names.

Python has no equality of functions that lasts longer than a process. A name that
code uses counts by what it stands for, in the function's own module, in modules that
it imports, and so on as deep as the user's own code goes.
"""

import dis
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from tfamp.data.fingerprints.objects import (
    Parts,
    Unseen,
    is_installed,
    is_named,
    name_of,
    version,
)

# What reads files by names that only a run knows.
_READERS = {
    *("open", "read_text", "read_bytes", "GFile", "urlopen", "urlretrieve"),
    *("fromfile", "genfromtxt", "imread", "loadmat", "loadtxt", "memmap"),
    *("read_csv", "read_excel", "read_feather", "read_json", "read_parquet"),
    *("read_pickle", "read_table", "load_img", "dcmread"),
    # Within TensorFlow's graphs, where names mostly come with the elements: made of
    # them, as "a/masks/1.png" of "a/images/1.png", or not.
    *("read_file", "TextLineDataset", "TFRecordDataset", "FixedLengthRecordDataset"),
}
_EVALUATORS = {"eval", "exec", "__import__", "import_module"}
_ENVIRONMENT = {"environ", "environb", "getenv"}
# What TensorFlow notes on a function when it traces it.
_NOTES = {"__signature__", "_tf_decorator", "__original_wrapped__"}
_NOTES |= {"ag_dnc_wrapper__", "ag_module", "autograph_info__"}
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_AFTER_IMPORT = ("IMPORT_FROM", "STORE_", "SWAP", "POP_TOP", "ROT_TWO", "COPY")
_SKIPPED = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "NOT_TAKEN")


def function_parts(function: types.FunctionType) -> Parts:
    """Yields a function's code and all values that it can reach."""
    yield "function"
    home = str(function.__globals__.get("__name__", ""))
    if is_installed(home):
        yield f"{name_of(function)} {version(home)}"
        if function.__name__ in _READERS:  # met by another name, or handed over itself
            yield Unseen(f"what `{function.__name__}` reads")
        if is_named(function):
            return
    yield from (function.__defaults__, function.__kwdefaults__)
    yield {k: v for k, v in vars(function).items() if k not in _NOTES}
    code = function.__code__
    values = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            values[name] = "empty"
    if is_installed(home):
        yield code.co_name
        yield values
        return
    yield code
    names = _names(code)
    for name in sorted(names & function.__globals__.keys() - values.keys()):
        values[name] = function.__globals__[name]
    escaping = _escaping(code)
    for name, value in values.items():
        yield name
        if isinstance(value, types.ModuleType):
            yield from used(value, None if name in escaping else names)
        elif not _is_environment(value):
            yield value
    yield from _imported(function, names, escaping)
    yield from _unseen(function, names)


def code_parts(code: types.CodeType) -> Parts:
    """Yields what code does: not where it stands, nor how its lines are numbered."""
    yield "code"
    yield from (code.co_code, getattr(code, "co_exceptiontable", b""))
    yield from (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    yield from (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    yield code.co_flags
    yield code.co_consts


def _is_environment(value: Any) -> bool:
    """Whether a value is the environment as a whole, of which single names count."""
    whole = (os.environ, getattr(os, "environb", None), os.getenv)
    return value is not None and any(value is one for one in whole)


def _names(code: types.CodeType) -> set[str]:
    """Returns the names that code and the functions made inside it look up."""
    return {name for part in _codes(code) for name in part.co_names}


def used(module: types.ModuleType, names: set[str] | None) -> Iterator[Any]:
    """Yields what code may use of a module, and of the user's modules inside it.

    `names` are all that the code names, None where the whole module is handed on.
    """
    met, rest = {module.__name__}, [module]
    while rest:
        module = rest.pop()
        yield module.__name__
        if is_installed(module.__name__):
            yield version(module.__name__)
            continue
        if str(getattr(module, "__file__", "")).endswith((".so", ".pyd")):
            yield Unseen(f"the code of {module.__name__}")
        inside = vars(module)
        for name in sorted(inside if names is None else names & inside.keys()):
            value = inside[name]
            if name.startswith("__") or _is_environment(value):
                continue
            yield name
            if not isinstance(value, types.ModuleType):
                yield value
            elif value.__name__ not in met:
                met.add(value.__name__)
                rest.append(value)


def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    return [
        one for one in dis.get_instructions(code) if not one.opname.startswith(_SKIPPED)
    ]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields code and all code inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _arguments(instruction: dis.Instruction) -> tuple[Any, ...]:
    """Returns what an instruction names; newer Pythons join two in one."""
    value = instruction.argval
    return value if isinstance(value, tuple) else (value,)


def _escaping(code: types.CodeType) -> set[str]:
    """Returns the names whose values are used otherwise than for an attribute."""
    found: set[str] = set()
    for part in _codes(code):
        steps = _instructions(part)
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            # A closure is made of cells, whose use stands in the inner function.
            if "LOAD_" not in step.opname or step.opname in (
                *_ATTRIBUTES,
                "LOAD_CONST",
                "LOAD_CLOSURE",
            ):
                continue
            loaded = _arguments(step)
            if following is not None and following.opname in _ATTRIBUTES:
                loaded = loaded[:-1]
            found.update(one for one in loaded if isinstance(one, str))
    return found


def _imported(
    function: types.FunctionType, names: set[str], escaping: set[str]
) -> Iterator[Any]:
    """Yields what a function imports when it runs."""
    for code in _codes(function.__code__):
        steps = _instructions(code)
        for number, step in enumerate(steps):
            if step.opname != "IMPORT_NAME":
                continue
            level, wanted = (one.argval for one in steps[number - 2 : number])
            stored: set[Any] = set()
            for one in steps[number + 1 :]:
                if not one.opname.startswith(_AFTER_IMPORT):
                    break
                if one.opname.startswith("STORE_"):
                    stored.update(_arguments(one))
            try:
                name = importlib.util.resolve_name(
                    "." * level + step.argval,
                    function.__globals__.get("__package__") or "",
                )
                yield name
                if is_installed(name):
                    yield version(name)
                    continue
                module = importlib.import_module(name)
                for one in wanted or ():
                    if not hasattr(module, one):
                        importlib.import_module(f"{name}.{one}")
            except Exception:  # the user's module runs here
                yield Unseen(f"the import of `{step.argval}` in {name_of(function)}")
                continue
            is_whole = bool(stored & escaping)
            for one in wanted or ():
                value = getattr(module, one, None)
                if is_whole and isinstance(value, types.ModuleType):
                    yield from used(value, None)
            yield from used(module, None if is_whole and not wanted else names)
            yield from used(sys.modules[name.partition(".")[0]], names)


def _unseen(function: types.FunctionType, names: set[str]) -> Iterator[Any]:
    """Yields what only a run of a function can tell."""
    where = name_of(function)
    own = {
        name
        for name in names & function.__globals__.keys()
        if isinstance(function.__globals__[name], types.FunctionType)
        and not is_installed(function.__globals__[name].__module__)
    }
    readers = names & _READERS - own
    values = [function.__globals__.get(name) for name in names]
    modules = [value for value in values if isinstance(value, types.ModuleType)]
    uses_numpy = "numpy" in {*names, *(module.__name__ for module in modules)}
    if uses_numpy and "load" in names - own:
        readers.add("load")
    for name in sorted(readers):
        yield Unseen(f"what `{name}` reads in {where}")
    for name in sorted(names & _EVALUATORS - own):
        yield Unseen(f"what `{name}` does in {where}")
    if names & _ENVIRONMENT:
        yield from _environment(function, where)


def _environment(function: types.FunctionType, where: str) -> Iterator[Any]:
    """Yields the variables of the environment that code reads by a written name."""
    for code in _codes(function.__code__):
        steps = _instructions(code)
        for number, step in enumerate(steps):
            is_read = step.opname.startswith("LOAD_") and step.opname != "LOAD_CONST"
            if not is_read or step.argval not in _ENVIRONMENT:
                continue
            following = [
                one
                for one in steps[number + 1 : number + 3]
                if not (one.opname in _ATTRIBUTES and one.argval == "get")
            ]
            key = following[0].argval if following else None
            if not following or following[0].opname != "LOAD_CONST":
                yield Unseen(f"`os.environ` in {where}")
            elif isinstance(key, (str, bytes)):
                yield from ("environment", key, os.environ.get(os.fsdecode(key)))
