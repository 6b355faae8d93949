"""An integer export with the layers that it would spoil left in float."""

import dataclasses
from pathlib import Path
from typing import Any, cast

from absl import logging

from tfamp.serving.exports.candidates import Candidate, Source, write
from tfamp.serving.exports.request import Request
from tfamp.serving.int8.keeping import Kept, keep_guilty
from tfamp.serving.int8.ranking import Mode
from tfamp.serving.parity.gate import check_parity
from tfamp.serving.parity.result import Parity


def write_sparing(
    source: Source,
    request: Request,
    folder: Path,
    *,
    validation: Any,
    metric: Any = None,
    tolerance: float = 0.005,
) -> tuple[Candidate, Kept | None]:
    """Writes an export, of integers with as many layers in float as the gate asks for.

    Args:
        source: The float32 model.
        request: What is to be written; layers that it keeps stay kept.
        folder: An empty folder, for all that is tried.
        validation: What the gate compares on; None writes the request as it is.
        metric: As for the gate.
        tolerance: As for the gate.

    Returns:
        What was written, and the search for what to keep; None where there was none.

    Raises:
        ImportError: A package is missing.
        ValueError: The format cannot express the model.
    """
    if validation is None or not request.dtype.startswith("int"):
        return write(source, request, folder), None
    written: dict[frozenset[str], Candidate] = {}

    def evaluate(paths: tuple[str, ...]) -> Parity:
        place = folder / str(len(written))
        place.mkdir()
        reasons = dict.fromkeys(paths, "int8 spoils it") | dict(request.keep)
        trial = write(source, dataclasses.replace(request, keep=reasons), place)
        written[frozenset(paths)] = trial
        return check_parity(
            *(source.model, trial.load(), validation),
            metric=metric,
            tolerance=tolerance,
            seconds=0,
            fresh_process=False,
        )

    kept = keep_guilty(
        source.model,
        source.sample,
        evaluate,
        mode=cast(Mode, request.scheme),
        fixed=request.keep,
    )
    chosen = written[frozenset(kept.layers)]
    if kept.layers:
        logging.info("%s keeps %s in float32.", request.name, tuple(kept.layers))
    keep = {**request.keep, **kept.layers}
    plan = {**(chosen.manifest.plan or {}), "int8": kept.to_dict()}
    manifest = dataclasses.replace(chosen.manifest, kept=keep, plan=plan)
    manifest.write(chosen.folder)
    final = dataclasses.replace(
        chosen,
        request=dataclasses.replace(request, keep=keep),
        manifest=manifest,
    )
    return final, kept
