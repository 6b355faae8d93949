"""What users rely on: public names, how they are called, what their results have."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import tfamp

ROOT = Path(__file__).parents[1]

RESULTS = {
    "Assignment": "layers",
    "BatchSearch": "batch_size gradient_accumulation_steps trials",
    "Comparison": "verdict ratio table to_json to_html",
    "Findings": "findings errors warnings notes of table to_json",
    "Export": "parity size_bytes latency kept verdict",
    "LoadedModel": "predict signature runtime __call__",
    "LossScaleOptimizer": "scale applied_steps skipped_steps consecutive_skips "
    "gradient_norm freeze unfreeze scale_loss get_scaled_loss get_unscaled_gradients "
    "apply_gradients flush",
    "Measurement": "best table",
    "MemoryEstimate": "peak_bytes by_kind by_layer largest_batch",
    "PrecisionPlan": "layers evidence to_json from_json apply",
    "Proof": "half_share_of_flops operations casts causes",
    "Ranges": "layers best_loss_scale table to_json plot",
    "Sensitivity": "verdict guilty",
    "Status": "enabled policy hooks",
    "Triage": "cause layer evidence remedy",
    "data.Pipeline": "from_tfds from_images from_tfrecord from_csv from_arrays "
    "from_text from_dataset map on_error decode filter cache balance weights subset "
    "shard bucket augment shuffle batch prefetch take repeat build describe",
}


# What a type checker, and an editor, says of what a user writes.
SEEN = {
    "tfamp.enable('auto')": "tfamp.policy.Status",
    "tfamp.enable": "Literal['mixed_bfloat16']",
    "tfamp.scope('auto').__enter__()": "tfamp.policy.Status",
    "tfamp.apply": "keep_float32",
    "tfamp.compare": "-> tfamp.comparison.result.Comparison",
    "tfamp.data.Pipeline.from_arrays(1).map(print).batch(2)": "pipeline.Pipeline",
    "tfamp.enable(precision='16-mixed')": 'Unexpected keyword argument "precision"',
    "tfamp.data.Pipeline.from_directory": 'has no attribute "from_directory"',
    "tfamp.autocast": "Module has no attribute",
}


def named(name):
    value = tfamp
    for part in name.split("."):
        value = getattr(value, part)
    return value


def signature(name, value):
    """Returns a line that says how a public function or class is called."""
    found = inspect.signature(value)
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    text = str(found.replace(parameters=plain, return_annotation=found.empty))
    # Functions as defaults hold an address.
    text = re.sub("=<(?:function|built-in function) [^=,]*>(?=[,)])", "=...", text)
    return name + text


def signatures():
    for space in ("", "callbacks.", "data.", "distribute.", "training."):
        package = named(space.removesuffix(".")) if space else tfamp
        for name in dir(package):
            value = getattr(package, name)
            if name.startswith("_") or inspect.ismodule(value):
                continue
            if not (inspect.isclass(value) and issubclass(value, Exception)):
                yield signature(space + name, value)
    for cls in ("LossScaleOptimizer", "data.Pipeline"):
        for name in RESULTS[cls].split():
            value = getattr(named(cls), name)
            if callable(value):
                yield signature(f"{cls}.{name}", value)


def test_everything_is_called_as_it_was():
    """A line that goes or changes breaks programs; a new one is added to the file."""
    known = (ROOT / "tests" / "signatures.txt").read_text(encoding="utf-8")
    assert [*signatures()] == known.splitlines()


@pytest.mark.parametrize("name", RESULTS)
def test_it_has_what_is_documented(name):
    cls = named(name)
    is_record = dataclasses.is_dataclass(cls)
    known = {f.name for f in dataclasses.fields(cls)} if is_record else set()
    known |= {*dir(cls), *inspect.signature(cls).parameters, *cls.__annotations__}
    assert not set(RESULTS[name].split()) - known


@pytest.mark.slow("mypy reads TensorFlow")
def test_editors_see_the_types_of_decorated_functions_too(tmp_path):
    api = pytest.importorskip("mypy.api")
    script = tmp_path / "typed.py"
    lines = [f"reveal_type({text})" for text in SEEN]
    script.write_text("\n".join(["import tfamp", *lines]), encoding="utf-8")
    settings = ["--config-file", str(ROOT / "setup.cfg"), "--no-error-summary"]
    said, _, _ = api.run([*settings, str(script)])
    for number, expected in enumerate(SEEN.values(), start=2):
        assert expected in "".join(re.findall(rf"typed.py:{number}: .*", said)), said
