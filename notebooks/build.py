"""Writes every notebook from its percent script, and runs it for its outputs.

    python notebooks/build.py [--execute] [--to=FOLDER] [NOTEBOOK ...]

The script `NN_topic.py` is the source: `# %%` opens a code cell, `# %% [markdown]`
a text cell, and `# %% tags=["parameters"]` the code cell whose values papermill and
the tests replace. A line `# %pip ...` is a magic command of the notebook.
`REPOSITORY_URL` and `COLAB_URL` in a script stand for the repository's address in
setup.cfg and for this notebook in Colab.

The `.ipynb` beside it has ids that depend on each cell's text alone, and the same bytes
every time. `--execute` runs the notebooks whose code is no longer that of their
outputs, or those named, and stores the outputs with the machine and the versions.
Without it outputs stay where no code has changed, and are left out elsewhere.
"""

import argparse
import configparser
import copy
import hashlib
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
CELL = re.compile(
    r"^# %%(?P<markdown> \[markdown\])?(?: tags=(?P<tags>\[.*\]))?\n", re.MULTILINE
)
MAX_CELL_SECONDS = 300
# What TensorFlow's libraries write to standard error whatever the level is.
NOTICE = re.compile(
    r"^(?:[IWE]\d{4} .*|WARNING: All log messages before absl.*|.*computation placer "
    r"already registered.*|INFO:tensorflow:Assets written.*|INFO: Created TensorFlow "
    r"Lite.*|\r?Running Calibration:.*|\d{4}-\d\d-\d\d .*: [IWE] (?:tensorflow|"
    r"external).*)\n?",
    re.MULTILINE,
)


def repository_url() -> str:
    """Returns the repository's address, which stands in setup.cfg only."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    return settings["metadata"]["url"]


def cells(script: str) -> list[dict[str, Any]]:
    r"""Returns the notebook cells of a percent script.

    Example:
        >>> text, code = cells("# %% [markdown]\n# Hi\n# %%\n# %pip list\n")
        >>> text["source"], code["source"]
        (['Hi'], ['%pip list'])
        >>> cells('# %% tags=["parameters"]\nEPOCHS = 2\n')[0]["metadata"]
        {'tags': ['parameters']}
    """
    _, *parts = CELL.split(script)
    found = []
    for markdown, tags, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if markdown:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        else:
            text = re.sub(r"^# %pip ", "%pip ", text, flags=re.MULTILINE)
        kind = "markdown" if markdown else "code"
        text = text.strip("\n")
        cell = {
            "cell_type": kind,
            "id": hashlib.sha256(f"{kind} {text}".encode()).hexdigest()[:8],
            "metadata": {"tags": json.loads(tags)} if tags else {},
            "source": text.splitlines(keepends=True),
        }
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        found.append(cell)
    ids = [cell["id"] for cell in found]
    if len(set(ids)) < len(ids):
        raise ValueError("Two cells have the same text; a cell's id is made from it.")
    return found


def without_outputs(script: Path) -> dict[str, Any]:
    """Returns the notebook that a percent script stands for, never run."""
    url = repository_url()
    colab = url.replace(
        "https://github.com", "https://colab.research.google.com/github"
    )
    text = script.read_text(encoding="utf-8")
    text = text.replace("REPOSITORY_URL", url)
    text = text.replace("COLAB_URL", f"{colab}/blob/main/notebooks/{script.stem}.ipynb")
    return {
        "cells": cells(text),
        "metadata": {
            "accelerator": "GPU",
            "colab": {"gpuType": "T4", "provenance": []},
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


def code_cells(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the code cells of a notebook."""
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def take_outputs(content: dict[str, Any], executed: Mapping[str, Any]) -> bool:
    """Puts the outputs of a run into a notebook, if their code is the same.

    Args:
        content: Notebook without outputs, which is changed.
        executed: The same notebook after a run, or after an older one.

    Returns:
        Whether `content` has its outputs now.
    """
    ours, theirs = code_cells(content), code_cells(executed)
    run = executed["metadata"].get("outputs_from")
    if run is None or [c["source"] for c in ours] != [c["source"] for c in theirs]:
        return False
    for cell, done in zip(ours, theirs, strict=True):
        cell["execution_count"] = done["execution_count"]
        cell["outputs"] = done["outputs"]
    content["metadata"]["outputs_from"] = run
    said = f"Outputs: {run['device']}; {run['versions']}; {run['seconds']} s."
    content["cells"][-1]["source"] += ["\n", "\n", f"*{said}*"]
    return True


