"""What users rely on: public names, how they are called, what their results have."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import tfamp

ROOT = Path(__file__).parents[1]

PARAMETERS = {  # by position, then by keyword with its default
    "enable": ("policy=auto | keep_float32=default loss_scale=dynamic check=keep"),
    "scope": ("policy=auto | keep_float32=default loss_scale=dynamic"),
    "apply": "model policy=None | keep_float32=default",
    "assignment": "model",
    "load_model": "path",
    "check": "model data=None | policy=auto",
    "compare": "build_model train validation | seeds=3 epochs=1 tolerance",
    "prove": "model data",
    "ranges": "model data",
    "sensitivity": "model data | dtype=float16",
    "lint": "model data=None | loss=None optimizer=None",
    "triage": "model batch_or_bundle",
    "tune": "build_model_or_model data | policy=auto tolerance=0.005 metric=None "
    "max_evaluations=12",
    "measure_policies": "build_model_or_model data | budget_seconds=20.0",
    "estimate_memory": "model_or_build batch_size | optimizer=None policy=None "
    "training=True measure=False",
    "find_batch_size": "build_model data | max_memory_bytes=None",
    "remat": "model_or_layers",
    "freeze": "model dtype=bfloat16",
    "quantize_aware": "model | weights=int8 activations=int8 keep=()",
    "export": "model path | format=auto dtype=float32 calibration=None "
    "validation=None tolerance=0.005",
    "load_exported": "path",
    "latency_check": "model_or_url x",
    "LossScaleOptimizer": "inner_optimizer initial_scale=32768.0 "
    "dynamic_growth_steps=2000 | dynamic=True growth_factor=2.0 backoff_factor=0.5 "
    "hysteresis=1 min_scale max_scale gradient_accumulation_steps "
    "max_consecutive_skips=64 reduce_dtype=None name=None",
    "callbacks.PrecisionMonitor": "log_dir=None csv_path=None",
    "callbacks.NanRecovery": "directory",
    "callbacks.Resume": "directory | every_steps",
    "data.fit_statistics": "dataset",
    "data.check": "train validation=None | compute_dtype",
    "data.bottleneck": "model dataset",
    "distribute.strategy": "cluster=auto",
}
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


@pytest.mark.parametrize("name", PARAMETERS)
def test_it_is_called_as_documented(name):
    signature = inspect.signature(named(name))
    positional, _, keywords = PARAMETERS[name].partition("|")
    known = list(signature.parameters.values())
    for place, text in enumerate(positional.split()):
        assert known[place].name == text.partition("=")[0]
        assert known[place].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    for text in (*positional.split(), *keywords.split()):
        parameter, _, default = text.partition("=")
        found = signature.parameters[parameter]
        if default:
            assert str(found.default) == default


@pytest.mark.parametrize("name", RESULTS)
def test_it_has_what_is_documented(name):
    cls = named(name)
    is_record = dataclasses.is_dataclass(cls)
    known = {f.name for f in dataclasses.fields(cls)} if is_record else set()
    known |= {*dir(cls), *inspect.signature(cls).parameters, *cls.__annotations__}
    assert not set(RESULTS[name].split()) - known


def test_editors_see_the_types_of_decorated_functions_too(tmp_path):
    api = pytest.importorskip("mypy.api")
    script = tmp_path / "typed.py"
    lines = [f"reveal_type({text})" for text in SEEN]
    script.write_text("\n".join(["import tfamp", *lines]), encoding="utf-8")
    settings = ["--config-file", str(ROOT / "setup.cfg"), "--no-error-summary"]
    said, _, _ = api.run([*settings, str(script)])
    for number, expected in enumerate(SEEN.values(), start=2):
        assert expected in "".join(re.findall(rf"typed.py:{number}: .*", said)), said
