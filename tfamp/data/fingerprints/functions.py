"""What counts of functions: code, what it closes over, and what it names.

A name that code uses counts by what it stands for in the function's own module. The
names of all code that was met also count in the user's modules that it was met in: the
walk looks them up there, so it need not know which of them code asks for.
"""

import dis
import importlib
import importlib.util
import os
import re
import types
from collections.abc import Iterator
from typing import Any

from tfamp.data.fingerprints.objects import (
    Names,
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
# The name of a variable of the environment.
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What TensorFlow notes on a function when it traces it.
_NOTES = {"__signature__", "_tf_decorator", "__original_wrapped__"}
_NOTES |= {"ag_dnc_wrapper__", "ag_module", "autograph_info__"}


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
    names = {name for part in _codes(code) for name in part.co_names}
    yield Names(names)
    for name in sorted(names & function.__globals__.keys() - values.keys()):
        values[name] = function.__globals__[name]
    yield {name: one for name, one in values.items() if not is_environment(one)}
    yield from _imported(function)
    yield from _unseen(function, names)


def code_parts(code: types.CodeType) -> Parts:
    """Yields what code does: not where it stands, nor how its lines are numbered."""
    yield "code"
    yield from (code.co_code, getattr(code, "co_exceptiontable", b""))
    yield from (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    yield from (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    yield code.co_flags
    yield code.co_consts


def is_environment(value: Any) -> bool:
    """Whether a value is the environment as a whole, of which single names count."""
    whole = (os.environ, getattr(os, "environb", None), os.getenv)
    return value is not None and any(value is one for one in whole)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields code and all code inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _imported(function: types.FunctionType) -> Iterator[Any]:
    """Yields the modules that a function imports when it runs."""
    package = function.__globals__.get("__package__") or ""
    for code in _codes(function.__code__):
        steps = [one for one in dis.get_instructions(code) if "EXT" not in one.opname]
        for number, step in enumerate(steps):
            if step.opname != "IMPORT_NAME":
                continue
            level, wanted = (one.argval for one in steps[number - 2 : number])
            try:
                name = importlib.util.resolve_name("." * level + step.argval, package)
                if is_installed(name):
                    yield f"{name} {version(name)}"
                    continue
                module = importlib.import_module(name)
                yield importlib.import_module(name.partition(".")[0])
                yield module
                for one in wanted or ():
                    if not hasattr(module, one):
                        importlib.import_module(f"{name}.{one}")
                yield Names(set(wanted or ()))
            except Exception:  # the user's module runs here
                yield Unseen(f"the import of `{step.argval}` in {name_of(function)}")


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
        texts = [t for c in _codes(function.__code__) for t in c.co_consts]
        keys = [os.fsdecode(t) for t in texts if isinstance(t, (str, bytes))]
        keys = [key for key in keys if _VARIABLE.fullmatch(key)]
        yield {key: os.environ.get(key) for key in keys}
        if not keys:
            yield Unseen(f"`os.environ` in {where}")
