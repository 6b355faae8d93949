"""The process of one run: `python -m tfamp.trials.run.child FOLDER POLICY SEED`.

A fourth argument is the descriptor of a pipe to tell how far it is, and "in_turns" as a
fifth one has it wait for its turns. It leaves a record of the run, or of the error that
ended it, and the trained weights.
"""

import contextlib
import dataclasses
import datetime
import os
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from tfamp.machine import devices
from tfamp.machine import memory as process_memory
from tfamp.plan import read_plan
from tfamp.records import checks, versions
from tfamp.records.checks import short_error
from tfamp.records.versions import VARIABLES
from tfamp.stepping.arguments import arrays_of, dataset_of
from tfamp.trials import parcel
from tfamp.trials.job import FILE, Job, file_name
from tfamp.trials.run import example_metrics, inference, step_profiles
from tfamp.trials.run.training import Trained, train
from tfamp.trials.run_records import Context, LayerDtype, Memory, Run
from tfamp.trials.storage import CONTEXT_FILE, model_of, profile_of
from tfamp.trials.turns import Line, end_with_parent
from tfamp.trials.variant import Variant, in_force


def look(*, command: str = "") -> Context:
    """Returns the context of this process."""
    threading = tf.config.threading
    onednn = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1").lower()
    return Context(
        devices=devices.devices(),
        driver=_driver(),
        versions={"tfamp": tfamp.__version__, **versions.installed_versions()},
        system=f"{platform.platform()}, Python {platform.python_version()}",
        num_cores=_num_cores(),
        intra_op_threads=threading.get_intra_op_parallelism_threads(),
        inter_op_threads=threading.get_inter_op_parallelism_threads(),
        tf32=bool(tf.config.experimental.tensor_float_32_execution_enabled()),
        onednn=onednn not in ("0", "false"),
        variables={k: os.environ[k] for k in VARIABLES if k in os.environ},
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def _num_cores() -> int:
    """Returns the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _driver() -> str:
    """Returns the version of NVIDIA's driver, "" without one."""
    try:
        pynvml: Any = checks.require("pynvml", extra="gpu", purpose="The driver")
    except ImportError:
        return ""
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
        return version.decode() if isinstance(version, bytes) else str(version)
    return ""


def main(argv: Sequence[str]) -> int:
    """Runs once and returns 0, or 1 if it failed."""
    folder, policy, seed = Path(argv[0]), argv[1], int(argv[2])
    # Two processes cannot both have the whole of a GPU's memory.
    takes_turns = "in_turns" in argv[4:] and not tf.config.get_visible_devices("GPU")
    line = Line(int(argv[3]) if len(argv) > 3 else None, takes_turns=takes_turns)
    job = Job.from_json(folder / FILE)
    record = folder / f"{file_name(policy, seed)}.json"
    try:
        run = measure(folder, job, policy, seed, line=line)
    except Exception as error:
        # The whole of it goes to the log; the record has what it comes to.
        traceback.print_exc()
        Run(policy, seed, status="failed", error=short_error(error)).to_json(record)
        return 1
    run.to_json(record)
    return 0


def measure(
    folder: Path, job: Job, policy: str, seed: int, *, line: Line | None = None
) -> Run:
    """Trains one model and returns what it measured."""
    variant = Variant.parse(policy)
    with in_force(variant) as (resolved, reason):
        run = _measure(folder, job, variant, Run(policy, seed), line=line)
    plan = read_plan(variant.policy) if variant.is_plan else None
    if plan is not None and plan.jit_compile:
        resolved = f"{resolved}+xla"
    return dataclasses.replace(run, resolved_policy=resolved, reason=reason)


def _measure(
    folder: Path, job: Job, variant: Variant, run: Run, *, line: Line | None
) -> Run:
    """Returns the run with what it measured under what is in force."""
    policy, seed = run.policy, run.seed
    if not (folder / CONTEXT_FILE).exists():
        look(command=job.command).to_json(folder / CONTEXT_FILE)
    start_bytes = process_memory.process_bytes()
    process_memory.reset_device_peak()
    can_reset = process_memory.reset_peak()
    started = time.perf_counter()
    model, train_data, validation = build(folder, job, variant, seed)
    build_seconds = time.perf_counter() - started
    name = file_name(policy, seed)
    trained = train(model, train_data, validation, job=job, line=line)
    memory = Memory(
        start_bytes=start_bytes,
        # Kernels count both to some pages only, and a small model needs few more.
        training_bytes=max(start_bytes, process_memory.peak_process_bytes()),
        device_bytes=process_memory.device_peak_bytes(),
        device_used_bytes=trained.device_used_bytes,
    )
    _keep_weights(model, trained, folder / name)
    notes = list(trained.notes)
    num_examples, why = _per_example(model, validation, trained, job, folder, run)
    notes += why
    if can_reset:
        process_memory.reset_peak()
    latencies, why = inference.latencies(
        model,
        trained.inputs,
        sizes=sorted({*job.latency_batch_sizes, trained.batch_size}),
        jit_compile=variant.jit_compile,
        line=line,
    )
    notes += why
    if can_reset and latencies:
        memory = dataclasses.replace(
            memory, inference_bytes=process_memory.peak_process_bytes()
        )
    if job.profile_steps and seed == job.seeds[0]:
        notes += _profile(model, train_data, job, profile_of(folder, policy, seed))
    file_bytes, why = _file_bytes(
        model,
        model_of(folder, policy, seed),
        keep=job.keeps_models and seed == job.seeds[0],
    )
    notes += why
    return dataclasses.replace(
        run,
        batch_size=trained.batch_size,
        num_steps=trained.num_steps,
        num_epochs=job.epochs,
        num_parameters=model.count_params(),
        examples_per_second=trained.examples_per_second,
        step=trained.step,
        warmup_steps=trained.warmup_steps,
        build_seconds=build_seconds,
        first_step_seconds=trained.first_step_seconds,
        history=trained.history,
        final_metrics=trained.final_metrics,
        num_examples=num_examples,
        losses=trained.losses,
        loss_scales=trained.loss_scales,
        skipped_steps=trained.skipped_steps,
        num_nonfinite_weights=num_nonfinite(model),
        latencies=latencies,
        memory=memory,
        energy_joules=trained.energy_joules,
        file_bytes=file_bytes,
        layers=layers_of(model),
        notes=tuple(notes),
    )


def build(
    folder: Path, job: Job, variant: Variant, seed: int
) -> tuple[keras.Model, Any, Any]:
    """Returns the compiled model and its data, made anew from a seed."""
    keras.utils.set_random_seed(seed)
    build_model, train_data, validation = parcel.unpack(folder)
    built = parcel.call(build_model, seed=seed, epochs=job.epochs)
    if isinstance(built, tuple):
        model, *own = built
        if len(own) not in (1, 2) or train_data is not None:
            raise ValueError(
                f"`build_model` returned {len(built)} values; expected a compiled "
                "model, or (model, train, validation) where no data is passed."
            )
        train_data, validation = own[0], own[1] if len(own) == 2 else None
    else:
        model = built
    if not isinstance(model, keras.Model) or not model.compiled:
        raise TypeError(
            f"`build_model` returned {model!r}; expected a compiled `keras.Model`. "
            "Call `model.compile` in it and return the model."
        )
    if variant.jit_compile:
        model.jit_compile = True
    if train_data is None:
        raise ValueError(
            "There is no training data; expected `train`, or a `build_model` that "
            "returns (model, train, validation). Pass one of them."
        )
    values = [
        parcel.call(value, seed=seed, epochs=job.epochs) if callable(value) else value
        for value in (train_data, validation)
    ]
    return model, _as_fit_takes_it(values[0]), _as_fit_takes_it(values[1])


def layers_of(model: keras.Model) -> tuple[LayerDtype, ...]:
    """Returns the dtypes of each layer, managed by tfamp or not."""
    return tuple(
        LayerDtype(
            row.path, row.class_name, row.compute_dtype, row.variable_dtype, row.rule
        )
        for row in tfamp.assignment(model)
    )


def num_nonfinite(model: keras.Model) -> int:
    """Returns how many weights are NaN or inf."""
    arrays = [np.asarray(weight, np.float32) for weight in model.get_weights()]
    return int(sum(array.size - np.isfinite(array).sum() for array in arrays))


def _as_fit_takes_it(data: Any) -> Any:
    """Returns arrays as a tuple, a `PyDataset` as it is, all else as a dataset."""
    if data is None or isinstance(data, keras.utils.PyDataset):
        return data
    arrays = arrays_of(data, needs_targets=False)
    return dataset_of(data) if arrays is None else arrays


def _keep_weights(model: keras.Model, trained: Trained, path: Path) -> None:
    """Writes trainable weights before and after training, in float32."""
    after = [np.asarray(value, np.float32) for value in model.trainable_weights]
    arrays: dict[str, Any] = {f"after_{i}": array for i, array in enumerate(after)}
    arrays |= {f"before_{i}": array for i, array in enumerate(trained.first_weights)}
    np.savez(f"{path}.npz", **arrays)


def _per_example(
    model: keras.Model,
    validation: Any,
    trained: Trained,
    job: Job,
    folder: Path,
    run: Run,
) -> tuple[int, list[str]]:
    """Writes the metrics of each example; returns how many, or why they are unknown."""
    if validation is None:
        return trained.num_examples, []
    try:
        found = example_metrics.measure(
            model, validation, trained.final_metrics, batch_size=job.batch_size
        )
        found.write(folder, run.policy, run.seed)
        return found.number, []
    except Exception as error:
        # Data and metrics of the user's own fail in their own ways; the run is done.
        return 0, [f"The metric of single examples is not known: {short_error(error)}"]


def _profile(model: keras.Model, data: Any, job: Job, directory: Path) -> list[str]:
    """Takes a profile, or returns why there is none."""
    try:
        step_profiles.profile(model, data, job=job, directory=directory)
        return []
    except (
        ImportError,
        OSError,
        RuntimeError,
        ValueError,
        tf.errors.OpError,
    ) as error:
        # The run itself is done; it is not lost for that.
        return [f"There is no profile: {short_error(error)}"]


def _file_bytes(
    model: keras.Model, path: Path, *, keep: bool
) -> tuple[int | None, list[str]]:
    """Returns the size of the saved model, or why there is none."""
    try:
        model.save(path)
        return path.stat().st_size, []
    except Exception as error:
        # Saving fails in as many ways as there are layers that cannot be saved.
        path.unlink(missing_ok=True)
        return None, [f"The model cannot be saved: {short_error(error)}"]
    finally:
        if not keep:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    end_with_parent()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main(sys.argv[1:]))
