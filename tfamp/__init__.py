"""Mixed precision for Keras 3 on TensorFlow that is fast where it can be and right.

    import tfamp
    tfamp.enable(policy="auto")    # before the model is built; nothing else changes

Train     enable, disable, scope, status, LossScaleOptimizer, callbacks, training
See       check, assignment, lint, prove, ranges, sensitivity, doctor
Compare   compare, measure_policies, tune, PrecisionPlan
Repair    apply, triage
Memory    estimate_memory, find_batch_size, remat
Feed      data.Pipeline, data.fit_statistics, data.check, data.bottleneck
Scale     distribute.strategy
Keep      load_model, freeze, quantize_aware, export, load_exported, latency_check

`help(tfamp.enable)` tells of one. `tfamp --help` lists the commands, of which
`tfamp run train.py` enables and runs a program that stays as it is. Names load on
first use, so `import tfamp` costs no TensorFlow import.
"""

import functools
import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it; a public subpackage is its own home.
_HOMES = {
    "LossScaleError": "tfamp.loss_scale.stops",
    "LossScaleOptimizer": "tfamp.loss_scale.optimizer",
    "PrecisionPlan": "tfamp.plan",
    "apply": "tfamp.models",
    "assignment": "tfamp.models",
    "callbacks": "tfamp.callbacks",
    "check": "tfamp.numerics.check",
    "compare": "tfamp.comparison",
    "data": "tfamp.data",
    "disable": "tfamp.policy",
    "distribute": "tfamp.distribute",
    "doctor": "tfamp.cli.doctor",
    "enable": "tfamp.policy",
    "estimate_memory": "tfamp.memory.estimator",
    "export": "tfamp.serving.exports.exporter",
    "find_batch_size": "tfamp.memory.batch_search",
    "freeze": "tfamp.serving.frozen",
    "latency_check": "tfamp.serving.latency",
    "lint": "tfamp.numerics.lint",
    "load_exported": "tfamp.serving.runtimes",
    "load_model": "tfamp.models",
    "measure_policies": "tfamp.tuning.measured_policies",
    "prove": "tfamp.numerics.proof",
    "quantize_aware": "tfamp.serving.quantize_aware",
    "ranges": "tfamp.numerics.magnitudes",
    "remat": "tfamp.memory.rematerialisation",
    "scope": "tfamp.policy",
    "sensitivity": "tfamp.numerics.sensitivity",
    "status": "tfamp.policy",
    "training": "tfamp.training",
    "triage": "tfamp.numerics.triage",
    "tune": "tfamp.tuning",
}
# What the functions above return, for annotations; editors do not list them.
_RESULTS = {
    "Assignment": "tfamp.models",
    "BatchSearch": "tfamp.memory.batch_search",
    "Comparison": "tfamp.comparison.result",
    "Diagnosis": "tfamp.cli.diagnosis",
    "Export": "tfamp.serving.exports.exporter",
    "Findings": "tfamp.records.findings",
    "Latency": "tfamp.serving.latency",
    "LoadedModel": "tfamp.serving.runtimes.signature",
    "Measurement": "tfamp.tuning.measured_policies",
    "MemoryEstimate": "tfamp.memory.estimator",
    "Parity": "tfamp.serving.gate",
    "Proof": "tfamp.numerics.proof",
    "Ranges": "tfamp.numerics.magnitudes",
    "Sensitivity": "tfamp.numerics.sensitivity",
    "Triage": "tfamp.numerics.triage",
    "Status": "tfamp.policy",
}


@functools.cache
def _check_environment() -> None:
    """Checks once that Keras can be used here, and again as long as it cannot."""
    from tfamp.records import versions

    versions.check_environment()


def _imported(place: str) -> types.ModuleType:
    """Imports a module; says so where an untested Keras is why it cannot be."""
    try:
        return importlib.import_module(place)
    except (ImportError, AttributeError) as error:
        from tfamp.records import versions

        text = versions.blame_untested_keras(error)
        if text is None:
            raise
        from tfamp.keras_hooks.patches import HookError

        raise HookError(text) from error


