"""Leaves out the examples of modules whose extra is not installed."""

import importlib.util

# Folder or file -> package without which it cannot be imported.
_NEEDS = {
    "tfamp/callbacks/resume/ray_checkpoints.py": "ray",
    "tfamp/serving/server": "starlette",
}
collect_ignore = [
    path for path, package in _NEEDS.items() if not importlib.util.find_spec(package)
]
