"""What a fingerprint sees of the user's code: callables, classes, modules, layers."""

import abc
import collections
import dataclasses
import enum
import functools
import importlib
import operator
import re
import site
import sys
import textwrap
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp.data._fingerprint import fingerprint
from tfamp.data.fingerprints import objects


def digest(value):
    return fingerprint({"part": value}).digest


def unseen(value):
    return fingerprint({"part": value}).unseen


def class_of(attribute):
    """Returns an object of a class that has one attribute."""
    return type("Made", (), {"attribute": attribute, "__module__": __name__})()


def below(attribute):
    """Returns an object whose class inherits the attribute."""
    base = type("Base", (), {"attribute": attribute, "__module__": __name__})
    return type("Made", (base,), {"__module__": __name__})()


def adding(number):
    return lambda self: number


class Mapper:
    def __init__(self, number):
        self.number = number

    @tf.function
    def traced(self, x):
        return x * self.number


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number


class OwnList(list):
    pass


@dataclasses.dataclass
class Record:
    number: int = dataclasses.field(compare=False)


def bound(number, held=[]):  # noqa: B006, TensorFlow holds the object weakly
    held.append(Mapper(number))
    return held[-1].traced


def layer_class(number):
    class Scale(keras.layers.Layer):
        def call(self, x):
            return x * number

    return Scale()


