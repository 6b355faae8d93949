"""Hooks that objects hold, which come and go when the garbage collector likes."""

import pytest

from tfamp.keras_hooks.patches import HeldPatches, HookError, Patch


class House:
    def door(self):
        return "shut"


class Guest:
    pass


def opened(original):
    return lambda self: "open"


def test_hooks_stay_for_a_guest_who_comes_while_the_last_one_leaves():
    guests, last = [Guest()], Guest()

    class Held(HeldPatches):
        def install(self):
            super().install()
            if self.is_late:
                guests.clear()  # as the collector may, in any line of Python

    held = Held([Patch(House, "door", opened)])
    held.is_late = False
    held.hold(guests[0])
    held.is_late = True
    held.hold(last)
    assert House().door() == "open"
    del last
    assert House().door() == "shut"


def test_who_cannot_be_let_in_leaves_nothing():
    held = HeldPatches([Patch(House, "door", opened), Patch(House, "roof", opened)])
    guest = Guest()
    for _ in range(2):
        with pytest.raises(HookError, match="roof"):
            held.hold(guest)
        assert House().door() == "shut"
