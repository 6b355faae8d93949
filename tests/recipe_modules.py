"""Recipes as modules of a test, where they find the pieces that they share."""

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"
TRAINING = sorted(path.name for path in RECIPES.glob("train_*.py"))
_RUNNABLE = {*TRAINING, "custom_loop.py"}
SHARED = sorted(p.stem for p in RECIPES.glob("*.py") if p.name not in _RUNNABLE)


def load(name):
    """Returns a recipe as a module, without running it."""
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def shared(name):
    """Gives a piece that recipes share, and takes all of them away afterwards."""
    path = list(sys.path)
    sys.path.insert(0, str(RECIPES))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path[:] = path
        for each in SHARED:
            sys.modules.pop(each, None)
