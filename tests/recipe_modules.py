"""Recipes as commands of a fresh process, and `tfamp.compare` in this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tfamp.trials import runner, worker
from tfamp.trials.run_records import Run

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "recipes"
RECIPES = sorted(path.name for path in FOLDER.glob("*.py"))
_SECONDS = 300


def run_recipe(recipe, *arguments, folder, environ=None):
    """Runs a recipe as a reader does, in a process that nothing has prepared."""
    command = [sys.executable, str(FOLDER / recipe), *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )


def record_of(finished):
    """Returns the JSON of the last line of a recipe that went well."""
    assert finished.returncode == 0, finished.stderr[-2000:]
    return json.loads(finished.stdout.splitlines()[-1])


def train_here(monkeypatch):
    """Has `tfamp.compare` train in this process, and time ten calls of each size."""
    in_a_process = runner.do

    def do(folder, task, **how):
        if task.steps and task.allowed_bytes:  # of another tool
            return in_a_process(folder, task, **how)
        if task.steps:
            return Run(task.policy, task.seed, "failed", "not measured in this process")
        worker.main([str(folder), task.to_json()])
        return Run.from_json(folder / f"{task.name}.json")

    monkeypatch.setattr(runner, "do", do)
    monkeypatch.setattr(worker, "_SECONDS", 0)
