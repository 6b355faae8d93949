"""What many programs have in common: how a model is made, copied, run and compared."""

import copy
import pickle
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfamp
from tests.wild import corpus, table
from tests.wild.programs.registry import Program


def made(make: Callable[[], Any], way: str, policy: str) -> Any:
    """Returns a model of a policy, by "enable" while it is made or by "apply" after."""
    with tfamp.scope(policy if way == "enable" else "float32"):
        model = make()
    if way == "apply":
        tfamp.apply(model, policy)
    return model


def by_file(model: keras.Model, folder: Path) -> keras.Model:
    """Returns what `tfamp.load_model` makes of a file of the model."""
    model.save(folder / "model.keras")
    return tfamp.load_model(folder / "model.keras")


def by_stock_file(model: keras.Model, folder: Path) -> keras.Model:
    """Returns what Keras's own `load_model` makes of a file of the model."""
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


COPIES = {
    "clone_model": lambda model, _: keras.models.clone_model(model),
    "config": lambda model, _: type(model).from_config(model.get_config()),
    "json": lambda model, _: keras.models.model_from_json(model.to_json()),
    "stock file": by_stock_file,
    "file": by_file,
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
}


# Of a loss in bfloat16 after some steps, where float32's seeds are alike.
ROUNDING = 0.02


def facts(model: keras.Model) -> list[tuple[str, ...]]:
    """Returns name, class, dtypes and rule of each layer, without Keras's numbers."""
    return [
        (row.path.split("/")[-1].rstrip("_0123456789"), row.class_name)
        + (row.compute_dtype, row.variable_dtype, row.output_dtype)
        + (row.rule.split("'")[0],)
        for row in tfamp.assignment(model)
    ]


def limit(spread: float, most: float) -> float:
    """Returns how far a loss may be off: as float32's other seeds are, up to a part."""
    return min(max(spread, ROUNDING), most)


def cases(programs: Iterable[Program]) -> list:
    """Returns programs, ways and policies as the cases of a test."""
    return [
        pytest.param(program, way, policy, id=f"{program}-{way}-{policy}")
        for program in programs
        for way in (corpus.WAYS if program.is_built else ("enable",))
        for policy in corpus.POLICIES
    ]


def losses_apart(
    program: Program, way: str, policy: str, losses: list[float], seeds: int
) -> tuple[float, float]:
    """Returns how far a loss is from float32's, and how far it may be.

    Both are medians of so many seeds; `losses` holds the policy's that are known.
    """
    others = range(len(losses), seeds)
    losses += [corpus.run(program, way, policy, seed).last_loss for seed in others]
    exact = [corpus.float32(program, seed) for seed in range(seeds)]
    far = corpus.distance(statistics.median(losses), statistics.median(exact))
    known = table.spreads().get(program.name, 0.0)
    return far, limit(known if seeds == 1 else corpus.spread(exact), 0.1)


def check(
    program: Program,
    way: str,
    policy: str,
    loader: corpus.Loader,
    folder: Path,
    *,
    seeds: int = 1,
) -> corpus.Outcome:
    """Runs a program under tfamp, compares it with float32 and loads it elsewhere.

    Its loss, the median of the seeds, is no farther from float32's, of the same seeds,
    than `limit` allows. An unsteady program's loss is a number, and nothing else is
    asked of it.
    """
    outcome = corpus.run(program, way, policy)
    losses = [outcome.last_loss]
    assert np.isfinite(losses[0])
    if not program.unsteady:
        far, most = losses_apart(program, way, policy, losses, seeds)
        if far > most and seeds == 1:  # which may be chance: its median tells
            far, most = losses_apart(program, way, policy, losses, corpus.SEEDS)
        assert far <= most
    assert outcome.in_half() == set()
    if not program.unsaved:
        path = corpus.save(outcome, program.name, folder)
        assert loader.difference(path) == ""
    keras.utils.clear_session()
    return outcome