# Where people look for what stands elsewhere: names of other libraries, of commands,
# of earlier versions.
_ELSEWHERE = {
    **dict.fromkeys(
        ("DeviceStats", "NanRecovery", "PrecisionMonitor", "Resume", "Throughput"),
        "tfamp.callbacks.{}",
    ),
    **dict.fromkeys(("Pipeline", "bottleneck", "fit_statistics"), "tfamp.data.{}"),
    **dict.fromkeys(("lr_find", "scale_learning_rate"), "tfamp.training.{}"),
    **dict.fromkeys(
        "Accelerator amp autocast init initialize mixed_precision prepare "
        "set_policy".split(),
        "tfamp.enable",
    ),
    **dict.fromkeys(
        ("CSVLogger", "EarlyStopping", "ReduceLROnPlateau", "TerminateOnNaN"),
        "keras.callbacks.{}",
    ),
    **dict.fromkeys(
        ("from_numpy", "from_pandas", "from_tensor_slices"),
        "tfamp.data.Pipeline.from_arrays",
    ),
    **dict.fromkeys(
        ("from_directory", "image_dataset_from_directory"),
        "tfamp.data.Pipeline.from_images",
    ),
    "from_generator": "tfamp.data.Pipeline.from_generator",
    **dict.fromkeys(
        ("Policy", "set_dtype_policy", "set_global_policy"),
        "tfamp.enable(policy=...)",
    ),
    **dict.fromkeys(
        ("GradScaler", "LossScale", "LossScaler"), "tfamp.LossScaleOptimizer"
    ),
    **dict.fromkeys(
        ("MirroredStrategy", "MultiWorkerMirroredStrategy", "strategy"),
        "tfamp.distribute.strategy",
    ),
    **dict.fromkeys(("TensorBoard", "Monitor"), "tfamp.callbacks.PrecisionMonitor"),
    "BackupAndRestore": "tfamp.callbacks.Resume",
    "Dataset": "tfamp.data.Pipeline.from_dataset",
    "FlightRecorder": "tfamp.callbacks.NanRecovery, which keeps the failing step",
    "MicroBatches": "tfamp.find_batch_size, which gives batch and accumulation",
    "ModelCheckpoint": "tfamp.callbacks.Resume, or Keras's own",
    "benchmark": "tfamp.compare",
    "check_data": "tfamp.data.check",
    "checkpoint": "tfamp.remat, or tfamp.callbacks.Resume",
    "compile": "model.compile, after tfamp.enable",
    "convert": "tfamp.apply",
    "debug": "tfamp.triage",
    "explain": "tfamp.assignment",
    "export_model": "tfamp.export",
    "find_batch": "tfamp.find_batch_size",
    "fit": "model.fit, after tfamp.enable",
    "gradient_checkpointing": "tfamp.remat",
    "half": "tfamp.apply(model, 'mixed_bfloat16')",
    "inspect": "tfamp.check",
    "is_enabled": "tfamp.status().enabled",
    "load": "tfamp.load_model, or tfamp.load_exported",
    "load_plan": "tfamp.PrecisionPlan.from_json",
    "measure": "tfamp.measure_policies",
    "memory": "tfamp.estimate_memory",
    "plan": "tfamp.tune",
    "policy": "tfamp.status().policy",
    "predict": "model.predict, or tfamp.load_exported(path).predict",
    "profile": "tfamp.prove",
    "qat": "tfamp.quantize_aware",
    "quantize": "tfamp.export(..., dtype='int8')",
    "run": "the command `tfamp run script.py`",
    "save": "model.save, which keeps dtypes and the loss scale",
    "seed_everything": "keras.utils.set_random_seed",
    "serve": "the command `tfamp serve`",
    "summary": "tfamp.assignment",
    "train": "model.fit, after tfamp.enable",
    "version": "tfamp.__version__",
}
# What arguments are called elsewhere -> here.
_ARGUMENTS = {
    **dict.fromkeys(("amp", "dtype", "mixed_precision", "precision"), "policy"),
    **dict.fromkeys(("exclude", "skip", "skip_layers"), "keep_float32"),
    "validation_data": "validation",
}