class Held(keras.layers.Layer):
    """A layer that holds something its configuration does not tell."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def get_config(self):
        return {}


class NoConfig(keras.layers.Layer):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def get_config(self):
        raise NotImplementedError("none")


def table(number):
    return tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(
            tf.constant(["a", "b"]), tf.constant([number, 7], tf.int64)
        ),
        default_value=0,
    )


def mutable_table(number):
    made = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)
    made.insert(tf.constant(["a", "b", "c"]), tf.constant([number, 5, 6], tf.int64))
    return made


def vocabulary_table(number):
    return tf.lookup.StaticVocabularyTable(
        tf.lookup.KeyValueTensorInitializer(
            tf.constant(["a", f"b{number}"]), tf.constant([0, 1], tf.int64)
        ),
        num_oov_buckets=2,
    )


def adapted(number):
    layer = keras.layers.TextVectorization()
    layer.adapt([f"one word{number}"])
    return layer


def looked_up(number):
    lookup = table(number).lookup
    return tf.data.Dataset.from_tensor_slices(["a", "b"]).map(lambda x: lookup(x))


def scaled_by_variable(number):
    factor = tf.Variable(float(number))
    return tf.data.Dataset.range(3).map(lambda x: tf.cast(x, tf.float32) * factor)


def overridden(number):
    frozen = {"n": number}
    return frozen.get


def nested(number, depth=3000):
    value = [number]
    for _ in range(depth):
        value = [value]
    return value


def wrapped(number):
    function = adding(number)

    @functools.wraps(function)
    def outer(*args):
        return function(*args)

    return outer


def with_attribute(number):
    def function(x):
        return x * function.factor

    function.factor = number
    return function


def single_dispatch(number):
    @functools.singledispatch
    def function(x):
        return x

    function.register(int, adding(number))
    return function


MAKERS = {
    "itemgetter": operator.itemgetter,
    "attrgetter": lambda n: operator.attrgetter(f"a{n}"),
    "methodcaller": lambda n: operator.methodcaller("get", n),
    "methodcaller by keyword": lambda n: operator.methodcaller("get", key=n),
    "partial of itemgetter": lambda n: functools.partial(operator.itemgetter(n), 1),
    "bound method of a dict": overridden,
    "pattern": lambda n: re.compile(f"a{n}"),
    "range": lambda n: range(n),
    "bytearray": lambda n: bytearray([n]),
    "cached function": lambda n: functools.lru_cache(adding(n)),
    "wrapped function": wrapped,
    "function's attribute": with_attribute,
    "single dispatch": single_dispatch,
    "np.vectorize": lambda n: np.vectorize(adding(n)),
    "generator of numbers": np.random.default_rng,
    "structured array": lambda n: np.array([(1, n)], [("a", "i4"), ("b", "O")]),
    "masked array": lambda n: np.ma.array([1, 2], mask=[n == 1, False]),
    "default dict": lambda n: collections.defaultdict(adding(n)),
    "deque": lambda n: collections.deque([n]),
    "own list": lambda n: OwnList([n]),
    "slots": Slotted,
    "dataclass": Record,
    "deep list": nested,
    "ragged tensor": lambda n: tf.ragged.constant([[1], [n, 3]]),
    "enum": lambda n: enum.Enum("Colour", {"RED": n}).RED,
    "attribute: tuple": lambda n: class_of((1, n)),
    "attribute: list": lambda n: class_of([n]),
    "attribute: dict": lambda n: class_of({"n": n}),
    "attribute: array": lambda n: class_of(np.full(2, n)),
    "attribute: inherited": lambda n: below([n]),
    "attribute: object": lambda n: class_of(Slotted(n)),
    "method": lambda n: class_of(adding(n)),
    "method: inherited": lambda n: below(adding(n)),
    "method: static": lambda n: class_of(staticmethod(adding(n))),
    "method: class": lambda n: class_of(classmethod(adding(n))),
    "method: property": lambda n: class_of(property(adding(n))),
    "method: cached property": lambda n: class_of(functools.cached_property(adding(n))),
    "method: tf.function": lambda n: class_of(tf.function(adding(n))),
    "method: partial": lambda n: class_of(functools.partialmethod(adding(n), 1)),
    "bound tf.function": bound,
    "layer: class": layer_class,
    "layer: attribute": lambda n: Held({"factor": n}),
    "layer: no configuration": NoConfig,
    "layer: table": lambda n: Held(table(n)),
    "layer: variable": lambda n: Held(tf.Variable(float(n))),
    "layer: inner layers": lambda n: Held([Held(n)]),
    "layer: adapted": adapted,
    "layer: in a Sequential": lambda n: keras.Sequential([adapted(n)]),
    "table": table,
    "table: mutable": mutable_table,
    "table: vocabulary": vocabulary_table,
    "table of a dataset": looked_up,
    "variable of a dataset": scaled_by_variable,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_equal_makes_agree_and_others_differ(make):
    one, same, other = make(1), make(1), make(2)  # together, so that none is reused
    assert digest(one) == digest(same)
    assert digest(one) != digest(other)


SEEN = {name: make for name, make in MAKERS.items() if name != "np.vectorize"}


@pytest.mark.parametrize("make", SEEN.values(), ids=SEEN)
def test_all_of_it_is_seen(make):
    assert unseen(make(1)) == ()


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
    """Writes modules of a user's package, and imports them anew."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**modules):
        for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
            del sys.modules[name]
        folder = tmp_path / "mine"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
        for name, text in modules.items():
            path = folder / f"{name}.py"
            path.write_text(textwrap.dedent(text))
            # Python tells by seconds and size whether a compiled file is old.
            sys.modules.pop(f"mine.{name}", None)
        importlib.invalidate_caches()
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        names = {"__name__": "mine.train", "__package__": "mine"}
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        del before
        return names

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


