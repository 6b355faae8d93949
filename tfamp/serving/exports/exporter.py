"""`tfamp.export`: a model as files that are smaller, faster, and still right."""

import dataclasses
import itertools
import os
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras

from tfamp.records import checks
from tfamp.serving.exports import choosing, kept_layers
from tfamp.serving.exports.candidates import (
    check_target,
    compared,
    place,
    said_if_full,
)
from tfamp.serving.exports.choosing import Choice, Export
from tfamp.serving.exports.kept_layers import write_sparing
from tfamp.serving.exports.request import (
    DTYPES,
    POSSIBLE,
    SCHEMES,
    Request,
    check_possible,
)
from tfamp.serving.exports.source import (
    BATCH,
    Source,
    calibration_batches,
    first_inputs,
    float32_copy,
    spread_text,
    tried_inputs,
)
from tfamp.serving.parity.result import Parity
from tfamp.serving.runtimes.manifest import RUNTIMES
from tfamp.stepping.arguments import check_built, dataset_of

_AUTO = "auto"


def export(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    format: str = _AUTO,
    dtype: str = "float32",
    scheme: str | None = None,
    calibration: Any = None,
    validation: Any = None,
    metric: Any = None,
    tolerance: float = 0.005,
    keep_float32: Iterable[str] = (),
    batch_size: int | None = None,
    budget_seconds: float = 120.0,
    write_failed: bool = False,
) -> Export:
    """Writes a model for a runtime that only predicts, and compares it with float32.

    A copy of the model goes back to float32 and is lowered by the runtime's own tools,
    so that models under any policy, and frozen ones, can be exported; the model itself
    stays as it is. The file is loaded and run in a fresh process, and compared on the
    validation data, before it takes its place.

    Args:
        model: A built model, compiled or not. Preprocessing layers come along where the
            format has their operations.
        path: The folder to write: a new name, or a former export, which is replaced.
        format: "saved_model", "litert", "onnx" or "openvino". "auto" writes all that
            are installed, times them in turns, and keeps the fastest that passes; the
            most exact one of those within 5 % of it.
        dtype: "float32", "float16", "bfloat16" or "int8" for the weights; inputs and
            outputs stay as they are. "auto" tries float32 and int8.
        scheme: For integers: "weights" rounds only them, "dynamic" measures the range
            of activations at each call, "static" once, on `calibration`. None takes
            the one that suits the format, or tries all of them under "auto".
        calibration: Inputs for "static": x, (x, y), or a dataset of batches; at most
            512 examples are read. Float inputs must be finite.
        validation: (x, y) or a dataset of batches, on which the metric is compared; or
            x alone, for the outputs. Without it the verdict is "undecided".
        metric: As in `tfamp.compare`'s gate: a Keras metric's name or a function of
            targets and outputs; None takes the accuracy where labels are classes.
        tolerance: By how much the metric may be worse.
        keep_float32: Paths of layers that stay in float32, beside the head and those
            that integers spoil, which are found where there is validation data.
        batch_size: Examples in the calls that are to be fast, timed beside one.
        budget_seconds: For writing and timing candidates under "auto", and as much for
            the float32 of other runtimes that the chosen one is timed against.
        write_failed: Whether an export that is worse is written nevertheless.

    Returns:
        What was written: `.verdict`, `.parity`, `.size_bytes`, `.kept`, `.tried`, and
        `.load()`; `print` shows a table.

    Raises:
        FileExistsError: Something else than an export is at `path`.
        ImportError: A package is missing; the message names the extra of tfamp.
        OSError: The disk is full, or does not let the folder be written.
        TypeError: `model` is not a Keras model.
        ValueError: The format cannot express the model or dtype, the file does not run,
            or it is worse than the tolerance allows. What was at `path` stays.

    Example:
        >>> import keras, tempfile
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> path = f"{tempfile.mkdtemp()}/model"
        >>> export(model, path, format="onnx", dtype="bfloat16")
        Traceback (most recent call last):
        ...
        ValueError: Format 'onnx' has no bfloat16, or no runtime that loads it; ...
        >>> found = export(model, path)  # doctest: +SKIP
        >>> found.load().predict([[1.0, 2.0, 3.0, 4.0]]).shape  # doctest: +SKIP
        (1, 2)
    """
    target = Path(path)
    checks.choice("format", format, (_AUTO, *RUNTIMES))
    checks.choice("dtype", dtype, (*DTYPES, _AUTO))
    if scheme is not None:
        checks.choice("scheme", scheme, SCHEMES)
    checks.fraction("tolerance", tolerance, closed=False)
    checks.positive("budget_seconds", budget_seconds)
    if batch_size is not None:
        checks.positive_int("batch_size", batch_size)
    check_target(target)
    is_alone = _AUTO not in (format, dtype)
    if is_alone:
        scheme = check_possible(format, dtype, scheme)
    check_built(model, "export")
    formats = RUNTIMES if format == _AUTO else (format,)
    dtypes = ("float32", "int8") if dtype == _AUTO else (dtype,)
    float32_bytes = _float32_bytes(model)
    # Read more than once, and a generator cannot be begun again.
    validation, calibration = (
        None if data is None else dataset_of(data, size, needs_targets=False, name=name)
        for data, size, name in (
            (validation, batch_size or BATCH, "validation"),
            (calibration, BATCH, "calibration"),
        )
    )
    with tempfile.TemporaryDirectory(prefix="tfamp-export-") as scratch:
        with said_if_full(float32_bytes):
            copy = float32_copy(model)
            copy.loss = getattr(model, "loss", None)  # what the gate compares by
            source = Source(
                copy,
                first_inputs(validation, calibration),
                batch_size,
                validation,
                metric,
                tolerance,
            )
            requests = _requests(
                source, formats, dtypes, scheme, calibration, keep_float32
            )
            source.check_runs()
            if is_alone:
                folder = Path(scratch, "0")
                folder.mkdir()
                choice = Choice(*write_sparing(source, requests[0], folder))
            else:
                choice = choosing.choose(
                    *(source, requests, Path(scratch)), budget_seconds=budget_seconds
                )
            parity = None
            if validation is not None:
                parity = _compared(
                    *(source, choice, Path(scratch, "float32"), budget_seconds)
                )
        verdict = parity.verdict if parity else "undecided"
        if parity is not None and verdict == "worse" and not write_failed:
            raise ValueError(
                f"{choice.best.request.name} is worse than float32: "
                f"{parity.reason} Nothing was written to {str(target)!r}. Keep "
                "layers by `keep_float32=`, take another dtype, or pass "
                "`write_failed=True`."
            )
        chosen, request = choice.best, choice.best.request
        gate = {
            "verdict": verdict,
            "difference": chosen.difference,
            "parity": parity.to_dict() if parity else None,
        }
        manifest = dataclasses.replace(chosen.manifest, gate=gate)
        manifest.write(chosen.folder)
        place(chosen.folder, target)
        return Export(
            *(str(target), request.format, request.dtype, request.scheme),
            verdict=verdict,
            difference=chosen.difference,
            size_bytes=chosen.size_bytes,
            float32_bytes=float32_bytes,
            kept=dict(request.keep),
            int8=choice.spared,
            parity=parity,
            tried=choice.tried,
            threads=manifest.threads,
            advice=choosing.advice(formats),
        )


