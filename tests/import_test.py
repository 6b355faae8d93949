"""What `import tfamp` loads, what it offers, and that a name stays what it is."""

import ast
import json
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfamp

ROOT = Path(__file__).parents[1]
HOMES = tfamp._HOMES
RESULTS = tfamp._RESULTS
# Python starts in about this much; a first read from a cold disk takes longer.
MAX_IMPORT_SECONDS = 0.05


def run_python(code: str) -> str:
    """Runs `code` in a fresh interpreter in the repository and returns its output."""
    completed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def names_under_type_checking() -> dict[str, str]:
    """Reads the second list of names, the one that editors see, from the source."""
    tree = ast.parse(Path(tfamp.__file__).read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    names = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "`as` marks the name as public"
            is_subpackage = node.module == "tfamp"
            home = f"tfamp.{alias.name}" if is_subpackage else node.module
            names[alias.name] = home
    return names


# What runs -> the frameworks that it does without.
LIGHT = {
    "pass": {"tensorflow", "keras", "numpy", "rich", "absl"},
    "tfamp.distribute.cluster()": {"tensorflow", "keras"},
    "from tfamp.records import versions; versions.check_environment()": {
        *("tensorflow", "keras", "numpy")
    },
    "hasattr(tfamp, 'enabel')": {"tensorflow", "keras"},
}


@pytest.mark.parametrize("code", LIGHT)
def test_import_and_what_needs_no_framework_load_none(code):
    ask = "import sys, json, tfamp; {}; print(json.dumps(list(sys.modules)))"
    loaded = json.loads(run_python(ask.format(code)))
    assert "tfamp" in loaded
    assert not LIGHT[code].intersection(loaded)


def test_import_takes_under_50_ms_beyond_python():
    code = (
        "import time; start = time.perf_counter(); import tfamp; "
        "print(time.perf_counter() - start)"
    )
    # The fastest of five: other programs can only add time.
    fastest = min(float(run_python(code)) for _ in range(5))
    assert fastest < MAX_IMPORT_SECONDS


def test_both_lists_of_public_names_agree():
    assert names_under_type_checking() == HOMES | RESULTS


def test_dir_lists_the_public_names_and_no_others():
    assert {name for name in dir(tfamp) if not name.startswith("_")} == set(HOMES)
    assert len(HOMES) <= 32


@pytest.mark.parametrize("name", HOMES | RESULTS)
def test_name_loads_from_its_home(name):
    value = getattr(tfamp, name)
    home = sys.modules[(HOMES | RESULTS)[name]]
    is_package = hasattr(home, "__path__")
    assert value is (vars(home).get(name, home) if is_package else vars(home)[name])


@pytest.mark.parametrize(
    "name, meant",
    [
        ("enabel", "tfamp.enable"),
        ("asignment", "tfamp.assignment"),
        ("bottleneck", "tfamp.data.bottleneck"),
        ("NanRecovery", "tfamp.callbacks.NanRecovery"),
        ("Pipelin", "tfamp.data.Pipeline"),
        ("serve", "the command `tfamp serve`"),
        ("autocast", "tfamp.enable"),
        ("GradScaler", "tfamp.LossScaleOptimizer"),
        ("set_global_policy", "tfamp.enable(policy=...)"),
        ("half", "tfamp.apply(model, 'mixed_bfloat16')"),
        ("quantise", "tfamp.export(..., dtype='int8')"),
        ("gradient_checkpointing", "tfamp.remat"),
        ("load", "tfamp.load_model, or tfamp.load_exported"),
        ("Dataset", "tfamp.data.Pipeline.from_dataset"),
        ("debug", "tfamp.triage"),
    ],
)
def test_a_name_that_stands_elsewhere_is_told(name, meant):
    message = re.escape(f"has no attribute '{name}'. Did you mean {meant}?")
    with pytest.raises(AttributeError, match=message):
        getattr(tfamp, name)


def test_every_name_that_is_told_stands_there():
    for name, place in tfamp._ELSEWHERE.items():
        for path in re.findall(r"\btfamp((?:\.\w+)+)", place.format(name)):
            value = tfamp
            for part in path.split(".")[1:]:
                # `status()` is called, and `enabled` is a field of what it returns.
                value = tfamp.Status if value is tfamp.status else value
                known = {*dir(value), *getattr(value, "__annotations__", ())}
                assert part in known or hasattr(value, part), place
                value = getattr(value, part, None)


def test_a_name_like_no_other_leads_to_the_help():
    with pytest.raises(AttributeError, match=re.escape("`help(tfamp)` lists")):
        tfamp.zzz  # noqa: B018


def test_help_lists_the_verbs_and_a_star_brings_them():
    text = pydoc.render_doc(tfamp)
    table = re.findall(r"^[A-Z]\w{2,6} {3,}(\w.*)$", tfamp.__doc__, re.MULTILINE)
    verbs = {verb.split(".")[0] for row in table for verb in row.split(", ")}
    assert len(table) == 8 and verbs <= set(HOMES)
    assert "estimate_memory(" in text and "__getattr__" not in text
    assert sorted(HOMES) == tfamp.__all__