def _advice(name: str) -> str:
    """Returns what to write in the place of a name that is not here, "" if unknown."""
    import difflib

    if name.startswith("_"):  # asked for by tools, not by people
        return ""
    known = f"tfamp.{name}" if name in _HOMES else _ELSEWHERE.get(name)
    if known is None:
        close = difflib.get_close_matches(name, [*_HOMES, *_ELSEWHERE], n=1)
        if not close:
            return ". `help(tfamp)` lists what there is."
        known = _ELSEWHERE.get(close[0], "tfamp.{}").format(close[0])
    return f". Did you mean {known.format(name)}?"


if TYPE_CHECKING:
    from tfamp import callbacks as callbacks
    from tfamp import data as data
    from tfamp import distribute as distribute
    from tfamp import training as training
    from tfamp.cli.diagnosis import Diagnosis as Diagnosis
    from tfamp.cli.doctor import doctor as doctor
    from tfamp.comparison import compare as compare
    from tfamp.comparison.result import Comparison as Comparison
    from tfamp.loss_scale.optimizer import LossScaleOptimizer as LossScaleOptimizer
    from tfamp.loss_scale.stops import LossScaleError as LossScaleError
    from tfamp.memory.batch_search import BatchSearch as BatchSearch
    from tfamp.memory.batch_search import find_batch_size as find_batch_size
    from tfamp.memory.estimator import MemoryEstimate as MemoryEstimate
    from tfamp.memory.estimator import estimate_memory as estimate_memory
    from tfamp.memory.rematerialisation import remat as remat
    from tfamp.models import Assignment as Assignment
    from tfamp.models import apply as apply
    from tfamp.models import assignment as assignment
    from tfamp.models import load_model as load_model
    from tfamp.numerics.check import check as check
    from tfamp.numerics.lint import lint as lint
    from tfamp.numerics.magnitudes import Ranges as Ranges
    from tfamp.numerics.magnitudes import ranges as ranges
    from tfamp.numerics.proof import Proof as Proof
    from tfamp.numerics.proof import prove as prove
    from tfamp.numerics.sensitivity import Sensitivity as Sensitivity
    from tfamp.numerics.sensitivity import sensitivity as sensitivity
    from tfamp.numerics.triage import Triage as Triage
    from tfamp.numerics.triage import triage as triage
    from tfamp.plan import PrecisionPlan as PrecisionPlan
    from tfamp.policy import Status as Status
    from tfamp.policy import disable as disable
    from tfamp.policy import enable as enable
    from tfamp.policy import scope as scope
    from tfamp.policy import status as status
    from tfamp.records.findings import Findings as Findings
    from tfamp.serving.exports.exporter import Export as Export
    from tfamp.serving.exports.exporter import export as export
    from tfamp.serving.frozen import freeze as freeze
    from tfamp.serving.gate import Parity as Parity
    from tfamp.serving.latency import Latency as Latency
    from tfamp.serving.latency import latency_check as latency_check
    from tfamp.serving.quantize_aware import quantize_aware as quantize_aware
    from tfamp.serving.runtimes import load_exported as load_exported
    from tfamp.serving.runtimes.signature import LoadedModel as LoadedModel
    from tfamp.tuning import tune as tune
    from tfamp.tuning.measured_policies import Measurement as Measurement
    from tfamp.tuning.measured_policies import measure_policies as measure_policies
else:
    __all__ = sorted(_HOMES)

    def __getattr__(name: str) -> Any:
        package = sys.modules[__name__]
        place = _HOMES.get(name) or _RESULTS.get(name)
        if place is None:
            message = f"module {__name__!r} has no attribute {name!r}{_advice(name)}"
            raise AttributeError(message, name=name, obj=package)
        # The doctor tells what is wrong; exported models run without TensorFlow.
        if not place.startswith(("tfamp.cli.", "tfamp.serving.runtimes.")):
            _check_environment()
        home = _imported(place)
        value = home if place == f"{__name__}.{name}" else getattr(home, name)
        setattr(package, name, value)
        return value

    def __dir__() -> list[str]:
        dunders = {name for name in globals() if name.startswith("__")}
        return sorted(dunders.union(_HOMES))
