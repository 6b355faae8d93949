"""A module in the folder of a test, where a command that names it finds it."""

import sys
import textwrap

import pytest


def written(name, source):
    """Returns a fixture that writes a module and makes its folder the current one."""

    @pytest.fixture(autouse=True)
    def module(tmp_path, monkeypatch):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        yield tmp_path
        sys.modules.pop(name, None)

    return module
