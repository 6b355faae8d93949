"""Writes every notebook from its percent script.

    python notebooks/build.py [folder to write to]

The script `NN_topic.py` is the source: `# %%` opens a code cell, `# %% [markdown]`
a text cell. The `.ipynb` beside it has no outputs, ids that depend on each cell's
text alone, and the same bytes every time. `REPOSITORY_URL` and `COLAB_URL` in a
script stand for the repository's address in setup.cfg and for this notebook in Colab.
"""

import configparser
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CELL = re.compile(r"^# %%(?P<markdown> \[markdown\])?\n", re.MULTILINE)


def repository_url() -> str:
    """Returns the repository's address, which stands in setup.cfg only."""
    settings = configparser.ConfigParser()
    settings.read(FOLDER.parent / "setup.cfg")
    return settings["metadata"]["url"]


def cells(script: str) -> list[dict[str, Any]]:
    r"""Returns the notebook cells of a percent script.

    Example:
        >>> text, code = cells("# %% [markdown]\n# Hi\n# %%\nx = 1\n")
        >>> text["source"], code["source"]
        (['Hi'], ['x = 1'])
    """
    _, *parts = CELL.split(script)
    found = []
    for markdown, text in zip(parts[::2], parts[1::2], strict=True):
        if markdown:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        kind = "markdown" if markdown else "code"
        text = text.strip("\n")
        cell = {
            "cell_type": kind,
            "id": hashlib.sha256(f"{kind} {text}".encode()).hexdigest()[:8],
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        found.append(cell)
    ids = [cell["id"] for cell in found]
    if len(set(ids)) < len(ids):
        raise ValueError("Two cells have the same text; a cell's id is made from it.")
    return found


def notebook(script: Path) -> str:
    """Returns the text of the `.ipynb` that a percent script stands for."""
    url = repository_url()
    colab = url.replace(
        "https://github.com", "https://colab.research.google.com/github"
    )
    text = script.read_text(encoding="utf-8")
    text = text.replace("REPOSITORY_URL", url)
    text = text.replace("COLAB_URL", f"{colab}/blob/main/notebooks/{script.stem}.ipynb")
    content = {
        "cells": cells(text),
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main(argv: list[str]) -> int:
    """Writes all notebooks, beside their scripts or into the folder given."""
    target = Path(argv[1]) if len(argv) > 1 else FOLDER
    for script in sorted(FOLDER.glob("[0-9][0-9]_*.py")):
        path = target / f"{script.stem}.ipynb"
        path.write_text(notebook(script), encoding="utf-8", newline="\n")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