def _compared(
    source: Source, choice: Choice, scratch: Path, budget_seconds: float
) -> Parity:
    """Returns the gate's comparison, with the best float32 of the other runtimes."""
    other, notes = choosing.best_float32(
        source, choice, scratch, budget_seconds=budget_seconds
    )
    baselines, processes = {}, [choice.best.cost]
    if other is not None:
        name = f"best float32 ({other.request.format})"
        baselines[name] = other.load()
        if other.cost is not None:
            processes.append(dataclasses.replace(other.cost, name=name))
    parity = compared(
        source, choice.best, batch_size=source.batch_size, baselines=baselines
    )
    calibrated = choice.best.request.calibration
    if calibrated and source.are_mostly_among(calibrated):
        notes = (
            *notes,
            "Most validation examples are among those of `calibration`, which gave the "
            "integers their ranges: others may fare worse. Pass other examples.",
        )
    return dataclasses.replace(
        parity,
        processes=tuple(each for each in processes if each is not None),
        notes=(*parity.notes, *notes),
    )


def _requests(
    source: Source,
    formats: Sequence[str],
    dtypes: Sequence[str],
    scheme: str | None,
    calibration: Any,
    keep_float32: Iterable[str],
) -> list[Request]:
    """Returns what to write, in the order in which it is tried.

    Without a scheme all are tried, "static" where there is something to calibrate on.
    """
    batches: tuple[Any, ...] = ()
    text = ""
    if calibration is not None:
        batches = calibration_batches(calibration, source.traced)
        text = spread_text(batches)
        batches = source.held_out(batches)
    keep = kept_layers.kept_layers(source.model, keep_float32)
    has_attention = kept_layers.has_attention(source.model)
    found = []
    for dtype, format in itertools.product(dtypes, formats):
        for way in POSSIBLE[format].get(dtype, ()):
            is_open = scheme is None and (way != "static" or batches)
            if not (is_open or way in ("", scheme)):
                continue
            kept = dict(keep) if way else {}
            if (format, way) == ("onnx", "dynamic"):
                kept |= kept_layers.convolutions(source.model)
            found.append(
                Request(
                    *(format, dtype, way),
                    calibration=batches if way == "static" else (),
                    keep=kept,
                    products_only=has_attention,
                    reduces_range=kept_layers.reduces_range(),
                )
            )
    is_static = any(request.scheme == "static" for request in found)
    if is_static and text:
        warnings.warn(text, stacklevel=3)
        if source.validation is None:  # else they would be tried on themselves
            source.tried = tried_inputs(source.traced)
    if is_static and not batches:
        raise ValueError(
            "`scheme` is 'static', and there is no `calibration`; expected inputs that "
            "tell the ranges of activations. Pass some tens of training examples."
        )
    if not found:
        raise ValueError(
            f"No format has {' or '.join(dtypes)} with scheme {scheme!r}. Leave out "
            "`scheme`."
        )
    return found


def _float32_bytes(model: keras.Model) -> int:
    """Returns the bytes of a model's weights, floats in float32."""
    return sum(
        4 * int(weight.value.shape.num_elements() or 0) for weight in model.weights
    )
