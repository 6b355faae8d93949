"""Recipes as modules of a test and as commands, in this process or in a fresh one."""

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import tfamp
from tfamp.trials import processes
from tfamp.trials.run import child, inference

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "recipes"
TRAINING = sorted(path.name for path in FOLDER.glob("train_*.py"))
# A recipe is a file that can be run; the others are what recipes share.
RECIPES = sorted(
    path.name
    for path in FOLDER.glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
_NAMES = [path.stem for path in FOLDER.glob("*.py")]
# One short layer is traced in a tenth of the time that the recipe's own take.
TINY = {"train_text.py": "--batch_size=8 --window=8 --width=8 --num_layers=1".split()}


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a command came to."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def record(self) -> dict:
        """The JSON of the last line of a command that went well."""
        assert self.returncode == 0, self.stderr[-2000:]
        return json.loads(self.stdout.splitlines()[-1])


def load(recipe):
    """Returns a recipe as a module under its own name, without running it."""
    name = recipe.removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(recipe, *arguments):
    """Returns a recipe's module and its flags, as a command line gives them."""
    module = load(recipe)
    settings = module.define_flags()
    settings([recipe, *TINY.get(recipe, ()), *arguments])
    return module, settings


@contextlib.contextmanager
def shared(*names):
    """Gives pieces that recipes share; what was loaded meanwhile goes afterwards."""
    path, before = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path[:] = path
        for name in set(_NAMES) - before:
            sys.modules.pop(name, None)


def run(recipe, *arguments):
    """Runs a recipe's command in this process, which keeps no policy of it."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        shared(),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            status = load(recipe).main([str(FOLDER / recipe), *arguments])
        finally:
            tfamp.disable()
    return Finished(status, output.getvalue(), errors.getvalue())


def run_process(recipe, *arguments):
    """Runs a recipe as a reader does, in a process that nothing has prepared."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(FOLDER / recipe), *arguments]
    environ = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    return Finished(done.returncode, done.stdout, done.stderr)


class RunHere(processes.RunProcess):
    """Trains in this process, which spares a run of a comparison its imports."""

    def go_on(self):
        """Trains to the end."""
        child.main([str(self._folder), self.policy, str(self.seed)])
        return False


def train_here(monkeypatch):
    """Has `tfamp.compare` train in this process, and time ten calls of each size."""
    monkeypatch.setattr(processes, "RunProcess", RunHere)
    monkeypatch.setattr(inference, "_SECONDS", 0)