USES = {
    "dotted": """
        import mine.ops
        def f(x):
            return mine.ops.scale(x)
        """,
    "dotted twice": """
        import mine.deep
        def f(x):
            return mine.deep.ops.scale(x)
        """,
    "inside": """
        def f(x):
            import mine.ops
            return mine.ops.scale(x)
        """,
    "inside, by another name": """
        def f(x):
            import mine.ops as others
            return others.scale(x)
        """,
    "inside, from": """
        def f(x):
            from mine.ops import scale as other
            return other(x)
        """,
    "inside, relative": """
        def f(x):
            from .ops import scale
            return scale(x)
        """,
    "inside, a module from": """
        def f(x):
            from mine import ops
            return ops.scale(x)
        """,
    "inside a function inside": """
        def f(x):
            def g(x):
                from mine import deep
                return deep.ops.scale(x)
            return g(x)
        """,
    "handed on": """
        import mine.ops as ops
        def call(module, x):
            return module.scale(x)
        def f(x):
            return call(ops, x)
        """,
    "handed on from inside": """
        def call(module, x):
            return module.scale(x)
        def f(x):
            from mine import ops
            return call(ops, x)
        """,
    "by a global of the module": """
        import mine.ops
        def f(x):
            return mine.ops.using_factor(x)
        """,
    "by a class of the module": """
        import mine.ops
        def f(x):
            return mine.ops.Scaler()(x)
        """,
    "closed over": """
        import mine.ops
        def make():
            ops = mine.ops
            return lambda x: ops.scale(x)
        f = make()
        """,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_change_in_another_module_of_the_user_is_seen(package, use):
    ops = """
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
    found = []
    for number in (1, 1, 2):
        names = package(
            ops=ops.format(n=number), deep="from mine import ops", late="import os"
        )
        exec(textwrap.dedent(use), names)
        found.append(digest(names["f"]))
    assert found[0] == found[1] != found[2]


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


def test_variables_of_the_environment_count_by_their_value(monkeypatch):
    import os

    def by_key(x):
        return x * int(os.environ["TFAMP_TEST"])

    def by_get(x):
        return x * int(os.environ.get("TFAMP_TEST", "1"))

    def by_getenv(x):
        return x * int(os.getenv("TFAMP_TEST"))

    for function in (by_key, by_get, by_getenv):
        monkeypatch.setenv("TFAMP_TEST", "1")
        before = digest(function)
        assert digest(function) == before
        monkeypatch.setenv("TFAMP_TEST_OTHER", "5")
        assert digest(function) == before
        monkeypatch.setenv("TFAMP_TEST", "2")
        assert digest(function) != before
        assert unseen(function) == ()


def test_what_only_runs_can_tell_is_named():
    import os

    name = "TFAMP_TEST"

    def environment(x):
        return x * int(os.environ[name])

    def opened(x):
        with open("factor.txt") as file:
            return x * int(file.read())

    def loaded(x):
        return x * np.load("factor.npy")

    def evaluated(x):
        return eval("x * 2")

    here = f"{__name__}.test_what_only_runs_can_tell_is_named.<locals>"
    assert unseen(environment) == (f"`os.environ` in {here}.environment",)
    assert unseen(opened) == (f"what `open` reads in {here}.opened",)
    assert unseen(loaded) == (f"what `load` reads in {here}.loaded",)
    assert unseen(evaluated) == (f"what `eval` does in {here}.evaluated",)


def test_what_no_one_can_look_into_is_named():
    assert unseen({"a": (x for x in range(3))}) == ("a builtins.generator",)
    assert unseen(np.frompyfunc(adding(1), 1, 1)) != ()
    made = tf.lookup.experimental.DenseHashTable(tf.string, tf.int64, 0, "", "$")
    assert unseen(made) == ("a DenseHashTable",)
    made.insert(tf.constant(["a"]), tf.constant([1], tf.int64))
    mapped = tf.data.Dataset.from_tensor_slices(["a"]).map(lambda x: made.lookup(x))
    assert unseen(mapped) == ("a resource that a dataset holds",)


def test_installed_packages_count_by_version():
    assert digest(tf.image.resize) == digest(tf.image.resize)
    assert unseen(tf.image.resize) == unseen(np) == unseen(keras.layers.Dense) == ()
    assert digest(tf.abs) != digest(tf.negative)


def test_a_function_reads_the_same_before_and_after_it_was_traced():
    layer = keras.layers.Rescaling(0.5)
    config = types.SimpleNamespace(factor=2)

    def unchanged(x):
        return x

    def function(x):
        x = tf.ensure_shape(tf.numpy_function(unchanged, [x], tf.int64), ())
        return layer(tf.cast(x, tf.float32)) * config.factor

    before = digest(function)
    list(tf.data.Dataset.range(3).map(function))
    assert digest(function) == before


@pytest.fixture
def forget_packages():
    """Forgets which modules are installed, before a test adds folders and after."""

    def forget():
        objects.is_installed.cache_clear()
        objects._folders.cache_clear()

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
