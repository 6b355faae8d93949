"""Patches come off without a trace, together, and never over somebody else's."""

import functools
import re

import pytest

from tfamp.keras_hooks.patches import HookError, InnerPatch, Patch, PatchSet


class Base:
    """Has an attribute that `House` inherits."""

    def door(self):
        return "shut"


def make_house():
    class House(Base):
        def window(self):
            return "shut"

    return House


def opened(original):
    return lambda self: "open"


def test_the_very_same_object_comes_back():
    house = make_house()
    window = vars(house)["window"]
    patch = Patch(house, "window", opened)
    patch.install()
    assert house().window() == "open"
    assert patch.is_installed
    patch.remove()
    assert vars(house)["window"] is window
    assert not patch.is_installed


def test_an_inherited_attribute_is_inherited_again():
    house = make_house()
    patch = Patch(house, "door", opened)
    patch.install()
    assert (house().door(), Base().door()) == ("open", "shut")
    patch.remove()
    assert "door" not in vars(house)


def test_what_decorators_of_others_call_is_replaced_inside_of_them():
    calls = []

    def noted(function):
        @functools.wraps(function)
        def around(self):
            calls.append(1)
            return function(self)

        return around

    house = make_house()
    decorated = house.window = noted(noted(house.window))
    patch = InnerPatch(house, "window", opened)
    patch.install()
    assert house.window is decorated
    assert (house().window(), len(calls)) == ("open", 2)
    patch.remove()
    assert (house().window(), len(calls)) == ("shut", 4)


def test_a_missing_attribute_is_an_error_before_any_change():
    house = make_house()
    window = vars(house)["window"]
    patches = PatchSet([Patch(house, "window", opened), Patch(house, "roof", opened)])
    with pytest.raises(HookError, match=re.escape("roof`")):
        patches.install()
    assert vars(house)["window"] is window
    assert patches.installed == ()
