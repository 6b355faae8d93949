"""Patches come off without a trace, together, and never over somebody else's."""

import re
import types

import pytest

from tfamp.keras_hooks.patches import HeldPatches, HookError, Patch, PatchSet


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


def test_installing_and_removing_twice_changes_nothing():
    house = make_house()
    window = vars(house)["window"]
    patch = Patch(house, "window", opened)
    patch.install()
    placed = vars(house)["window"]
    patch.install()
    assert vars(house)["window"] is placed
    patch.remove()
    patch.remove()
    assert vars(house)["window"] is window


def test_the_replacement_is_given_the_original():
    module = types.ModuleType("house")
    module.rooms = lambda: 3
    patch = Patch(module, "rooms", lambda original: lambda: original() + 1)
    patch.install()
    assert module.rooms() == 4
    assert patch.label == "house.rooms"


def test_somebody_elses_replacement_is_left():
    house = make_house()
    patch = Patch(house, "window", opened)
    patch.install()
    house.window = theirs = lambda self: "broken"
    with pytest.warns(RuntimeWarning, match="replaced by other code after tfamp did"):
        patch.remove()
    assert vars(house)["window"] is theirs


def test_a_missing_attribute_is_an_error_before_any_change():
    house = make_house()
    window = vars(house)["window"]
    patches = PatchSet([Patch(house, "window", opened), Patch(house, "roof", opened)])
    with pytest.raises(HookError, match=re.escape("roof`")):
        patches.install()
    assert vars(house)["window"] is window
    assert patches.installed == ()


def test_an_optional_attribute_may_be_missing():
    house = make_house()
    patch = Patch(house, "roof", lambda original: original or "new", optional=True)
    patch.install()
    assert house.roof == "new"
    patch.remove()
    assert not hasattr(house, "roof")


class Guest:
    pass


def test_hooks_stay_for_a_guest_who_comes_while_the_last_one_leaves():
    house, guests, last = make_house(), [Guest()], Guest()

    class Held(HeldPatches):
        def install(self):
            super().install()
            if self.is_late:
                guests.clear()  # as the collector may, in any line of Python

    held = Held([Patch(house, "door", opened)])
    held.is_late = False
    held.hold(guests[0])
    held.is_late = True
    held.hold(last)
    assert house().door() == "open"
    del last
    assert house().door() == "shut"


def test_who_cannot_be_let_in_leaves_nothing():
    house = make_house()
    held = HeldPatches([Patch(house, "door", opened), Patch(house, "roof", opened)])
    guest = Guest()
    for _ in range(2):
        with pytest.raises(HookError, match="roof"):
            held.hold(guest)
        assert house().door() == "shut"
