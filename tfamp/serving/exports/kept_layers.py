"""The layers that an integer export leaves in float: as few as the gate asks for."""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import keras
from absl import logging

from tfamp.dtypes.heads import graph_heads
from tfamp.keras_hooks import structure
from tfamp.machine.cpus import instruction_sets
from tfamp.records.record import Record
from tfamp.serving.exports.candidates import (
    Candidate,
    choose_threads,
    compared,
    write,
)
from tfamp.serving.exports.int8_ranking import LayerError, Mode, Ranking, rank
from tfamp.serving.exports.request import NothingRoundedError, Request
from tfamp.serving.exports.source import Source
from tfamp.serving.parity.result import Parity
from tfamp.tuning.search import Evaluation, Search, Suspect

_MAX_EVALUATIONS = 3
# A head of a larger part of the weights is quantised with the others, as it is in
# models of language, whose head has a row for each word.
_MAX_HEAD_PART = 0.2
_WITH_ATTENTION = (
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.Attention,
    keras.layers.LayerNormalization,
)
_HEAD = "a head: its outputs would be rounded to 256 values"
_ASKED = "asked for by `keep_float32`"
_CONVOLUTION = "a convolution: ONNX Runtime's dynamic ones are slower than float32"


@dataclasses.dataclass(frozen=True)
class Kept(Record):
    """What the search for layers that int8 spoils came to.

    Args:
        layers: Layers that stay in float, each with the reason.
        ranking: What each layer came to alone.
        evaluations: The exports that were tried, in order.
        holds: Whether the last of `layers` passed; where none did, the layers are those
            of the attempt that was least worse.
        seconds: For ranking and evaluations.
    """

    layers: dict[str, str]
    ranking: Ranking
    evaluations: tuple[Evaluation, ...]
    holds: bool
    seconds: float


def kept_layers(model: keras.Model, asked: Iterable[str]) -> dict[str, str]:
    """Returns the layers that every integer export keeps in float32, and why.

    These are heads, and those whose paths the user has `asked` for.

    Raises:
        TypeError: The paths are one text.
        ValueError: A path is that of no layer.
    """
    if isinstance(asked, str):
        raise TypeError(
            f"`keep_float32` is {asked!r}, one text; expected paths of layers. Pass "
            f"`[{asked!r}]`."
        )
    paths = {id(layer): path for path, layer, _ in structure.walk(model)}
    found = {}
    for path in asked:
        if path not in paths.values():
            raise ValueError(
                f"`keep_float32` names {path!r}, which is none of the layers; paths "
                f"look like {list(paths.values())[-1]!r}. Print them with "
                "`tfamp.assignment(model)`."
            )
        found[path] = _ASKED
    total = structure.bytes_of(model.weights)
    heads = graph_heads(model)
    if heads is None:
        return found
    weights = [weight for layer in heads.heads for weight in layer.weights]
    small = structure.bytes_of(weights) <= _MAX_HEAD_PART * total
    # Where all is head, as in a model of one layer, there is nothing else to quantise.
    for layer in [*(heads.heads if small else ()), *heads.after]:
        found.setdefault(paths[id(layer)], _HEAD)
    return found


def convolutions(model: keras.Model) -> dict[str, str]:
    """Returns the convolutions of a model, and why ONNX's dynamic scheme keeps them."""
    return {
        path: _CONVOLUTION
        for path, layer, _ in structure.walk(model)
        if "Conv" in type(layer).__name__ and layer.weights
    }


def has_attention(model: keras.Model) -> bool:
    """States whether a model normalises over features, as transformers do."""
    return any(
        isinstance(layer, _WITH_ATTENTION) for _, layer, _ in structure.walk(model)
    )


def reduces_range(flags: Iterable[str] | None = None) -> bool:
    """States whether int8 products of this processor need weights of 7 bits.

    x86 without VNNI adds pairs of 8-bit products in 16 bits, which cuts sums off.

    Example:
        >>> reduces_range(["avx2"]), reduces_range(["avx512_vnni"]), reduces_range([])
        (True, False, False)
    """
    found = set(instruction_sets() if flags is None else flags)
    is_x86 = any(flag.startswith(("avx", "sse")) for flag in found)
    return is_x86 and not {"avx512_vnni", "avx_vnni", "amx_int8"} & found


