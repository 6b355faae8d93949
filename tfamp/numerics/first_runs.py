"""Runs a model on some examples of its first batch, and leaves nothing of it."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import backend, structure, trials
from tfamp.keras_hooks.layers import IN_HALF, policy_of
from tfamp.loss_scale.tape import scaled_by
from tfamp.records.formats import HALF
from tfamp.stepping.eager_step import Site, floats, tapped
from tfamp.stepping.layer_calls import (
    Recorded,
    Recorder,
    in_float32,
    is_layer,
    watched_sites,
)

LARGEST = float(np.finfo("float16").max)
_NUM_EXAMPLES = 16
_NUM_CALLS = 2  # of each layer
_EFFECTS = re.compile(
    "Print|PyFunc|Summary|WriteFile|Save|Generator|Queue|Lookup.*Insert"
)


def is_in_half(layer: Any) -> bool:
    """States whether a layer runs in half precision, and the user has not said so."""
    policy = policy_of(layer) if is_layer(layer) else None
    return policy is not None and policy.kind in IN_HALF and layer.compute_dtype in HALF


def is_own(layer: Any) -> bool:
    """States whether a layer runs code of the user's in half precision."""
    return (
        is_in_half(layer)
        and not trials.is_of_keras(layer)
        and not structure.only_calls_others(layer)
    )


def examples(x: Any) -> Any:
    """Returns some examples: the first, and those whose numbers are beyond float16."""
    rows = {*range(_NUM_EXAMPLES)}
    for leaf in tf.nest.flatten(x):
        if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating and leaf.shape.rank:
            flat = tf.abs(tf.reshape(leaf, (len(leaf), -1)))
            large = np.flatnonzero(tf.reduce_any(flat > LARGEST, 1))
            rows.update(large[:_NUM_EXAMPLES].tolist())

    def chosen(part: Any) -> Any:
        part = backend.convert_to_tensor(part)
        return tf.gather(part, sorted(row for row in rows if row < len(part)))

    return tf.nest.map_structure(chosen, x)


@contextlib.contextmanager
def variables_put_back(model: keras.Model, x: Any) -> Iterator[Callable[[], None]]:
    """Puts back the variables of a call, at the end and where the block asks for it.

    Refuses effects outside, which must not be done twice.
    """
    function = tf.function(model, autograph=False)
    graph = function.get_concrete_function(x, training=True).graph
    written = graph.as_graph_def()
    inside = [node for f in written.library.function for node in f.node_def]
    names = {node.op for node in [*written.node, *inside]}
    if effects := sorted(name for name in names if _EFFECTS.search(name)):
        raise ValueError(f"its layers run {', '.join(effects)} in their `call`")
    held = [(variable, variable.numpy()) for variable in graph.variables]

    def put_back() -> None:
        for variable, value in held:
            variable.assign(value)

    try:
        yield put_back
    finally:
        put_back()


def recorded(
    model: keras.Model, x: Any, chosen: Sequence[Site]
) -> dict[Any, list[Recorded]]:
    """Returns the first calls of each chosen layer in a float32 run."""
    recorder, watched = Recorder(), watched_sites(model, chosen)
    with (
        in_float32(model),
        tapped(model, recorder, only=lambda site: id(site.layer) in watched),
        scaled_by(1.0),
    ):
        with tf.GradientTape() as tape:
            outputs = floats(model(x, training=True))
            # Like a loss's gradients: of both signs, the same each time.
            seeds = [
                tf.cast(
                    np.random.default_rng(0).standard_normal(each.shape), each.dtype
                )
                for each in outputs
            ]
        tape.gradient(outputs, model.trainable_variables, seeds)
    ids = {id(site.layer) for site in chosen}
    calls: dict[Any, list[Recorded]] = {}
    for call in recorder.calls:
        # What is not finite in float32 is nobody's fault here.
        for kept in (call.input_gradients, call.output_gradients):
            kept[:] = [None if g is None or not _is_finite(g) else g for g in kept]
        if id(call.site.layer) in ids:
            calls.setdefault(call.site.layer, []).append(call)
    return {layer: found[:_NUM_CALLS] for layer, found in calls.items()}


def _is_finite(x: tf.Tensor) -> bool:
    return bool(tf.reduce_all(tf.math.is_finite(x)))
