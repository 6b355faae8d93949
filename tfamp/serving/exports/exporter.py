"""`tfamp.export`: a model as files that are smaller, faster, and still right."""

import dataclasses
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras

from tfamp.records import checks
from tfamp.serving.exports import choosing, folders, layers, samples
from tfamp.serving.exports.candidates import Source
from tfamp.serving.exports.choosing import Choice
from tfamp.serving.exports.float32_copy import float32_copy
from tfamp.serving.exports.record import Export
from tfamp.serving.exports.request import DTYPES, SCHEMES, Request, check_possible
from tfamp.serving.exports.sparing import write_sparing
from tfamp.serving.parity.gate import check_parity
from tfamp.serving.parity.result import Parity
from tfamp.serving.runtimes.manifest import RUNTIMES
from tfamp.stepping.arguments import check_built

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
            are installed, times them in turns, and keeps the fastest that passes.
        dtype: "float32", "float16", "bfloat16", "int8" or "int4" for the weights;
            inputs and outputs stay as they are. "auto" tries float32 and int8.
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
    formats = _formats(format)
    _check_dtype(dtype, scheme)
    checks.fraction("tolerance", tolerance, closed=False)
    checks.positive("budget_seconds", budget_seconds)
    if batch_size is not None:
        checks.positive_int("batch_size", batch_size)
    folders.check_target(target)
    if format != _AUTO and dtype != _AUTO:
        check_possible(format, dtype, scheme)
    check_built(model, "export")
    with tempfile.TemporaryDirectory(prefix="tfamp-export-") as scratch:
        with folders.said_if_full(_float32_bytes(model)):
            sample = samples.first_inputs(calibration, validation)
            source = Source(float32_copy(model), sample, batch_size)
            choice = _chosen(
                source,
                _requests(source, formats, dtype, scheme, calibration, keep_float32),
                Path(scratch),
                is_alone=format != _AUTO and dtype != _AUTO,
                validation=validation,
                metric=metric,
                tolerance=tolerance,
                budget_seconds=budget_seconds,
            )
            parity = None
            if validation is not None:
                parity = _compared(
                    *(source, choice, Path(scratch, "float32")),
                    validation=validation,
                    metric=metric,
                    tolerance=tolerance,
                    budget_seconds=budget_seconds,
                )
        if parity is not None and parity.verdict == "worse" and not write_failed:
            raise ValueError(
                f"{choice.best.request.name} is worse than float32: "
                f"{parity.reason} Nothing was written to {str(target)!r}. Keep "
                "layers by `keep_float32=`, take another dtype, or pass "
                "`write_failed=True`."
            )
        return _placed(choice, target, model, parity, formats)


def _chosen(
    source: Source,
    requests: Sequence[Request],
    scratch: Path,
    *,
    is_alone: bool,
    budget_seconds: float,
    **gate: Any,
) -> Choice:
    """Returns what was asked for, or the fastest of it, written into a folder."""
    if not (is_alone and len(requests) == 1):
        return choosing.fastest(
            source, requests, scratch, budget_seconds=budget_seconds, **gate
        )
    folder = scratch / "0"
    folder.mkdir()
    return Choice(*write_sparing(source, requests[0], folder, **gate))


def _compared(
    source: Source,
    choice: Choice,
    scratch: Path,
    *,
    validation: Any,
    metric: Any,
    tolerance: float,
    budget_seconds: float,
) -> Parity:
    """Returns the gate's comparison, with the best float32 of the other runtimes."""
    other, notes = choosing.best_float32(
        source, choice, scratch, budget_seconds=budget_seconds
    )
    baselines = {}
    if other is not None:
        baselines[f"best float32 ({other.request.format})"] = other.load()
    parity = check_parity(
        *(source.model, choice.best.load(), validation),
        metric=metric,
        tolerance=tolerance,
        batch_size=source.batch_size,
        baselines=baselines,
    )
    return dataclasses.replace(parity, notes=(*parity.notes, *notes))


def _formats(format: str) -> tuple[str, ...]:
    checks.choice("format", format, (_AUTO, *RUNTIMES))
    return RUNTIMES if format == _AUTO else (format,)


def _check_dtype(dtype: str, scheme: str | None) -> None:
    checks.choice("dtype", dtype, (*DTYPES, _AUTO))
    if scheme is not None:
        checks.choice("scheme", scheme, SCHEMES)


def _requests(
    source: Source,
    formats: Sequence[str],
    dtype: str,
    scheme: str | None,
    calibration: Any,
    keep_float32: Iterable[str],
) -> list[Request]:
    """Returns what to write, in the order in which it is tried."""
    batches = (
        ()
        if calibration is None
        else samples.calibration_batches(calibration, source.traced)
    )
    if isinstance(keep_float32, str):
        raise TypeError(
            f"`keep_float32` is {keep_float32!r}, one text; expected paths of layers. "
            f"Pass `[{keep_float32!r}]`."
        )
    keep = layers.kept_layers(source.model, keep_float32)
    is_alone = len(formats) == 1 and dtype != _AUTO
    found = []
    for name in ("float32", "int8") if dtype == _AUTO else (dtype,):
        for format in formats:
            for way in choosing.schemes(format, name, scheme, is_alone, bool(batches)):
                kept = dict(keep) if name.startswith("int") else {}
                if (format, way) == ("onnx", "dynamic"):
                    kept |= layers.convolutions(source.model)
                found.append(
                    Request(
                        *(format, name, way),
                        calibration=batches if way == "static" else (),
                        keep=kept,
                        products_only=layers.has_attention(source.model),
                        reduces_range=layers.reduces_range(),
                    )
                )
    if any(request.scheme == "static" for request in found) and not batches:
        raise ValueError(
            "`scheme` is 'static', and there is no `calibration`; expected inputs that "
            "tell the ranges of activations. Pass some tens of training examples."
        )
    if not found:
        raise ValueError(
            f"No format has {dtype} with scheme {scheme!r}. Leave out `scheme`."
        )
    return found


def _placed(
    choice: Choice,
    target: Path,
    model: keras.Model,
    parity: Parity | None,
    formats: Sequence[str],
) -> Export:
    """Moves what was chosen to where it belongs, and returns the record of it."""
    chosen = choice.best
    manifest = dataclasses.replace(
        chosen.manifest,
        gate={
            "verdict": parity.verdict if parity else "undecided",
            "difference": chosen.difference,
            "parity": parity.to_dict() if parity else None,
        },
    )
    manifest.write(chosen.folder)
    size = chosen.size_bytes
    folders.place(chosen.folder, target)
    request = chosen.request
    return Export(
        *(str(target), request.format, request.dtype, request.scheme),
        verdict=parity.verdict if parity else "undecided",
        difference=chosen.difference,
        size_bytes=size,
        float32_bytes=_float32_bytes(model),
        kept=dict(request.keep),
        int8=choice.spared,
        parity=parity,
        tried=choice.tried,
        execution={size: dict(how) for size, how in manifest.execution.items()},
        threads=manifest.threads,
        advice=choosing.advice(formats),
    )


def _float32_bytes(model: keras.Model) -> int:
    """Returns the bytes of a model's weights, floats in float32."""
    return sum(
        4 * int(weight.value.shape.num_elements() or 0) for weight in model.weights
    )
