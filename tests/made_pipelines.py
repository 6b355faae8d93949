"""Pipelines made from plain data, for properties that hold for any of them.

A recipe is JSON: a source, what is mapped and, maybe, what is filtered. A function is
a list [kind, value] or [kind, value, inner function]; the kind says where in the
function the value stands.
"""

import functools
import json
import operator
import tempfile
import types

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies

from tfamp.data import Pipeline
from tfamp.data.plan import make_plan
from tfamp.data.stages import Settings
from tfamp.data.stages.cache import FileCache


def fingerprint_of(recipe):
    """Returns the fingerprint of what comes before a recipe's cache."""
    kind, values = recipe["source"]
    if kind == "arrays":
        pipeline = Pipeline.from_arrays(np.array(values))
    else:
        pipeline = Pipeline.from_dataset(tf.data.Dataset.from_tensor_slices(values))
    pipeline = pipeline.map(function_of(recipe["map"]))
    if recipe["filter"] is not None:
        pipeline = pipeline.filter(function_of(recipe["filter"]))
    pipeline = pipeline.cache(f"{tempfile.gettempdir()}/train")
    plan = make_plan(pipeline.source, pipeline.stages, Settings(1, False))
    cache = next(step for step in plan.steps if isinstance(step, FileCache))
    return cache.found


class Holder:
    def __init__(self, value):
        self.value = value

    def __call__(self, x):
        return x


class Layer(keras.layers.Layer):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def get_config(self):
        return {}


def _closed_over(value):
    return lambda x: (x, value)


def _default(value):
    def function(x, y=None):
        return x, y

    function.__defaults__ = (value,)
    return function


def _keyword(value):
    def function(x, *, y=None):
        return x, y

    function.__kwdefaults__ = {"y": value}
    return function


def _constant(value):
    return eval(f"lambda x: (x, {value!r})")


def _global(value):
    def function(x):
        return (lambda: VALUE)()  # noqa: F821

    names = {"__name__": __name__, "VALUE": value}
    return types.FunctionType(function.__code__, names)


def _of_a_module(value):
    def function(x):
        return mine.inner.VALUE  # noqa: F821

    module, module.inner = types.ModuleType("one"), types.ModuleType("one.inner")
    module.inner.VALUE = value
    names = {"__name__": __name__, "mine": module}
    return types.FunctionType(function.__code__, names)


def _attribute(value):
    return type("Made", (Holder,), {"attribute": value, "__module__": __name__})(0)


def _inherited(value):
    base = type("Base", (Holder,), {"attribute": [value], "__module__": __name__})
    return type("Made", (base,), {"__module__": __name__})(0)


def _method(wrap):
    def make(value):
        members = {"method": wrap(_closed_over(value)), "__module__": __name__}
        return type("Made", (Holder,), members)(0)

    return make


def _table(value):
    keys = tf.constant(["key", json.dumps(value)])
    filled = tf.lookup.KeyValueTensorInitializer(keys, tf.constant([1, 2]))
    return tf.lookup.StaticHashTable(filled, 0).lookup


KINDS = {
    "constant": _constant,
    "closed over": _closed_over,
    "default": _default,
    "keyword": _keyword,
    "global": _global,
    "of a module": _of_a_module,
    "attribute of an object": Holder,
    "attribute of a class": _attribute,
    "attribute of a base class": _inherited,
    "method": _method(lambda function: function),
    "static method": _method(staticmethod),
    "class method": _method(classmethod),
    "property": _method(property),
    "traced method": _method(tf.function),
    "traced": lambda value: tf.function(_closed_over(value)),
    "item": operator.itemgetter,
    "caller": lambda value: operator.methodcaller("call", value),
    "partial": lambda value: functools.partial(_default(0), y=value),
    "bound": lambda value: {"key": value}.get,
    "layer": Layer,
    "table": _table,
}
AROUND = ["closed over", "default", "global", "of a module", "attribute of an object"]
AROUND += ["attribute of a class", "attribute of a base class", "partial", "layer"]


def function_of(recipe):
    """Returns what is mapped: it holds its value, and an inner function."""
    kind, value, *inner = recipe
    return KINDS[kind]([value, function_of(*inner)] if inner else value)


LEAVES = strategies.one_of(
    strategies.none(),
    strategies.booleans(),
    strategies.integers(-(2**70), 2**70),
    strategies.floats(allow_nan=False, allow_infinity=False),
    strategies.text("ab/. é\n", max_size=6),
)
VALUES = strategies.recursive(
    LEAVES, lambda one: strategies.lists(one, min_size=1, max_size=3), max_leaves=3
)
FUNCTIONS = strategies.recursive(
    strategies.tuples(strategies.sampled_from(sorted(KINDS)), VALUES),
    lambda one: strategies.tuples(strategies.sampled_from(AROUND), VALUES, one),
    max_leaves=3,
)
NUMBERS = strategies.lists(strategies.integers(0, 9), min_size=1, max_size=4)
RECIPES = strategies.fixed_dictionaries(
    {
        "source": strategies.tuples(
            strategies.sampled_from(["arrays", "dataset"]), NUMBERS
        ),
        "map": FUNCTIONS,
        "filter": strategies.one_of(strategies.none(), FUNCTIONS),
    }
)


def places(recipe):
    """Returns the places of a recipe where one thing may be another, as paths."""
    found = [("source", 1, number) for number in range(len(recipe["source"][1]))]
    for name in ("map", "filter"):
        path, function = (name,), recipe[name]
        while function is not None:
            found.append((*path, 0))
            found.append((*path, 1))
            path = (*path, 2)
            function = function[2] if len(function) > 2 else None
    return found


@strategies.composite
def pairs(draw):
    """Draws two recipes that differ in one place."""
    recipe = plain(draw(RECIPES))
    *path, last = draw(strategies.sampled_from(places(recipe)))
    other = plain(recipe)
    inside = functools.reduce(operator.getitem, path, other)
    before = json.dumps(inside[last])
    if path[0] == "source":
        new = strategies.integers(0, 9)
    elif last == 0:
        new = strategies.sampled_from(AROUND if len(inside) > 2 else sorted(KINDS))
    else:
        new = VALUES
    inside[last] = plain(draw(new.filter(lambda one: json.dumps(one) != before)))
    return recipe, other


def plain(recipe):
    """Returns a copy of a recipe that shares nothing with it."""
    return json.loads(json.dumps(recipe))