def small(content: dict[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a notebook with other parameters, as papermill puts them in.

    The cell that installs tfamp is emptied: what runs is this clone.

    Args:
        content: Notebook, which stays as it is.
        parameters: Values by name; each name stands in the cell tagged `parameters`.

    Raises:
        ValueError: The notebook has no parameter of that name.
    """
    changed = copy.deepcopy(content)
    for cell in code_cells(changed):
        if "".join(cell["source"]).startswith("%pip "):
            cell["source"] = []
        if "parameters" in cell["metadata"].get("tags", []):
            text = "".join(cell["source"])
            for name, value in parameters.items():
                pattern = rf"^{name} = .*$"
                if not re.search(pattern, text, re.MULTILINE):
                    raise ValueError(
                        f"Unknown parameter {name!r}; expected one of those in the "
                        f"cell tagged `parameters`:\n{text}"
                    )
                line = f"{name} = {value!r}"
                text = re.sub(pattern, lambda _, s=line: s, text, flags=re.MULTILINE)
            cell["source"] = text.splitlines(keepends=True)
    return changed


def execute(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns a notebook after a run from top to bottom in a kernel of its own.

    Args:
        content: Notebook; it stays as it is.
        folder: Where the kernel works.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    import nbclient
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    # A kernel of this very interpreter, whatever kernels the machine has.
    specs = KernelSpecManager(kernel_dirs=[])
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    search = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TQDM_DISABLE": "1",
    }
    environment.pop("MPLBACKEND", None)  # plots go into the notebook
    notebook = nbformat.from_dict(copy.deepcopy(content))
    for cell in notebook.cells:
        cell.source = "".join(cell.source)
    nbclient.NotebookClient(
        notebook,
        km=manager,
        timeout=MAX_CELL_SECONDS,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    ).execute(env=environment)
    return json.loads(nbformat.writes(notebook))


def cleaned(text: str) -> str:
    r"""Returns what a cell wrote, without notices and paths of this machine.

    Example:
        >>> cleaned("I0000 00:00:17 a.cc:1] hello\nat /a/ipykernel_8/12.py, line 3")
        'at <cell>, line 3'
    """
    text = NOTICE.sub("", text)
    text = re.sub(r"/[\w/.-]*ipykernel_\d+/\d+\.py", "<cell>", text)
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+", "<folder>", text)
    for folder in (Path(sys.prefix), Path(sys.prefix).resolve(), ROOT, Path.home()):
        text = text.replace(f"{folder}/", "")
    return text


def clean_outputs(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the outputs of a cell that readers look for, streams joined."""
    kept: list[dict[str, Any]] = []
    for output in outputs:
        output = copy.deepcopy(output)
        if output["output_type"] == "stream":
            text = cleaned("".join(output["text"]))
            if not text.strip():
                continue
            output["text"] = text.splitlines(keepends=True)
            before = kept[-1] if kept else {}
            if before.get("name") == output["name"]:
                before["text"] += output["text"]
                continue
        data = output.get("data", {})
        for kind in [kind for kind in data if kind.startswith("text/")]:
            text = cleaned("".join(data[kind]))
            data[kind] = text.splitlines(keepends=True)
        if output["output_type"] == "display_data" and data.get("text/plain") == []:
            continue  # a progress bar, taken away again
        if output["output_type"] == "execute_result":
            output["execution_count"] = None
        kept.append(output)
    return kept


def run(script: Path) -> dict[str, Any]:
    """Returns the notebook of a script after a run, with where it was run."""
    import tfamp

    content = without_outputs(script)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        executed = execute(small(content, {}), Path(folder))
    seconds = round(time.monotonic() - began)
    for cell, done in zip(code_cells(content), code_cells(executed), strict=True):
        cell["outputs"] = clean_outputs(done["outputs"])
    for number, cell in enumerate(code_cells(content), 1):
        cell["execution_count"] = number
        for output in cell["outputs"]:
            if output["output_type"] == "execute_result":
                output["execution_count"] = number
    versions = [f"Python {sys.version_info.major}.{sys.version_info.minor}"]
    for title, name in (("TensorFlow", "tensorflow"), ("Keras", "keras")):
        versions.append(f"{title} {importlib.metadata.version(name)}")
    device = (
        f"{tfamp.status().devices[0].name}, {len(os.sched_getaffinity(0))} CPU cores"
    )
    content["metadata"]["outputs_from"] = {
        "device": device,
        "versions": ", ".join(versions),
        "seconds": seconds,
    }
    return content


def notebook(script: Path, former: Mapping[str, Any] | None = None) -> str:
    """Returns the text of the `.ipynb` that a percent script stands for.

    Args:
        script: The source.
        former: Notebook with outputs; they are taken where the code is the same.
    """
    content = without_outputs(script)
    if former is not None:
        take_outputs(content, former)
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main(argv: list[str]) -> int:
    """Writes all notebooks, beside their scripts or into the folder given."""
    parser = argparse.ArgumentParser(prog=argv[0])
    parser.add_argument("--execute", action="store_true", help="Run what has changed.")
    parser.add_argument("--to", type=Path, default=FOLDER, help="Folder to write to.")
    parser.add_argument("notebooks", nargs="*", help="Such as 01_quickstart; or all.")
    options = parser.parse_args(argv[1:])
    for script in sorted(FOLDER.glob("[0-9][0-9]_*.py")):
        if options.notebooks and script.stem not in options.notebooks:
            continue
        before = script.with_suffix(".ipynb")
        former = json.loads(before.read_text("utf-8")) if before.is_file() else None
        is_old = former is None or not take_outputs(without_outputs(script), former)
        if options.execute and (is_old or options.notebooks):
            former = run(script)
        path = options.to / f"{script.stem}.ipynb"
        path.write_text(notebook(script, former), encoding="utf-8", newline="\n")
        print(path, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
