"""What `import tfamp` loads, what it offers, and that a name stays what it is."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfamp

ROOT = Path(__file__).parents[1]
HOMES = tfamp._HOMES
RESULTS = tfamp._RESULTS
MAX_PUBLIC_NAMES = 32
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


def test_import_loads_no_framework():
    loaded = json.loads(
        run_python("import json, sys, tfamp; print(json.dumps(list(sys.modules)))")
    )
    assert "tfamp" in loaded
    assert not {"tensorflow", "keras", "numpy", "rich", "absl"}.intersection(loaded)


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


def test_there_are_at_most_32_public_names():
    assert len(HOMES) <= MAX_PUBLIC_NAMES


def test_dir_lists_the_public_names_and_no_others():
    assert {name for name in dir(tfamp) if not name.startswith("_")} == set(HOMES)


def test_types_of_results_are_classes_beside_the_public_names():
    assert not HOMES.keys() & RESULTS.keys()
    assert all(isinstance(getattr(tfamp, name), type) for name in RESULTS)


@pytest.mark.parametrize("name", HOMES | RESULTS)
def test_name_loads_from_its_home(name):
    value = getattr(tfamp, name)
    home = sys.modules[(HOMES | RESULTS)[name]]
    is_package = hasattr(home, "__path__")
    assert value is (vars(home).get(name, home) if is_package else vars(home)[name])


def test_unknown_name_is_an_attribute_error_without_loading_a_framework():
    output = run_python(
        "import sys, tfamp\n"
        "try:\n"
        "    tfamp.enabel\n"
        "except AttributeError as error:\n"
        "    print(error, error.name, 'tensorflow' in sys.modules)\n"
    )
    assert output == (
        "module 'tfamp' has no attribute 'enabel'. Did you mean tfamp.enable? "
        "enabel False\n"
    )


@pytest.mark.parametrize(
    "name, meant",
    [
        ("asignment", "tfamp.assignment"),
        ("bottleneck", "tfamp.data.bottleneck"),
        ("lr_find", "tfamp.training.lr_find"),
        ("measure", "tfamp.measure_policies"),
        ("NanRecovery", "tfamp.callbacks.NanRecovery"),
        ("Pipeline", "tfamp.data.Pipeline"),
        ("Pipelin", "tfamp.data.Pipeline"),
        ("serve", "the command `tfamp serve`"),
        ("run", "the command `tfamp run script.py`"),
        ("autocast", "tfamp.enable"),
        ("Accelerator", "tfamp.enable"),
        ("GradScaler", "tfamp.LossScaleOptimizer"),
        ("set_global_policy", "tfamp.enable(policy=...)"),
        ("MirroredStrategy", "tfamp.distribute.strategy"),
        ("half", "tfamp.apply(model, 'mixed_bfloat16')"),
        ("convert", "tfamp.apply"),
        ("quantise", "tfamp.export(..., dtype='int8')"),
        ("gradient_checkpointing", "tfamp.remat"),
        ("summary", "tfamp.assignment"),
        ("benchmark", "tfamp.compare"),
        ("load", "tfamp.load_model, or tfamp.load_exported"),
        ("save", "model.save, which keeps dtypes and the loss scale"),
        ("Dataset", "tfamp.data.Pipeline.from_dataset"),
        ("TensorBoard", "tfamp.callbacks.PrecisionMonitor"),
        ("ModelCheckpoint", "tfamp.callbacks.Resume, or Keras's own"),
        ("debug", "tfamp.triage"),
        ("is_enabled", "tfamp.status().enabled"),
        ("scale_learning_rate", "tfamp.training.scale_learning_rate"),
    ],
)
def test_a_name_that_stands_elsewhere_is_told(name, meant):
    message = re.escape(f"has no attribute '{name}'. Did you mean {meant}?")
    with pytest.raises(AttributeError, match=message):
        getattr(tfamp, name)


@pytest.mark.parametrize(
    "name, meant",
    [
        ("MicroBatches", "tfamp.find_batch_size, which gives batch and accumulation"),
        ("NanRecover", "tfamp.callbacks.NanRecovery"),
        ("compare", "tfamp.compare"),
    ],
)
def test_a_callback_that_is_not_there_is_told(name, meant):
    message = re.escape(f"has no attribute '{name}'. Did you mean {meant}?")
    with pytest.raises(AttributeError, match=message):
        getattr(tfamp.callbacks, name)


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
    text = run_python("import pydoc, tfamp; print(pydoc.render_doc(tfamp))")
    table = re.findall(r"^[A-Z]\w{2,6} {3,}(\w.*)$", tfamp.__doc__, re.MULTILINE)
    verbs = {verb.split(".")[0] for row in table for verb in row.split(", ")}
    assert len(table) == 8 and verbs <= set(HOMES)
    assert "estimate_memory(" in text and "__getattr__" not in text
    assert sorted(HOMES) == tfamp.__all__


def test_environment_is_checked_once_before_a_name_is_loaded(monkeypatch):
    from tfamp.records import versions

    calls = []
    monkeypatch.setattr(versions, "check_environment", lambda: calls.append(1))
    tfamp._check_environment.cache_clear()
    for name in ("enable", "disable", "scope"):
        tfamp.__getattr__(name)
    assert calls == [1]


def test_environment_is_checked_again_after_it_failed(monkeypatch):
    from tfamp.records import versions

    def refuse():
        raise ImportError("Keras runs on JAX")

    monkeypatch.setattr(versions, "check_environment", refuse)
    tfamp._check_environment.cache_clear()
    for _ in range(2):
        with pytest.raises(ImportError, match="^Keras runs on JAX$"):
            tfamp.__getattr__("enable")
    tfamp._check_environment.cache_clear()
