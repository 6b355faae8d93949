"""What a fingerprint sees of the user's code: modules, imports, the environment."""

import abc
import importlib
import os
import site
import sys
import textwrap

import numpy as np
import pytest

from tests.data_fingerprint_test import digest, unseen
from tfamp.data import fingerprints as objects


def test_the_base_class_of_an_abstract_one_counts():
    def made(number):
        class Base(abc.ABC):
            @abc.abstractmethod
            def scale(self, x):
                return x * number

        return type("Made", (Base,), {"scale": lambda self, x: super().scale(x)})()

    assert digest(made(1)) == digest(made(1)) != digest(made(2))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes modules of a user's package, and forgets what was imported of it."""
    monkeypatch.syspath_prepend(tmp_path)
    # Python tells by seconds and size whether a compiled file is old.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
            del sys.modules[name]

    def write(**modules):
        forget()
        (tmp_path / "mine").mkdir(exist_ok=True)
        for name, text in {"__init__": "", **modules}.items():
            (tmp_path / "mine" / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return {"__name__": "mine.train", "__package__": "mine"}

    yield write
    forget()


# What stands in front of `f`, and what `f` does.
IMPORT = "import mine.ops"
CALL = "def call(module, x):\n    return module.scale(x)"
USES = {
    "dotted": (IMPORT, "return mine.ops.scale(x)"),
    "dotted twice": ("import mine.deep", "return mine.deep.ops.scale(x)"),
    "handed on": (f"import mine.ops as ops\n{CALL}", "return call(ops, x)"),
    "by a global of the module": (IMPORT, "return mine.ops.using_factor(x)"),
    "by a class of the module": (IMPORT, "return mine.ops.Scaler()(x)"),
    "closed over": (IMPORT, "ops = mine.ops\nreturn lambda x: ops.scale(x)"),
}
OPS = """
    FACTOR = {n}
    def scale(x):
        return x * {n}
    def using_factor(x):
        return x * FACTOR
    class Scaler:
        factors = ({n},)
        def __call__(self, x):
            return x * self.factors[0]
    """


@pytest.mark.parametrize("name", USES)
def test_a_change_in_another_module_of_the_user_is_seen(package, name):
    head, body = USES[name]
    found = []
    for number in (1, 1, 2):
        names = package(ops=OPS.format(n=number), deep="from mine import ops")
        exec(f"{head}\ndef f(x=None):\n{textwrap.indent(body, '    ')}", names)
        function = names["f"]() if name == "closed over" else names["f"]
        found.append(digest(function))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("line", ["import mine.ops", "from .ops import scale"])
def test_what_a_function_imports_when_it_runs_is_named(package, line):
    names = package(ops=OPS.format(n=1))
    exec(f"def f(x):\n    {line}\n    import math\n    return x", names)
    (told,) = unseen(names["f"])
    assert told.startswith("what `import") and told.endswith("brings in mine.train.f")


def test_a_part_of_a_module_that_is_not_used_does_not_count(package):
    found = []
    for number in (1, 2):
        names = package(ops=f"def scale(x): return x\ndef other(x): return {number}")
        exec("import mine.ops\ndef f(x): return mine.ops.scale(x)", names)
        found.append(digest(names["f"]))
    assert found[0] == found[1]


def test_modules_that_import_each_other_end(package):
    names = package(
        ops="import mine.deep\ndef scale(x): return mine.deep.up(x)",
        deep="import mine.ops\ndef up(x): return mine.ops.scale(x) if x else x",
    )
    exec("import mine.ops\ndef f(x): return mine.ops.scale(x)", names)
    assert digest(names["f"])


def by_key(x):
    return x * int(os.environ["TFAMP_TEST"])


def by_get(x):
    return x * int(os.environ.get("TFAMP_TEST", "1"))


def by_getenv(x):
    return x * int(os.getenv("TFAMP_TEST"))


@pytest.mark.parametrize("function", [by_key, by_get, by_getenv])
def test_variables_of_the_environment_count_by_their_value(monkeypatch, function):
    monkeypatch.setenv("TFAMP_TEST", "1")
    before = digest(function)
    assert digest(function) == before
    monkeypatch.setenv("TFAMP_TEST_OTHER", "5")
    assert digest(function) == before
    monkeypatch.setenv("TFAMP_TEST", "2")
    assert digest(function) != before
    assert unseen(function) == ()


def environment(x):
    return x * int(os.environ[__name__])


def opened(x):
    with open("factor.txt") as file:
        return x * int(file.read())


def loaded(x):
    return x * np.load("factor.npy")


def evaluated(x):
    return eval("x * 2")


@pytest.mark.parametrize(
    "function, told",
    [
        (environment, "`os.environ` in"),
        (opened, "what `open` reads in"),
        (loaded, "what `load` reads in"),
        (evaluated, "what `eval` does in"),
    ],
)
def test_what_only_runs_can_tell_is_named(function, told):
    assert unseen(function) == (f"{told} {__name__}.{function.__name__}",)


@pytest.fixture
def forget_packages():
    """Forgets which modules are installed, before a test adds folders and after."""

    def forget():
        objects.is_installed.cache_clear()

    forget()
    yield
    forget()


def test_packages_of_the_users_own_folder_are_installed(
    forget_packages, monkeypatch, tmp_path
):
    (tmp_path / "tfamp_test_package.py").write_text("def f(x): return x")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.setattr(site, "getusersitepackages", lambda: str(tmp_path))
        assert objects.is_installed("tfamp_test_package")
        assert objects.is_installed("tfamp_test_package.inner")
        assert not objects.is_installed(__name__)
