"""The float32 model that exports are made from: its copy, its traces, inputs to try."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure, trainer, variables
from tfamp.models import apply
from tfamp.records.formats import HALF
from tfamp.serving.exports.tracing import Traced, trace
from tfamp.serving.frozen import freeze
from tfamp.serving.runtimes.signature import dtype_named, has_shape
from tfamp.stepping.arguments import check_built
from tfamp.stepping.unchanged import copied

Batch = Mapping[str, np.ndarray]
# Steps up to which a recurrent layer is written out: LiteRT and OpenVINO have no loops
# over lists of tensors, and a graph of thousands of steps takes minutes to convert.
_MAX_UNROLLED_STEPS = 64
_WITHOUT_LOOPS = ("litert", "openvino")
# More tell a quantiser next to nothing about ranges.
_MAX_CALIBRATION_EXAMPLES = 512
_NUM_TRIED = 5
# Fewer different examples than these are a mistake: one again and again, or a sample.
_MIN_DIFFERENT = 4
# Where a dimension is free and nobody says what it is.
_FREE = 8


@dataclasses.dataclass
class Source:
    """The model that all candidates are made from, and inputs to try them with."""

    model: keras.Model  # in float32
    sample: Any  # inputs as it takes them; None where nobody gave any
    # By what they were traced for.
    traces: dict[str, Traced] = dataclasses.field(default_factory=dict)
    # Inputs by name to try exports with; else the first of `sample`.
    tried: dict[str, np.ndarray] | None = None

    @property
    def traced(self) -> Traced:
        """The trace in float32."""
        return self.trace_for("saved_model", "float32")

    def trace_for(self, format: str, dtype: str) -> Traced:
        """Returns the trace that a format is written from."""
        kind = dtype if format == "saved_model" else "float32"
        layers = (layer for _, layer, _ in structure.walk(self.model))
        has_loops = any(isinstance(layer, keras.layers.RNN) for layer in layers)
        if has_loops and format in _WITHOUT_LOOPS:
            kind = "unrolled"
        if kind not in self.traces:
            model = self.model
            if kind in HALF:
                model = freeze(model, kind, sample=self.sample)
            elif kind == "unrolled":
                model = unrolled(model)
            self.traces[kind] = trace(model, self.sample)
        return self.traces[kind]

    def check_runs(self) -> None:
        """Raises `ValueError` unless the model answers one example, and several."""
        inputs = self.tried_inputs()
        _checked(inputs, self.traced, "validation")
        for size in (1, _NUM_TRIED):
            rows = {n: x[np.arange(size) % len(x)] for n, x in inputs.items()}
            try:
                self.traced.call(rows)
            except Exception as error:  # of whatever operation
                advice = (
                    "Pass inputs that it takes as `calibration=` or `validation=`; an "
                    "exported model is asked for any number of examples."
                )
                graph = structure.graph_of(self.model)
                leaves = tf.nest.flatten(graph and structure.inputs_of(graph))
                if made := {x.shape[0] for x in leaves if graph} - {None}:
                    advice = (
                        f"Its inputs were made for batches of {made.pop()}; expected "
                        "any number. Give its inputs `shape=` in place of "
                        "`batch_shape=`, and let its operations take the batch from "
                        "`keras.ops.shape(x)[0]`."
                    )
                # The first lines are of the graph that it was traced to.
                lines = [
                    line
                    for line in str(error).splitlines()
                    if line.strip() and not line.startswith((*" \t", "Graph ", "Detec"))
                ]
                raise ValueError(
                    f"{self.model.name!r} does not answer a batch of {size}: "
                    f"{''.join(lines[:1])}. {advice}"
                ) from error

    def hold_out(self, batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
        """Returns calibration without five examples, on which exports are tried.

        Integers are at their best on the examples that gave them their ranges. Where
        there are too few in each batch, all are returned.
        """
        for index, batch in reversed([*enumerate(batches)]):
            if len(next(iter(batch.values()))) >= 2 * _NUM_TRIED:
                self.tried = {
                    spec.name: batch[spec.in_file][-_NUM_TRIED:]
                    for spec in self.traced.signature.inputs
                }
                rest = {name: value[:-_NUM_TRIED] for name, value in batch.items()}
                return (*batches[:index], rest, *batches[index + 1 :])
        return batches

    def share_among(self, batches: Sequence[Batch], inputs: Sequence[Any]) -> float:
        """Returns which part of the examples in `inputs`, by batch, is among others."""
        known = {*rows_of(batches)}
        given = [_checked(self.traced.by_name(x), self.traced, "") for x in inputs]
        rows = rows_of(given)
        return sum(row in known for row in rows) / max(len(rows), 1)

    def tried_inputs(self) -> dict[str, np.ndarray]:
        """Returns a few inputs by name with which an export is tried."""
        if self.tried is not None:
            return self.tried
        if self.sample is not None:
            given = self.traced.by_name(self.sample)
            return {name: value[:_NUM_TRIED] for name, value in given.items()}
        return self.made_up()

    def made_up(self) -> dict[str, np.ndarray]:
        """Returns inputs by name that nobody gave."""
        random = np.random.default_rng(0)
        found = {}
        for spec in self.traced.signature.inputs:
            shape = (_NUM_TRIED, *(_FREE if n is None else n for n in spec.shape[1:]))
            dtype = dtype_named(spec.dtype)
            if dtype.kind == "f":
                found[spec.name] = random.normal(size=shape).astype(dtype)
            elif dtype.kind == "O":
                found[spec.name] = np.full(shape, "a", object)
            else:
                found[spec.name] = random.integers(0, 2, shape).astype(dtype)
        return found


def float32_copy(model: keras.Model) -> keras.Model:
    """Returns a copy that stores and computes everything in float32, not compiled.

    Exporters fail on casts to bfloat16, and write files that no runtime loads. What was
    rounded in a model in half precision stays rounded; its sums get more exact.
    """
    check_built(model, "export")
    copy = copied(model, instead="export a model whose classes have one")
    own = {id(weight) for weight in model.weights}
    if own & {id(weight) for weight in copy.weights}:
        raise ValueError(
            f"Cannot copy model {model.name!r}: its copy holds weights of the original."
        )
    if structure.compute_dtypes(copy) & {*HALF}:
        apply(copy, "float32")
    trainer.forget_training(copy)
    with copy.distribute_strategy.scope():
        for weight in copy.weights:
            if weight.dtype in HALF:
                variables.store_in(weight, "float32")
    graph = structure.graph_of(copy)
    if graph is not None:
        structure.widen_inputs(graph)
    trainer.drop_traced_functions(copy)
    return copy


def unrolled(model: keras.Model) -> keras.Model:
    """Returns a copy whose recurrent layers of few, known steps have no loop.

    The results are the same to the last bit.
    """
    copy = float32_copy(model)
    looping = []
    for path, layer, _ in structure.walk(copy):
        if not isinstance(layer, keras.layers.RNN):
            continue
        shapes = structure.built_shapes(layer).values()
        steps = next(
            (s[1] for s in shapes if isinstance(s, (tuple, list)) and len(s) > 2), None
        )
        if steps is None or steps > _MAX_UNROLLED_STEPS:
            looping.append(path)
            continue
        layer.unroll = True
        if layer.go_backwards and layer.zero_output_for_mask and layer.return_sequences:
            _zero_masked_steps(layer)
    if looping:
        raise ValueError(
            f"Layers {tuple(looping)!r} loop over steps that are unknown or more than "
            f"{_MAX_UNROLLED_STEPS}, for which LiteRT and OpenVINO have no operation. "
            "Export to 'onnx' or 'saved_model', or give the input a fixed number of "
            "steps."
        )
    return copy


def _zero_masked_steps(layer: Any) -> None:
    """Zeroes the steps that a mask leaves out of a layer that goes backwards.

    Keras takes the mask forwards for outputs that are backwards, if the layer is
    unrolled.
    """
    unrolled = layer.inner_loop
    layer.zero_output_for_mask = False

    def inner_loop(
        sequences: Any, initial_state: Any, mask: Any, **options: Any
    ) -> Any:
        last, outputs, states = unrolled(sequences, initial_state, mask, **options)
        if mask is not None:
            kept = tf.reverse(tf.nest.flatten(mask)[0], [1])
            while kept.shape.rank < outputs.shape.rank:
                kept = kept[..., tf.newaxis]
            outputs = tf.where(kept, outputs, tf.zeros_like(outputs))
        return last, outputs, states

    layer.inner_loop = inner_loop


def inputs_in(batch: Any) -> Any:
    """Returns the inputs of a batch as arrays."""
    x = batch[0] if isinstance(batch, tuple) else batch
    return tf.nest.map_structure(np.asarray, x)


def calibration_batches(data: tf.data.Dataset, traced: Traced) -> tuple[Batch, ...]:
    """Returns some hundreds of inputs by their names in files, in batches, checked."""
    found: list[Batch] = []
    number = 0
    for batch in data:
        arrays = _checked(traced.by_name(inputs_in(batch)), traced, "calibration")
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(
                    f"`calibration` has {int((~np.isfinite(array)).sum())} numbers "
                    f"that are not finite in {name!r}; expected none. Take these "
                    "examples out."
                )
        found.append(arrays)
        number += len(next(iter(arrays.values())))
        if number >= _MAX_CALIBRATION_EXAMPLES:
            break
    if not number:
        raise ValueError(
            "`calibration` holds no examples; expected some tens, as `predict` takes "
            "them. Pass a part of the training data."
        )
    return tuple(found)


def spread_text(batches: Sequence[Batch]) -> str:
    """Returns what is wrong with calibration that has no spread, "" where it has.

    Example:
        >>> spread_text([{"x": np.ones((32, 4))}])[:52]
        '`calibration` holds 1 different example among 32: th'
    """
    rows = rows_of(batches)
    number = len({*rows})
    if number >= _MIN_DIFFERENT:
        return ""
    return (
        f"`calibration` holds {number} different example{'s' * (number > 1)} among "
        f"{len(rows)}: the ranges that integers get from so few cut off what lies "
        "outside in others. Pass some tens of different training examples."
    )


def rows_of(batches: Sequence[Batch]) -> list[bytes]:
    """Returns the inputs of each example as bytes, to be compared."""
    return [
        b"".join(np.ascontiguousarray(value[row]).tobytes() for value in batch.values())
        for batch in batches
        for row in range(len(next(iter(batch.values()))))
    ]


def _checked(
    arrays: Mapping[str, Any], traced: Traced, argument: str
) -> dict[str, np.ndarray]:
    """Returns inputs by their names in files, cast to what the model takes."""
    found = {}
    for spec in traced.signature.inputs:
        array = np.asarray(arrays[spec.name])
        if not has_shape(array, spec.shape):
            raise ValueError(
                f"`{argument}` has {spec.name!r} of shape {array.shape}; expected "
                f"{spec.shape}. Pass inputs as `predict` takes them."
            )
        found[spec.in_file] = array.astype(dtype_named(spec.dtype), copy=False)
    return found