def write_sparing(
    source: Source, request: Request, folder: Path
) -> tuple[Candidate, Kept | None]:
    """Writes an export, of integers with as many layers in float as the gate asks for.

    Layers that the request keeps stay kept; without validation data it is written as
    it is.

    Returns:
        The candidate, and the search for what to keep; None where there was none.

    Raises:
        ImportError: A package is missing.
        ValueError: The format cannot express the model.
    """
    if source.validation is None or not request.dtype.startswith("int"):
        written_alone = write(source, request, folder)
        choose_threads(source, written_alone)
        return written_alone, None
    written: dict[frozenset[str], Candidate] = {}

    def evaluate(paths: tuple[str, ...]) -> Parity:
        place = folder / str(len(written))
        place.mkdir()
        reasons = dict.fromkeys(paths, "int8 spoils it") | dict(request.keep)
        trial = write(source, dataclasses.replace(request, keep=reasons), place)
        written[frozenset(paths)] = trial
        return compared(source, trial, seconds=0)

    kept = keep_guilty(
        *(source.model, source.sample, evaluate),
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
    asked = dataclasses.replace(request, keep=keep)
    found = dataclasses.replace(chosen, request=asked, manifest=manifest)
    choose_threads(source, found)
    return found, kept


def keep_guilty(
    model: keras.Model,
    inputs: Any,
    evaluate: Callable[[tuple[str, ...]], Parity],
    *,
    mode: Mode,
    fixed: Collection[str] = (),
) -> Kept:
    """Finds the layers that have to stay in float for an int8 export to pass.

    One simulated pass ranks the layers; exports that keep the first of them are tried
    until one passes, and fewer then. Most models need none: where the ranking finds
    nobody guilty, int8 everywhere is tried first.

    Args:
        model: The float32 model.
        inputs: A batch as the model takes it.
        evaluate: Exports with these layers in float, by path, and compares.
        mode: As for `rank`. In "static" a kept layer's outlier is rounded by the layer
            that gives it, so that stays in float with it.
        fixed: Layers that stay in float in any case, such as heads; `evaluate` is not
            told of them.
    """
    began = time.perf_counter()
    ranking = rank(model, inputs, mode=mode)
    by_path = {layer.path: layer for layer in ranking.layers}

    def with_all(paths: Sequence[str]) -> tuple[str, ...]:
        needed = with_producers(paths, by_path, mode)
        return tuple(path for path in needed if path not in fixed)

    def evaluated(paths: tuple[str, ...]) -> Evaluation:
        since = time.perf_counter()
        try:
            parity = evaluate(with_all(paths))
        except NothingRoundedError:
            if not paths:
                raise
            return Evaluation(paths, math.inf, math.inf, False, num_examples=0)
        worst = max(parity.metrics, key=lambda each: each.worsening - each.tolerance)
        return Evaluation(
            *(paths, worst.worsening, worst.bound, _passes(parity)),
            num_examples=parity.num_examples,
            seconds=time.perf_counter() - since,
        )

    # What stays anyway may need the layer that gives its outlier to stay, too.
    free = [layer for layer in ranking.layers if with_all([layer.path])]
    # A share of the kernels would do; what counts is that few layers are kept.
    share = 1.0 / max(len(free), 1)
    suspects = [Suspect(e.path, e.error, share, e.is_guilty) for e in free]
    search = Search(suspects, evaluated, max_evaluations=_MAX_EVALUATIONS)
    best = search.run()
    if all(each.worsening == math.inf for each in search.tried):
        search.tried.append(evaluated(()))  # those kept were all there is to round
    chosen = best or min(search.tried, key=lambda each: each.worsening)
    return Kept(
        reasons(with_all(chosen.float32), by_path),
        ranking,
        tuple(search.tried),
        best is not None,
        time.perf_counter() - began,
    )


def with_producers(
    paths: Sequence[str], by_path: Mapping[str, LayerError], mode: Mode
) -> tuple[str, ...]:
    """Returns layers, with those that give their outlier channels in static int8.

    Example:
        >>> spoilt = LayerError("b", "Dense", 1.4, 0.1, 900.0, producers=("a",))
        >>> with_producers(["b"], {"b": spoilt}, "static")
        ('b', 'a')
    """
    found = list(paths)
    if mode == "static":
        found += [each for path in paths for each in by_path[path].producers]
    return tuple(dict.fromkeys(found))


def reasons(paths: Sequence[str], by_path: Mapping[str, LayerError]) -> dict[str, str]:
    """Returns why each layer stays in float."""
    takers = {
        producer: layer.path
        for layer in by_path.values()
        for producer in layer.producers
    }
    found = {}
    for path in paths:
        why = by_path[path].reason if path in by_path else ""
        if not why and path in takers:
            why = f"it gives the outlier channel of {takers[path]!r}"
        found[path] = why or "the gate needs it, as the next in the ranking"
    return found


def _passes(parity: Parity) -> bool:
    """States whether an int8 export may stand: nothing seen is beyond the tolerance.

    An "undecided" for want of examples is no reason to keep layers in float.
    """
    within = all(each.worsening <= each.tolerance for each in parity.metrics)
    return parity.is_as_good or (parity.verdict == "undecided" and within)
