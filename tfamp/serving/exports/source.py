"""The float32 model that exports are made from: its copy, its traces, inputs to try."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure, trainer, variables
from tfamp.models import apply
from tfamp.records.formats import HALF
from tfamp.serving.exports.request import Request
from tfamp.serving.exports.tracing import Traced, trace
from tfamp.serving.frozen import freeze
from tfamp.serving.runtimes.signature import dtype_named, has_shape
from tfamp.stepping.arguments import check_built, dataset_of
from tfamp.stepping.unchanged import copied

# Steps up to which a recurrent layer is written out: LiteRT and OpenVINO have no loops
# over lists of tensors, and a graph of thousands of steps takes minutes to convert.
_MAX_UNROLLED_STEPS = 64
_WITHOUT_LOOPS = ("litert", "openvino")
# More tell a quantiser next to nothing about ranges.
_MAX_CALIBRATION_EXAMPLES = 512
BATCH = 32
_NUM_TRIED = 5
# Fewer different examples than these are a mistake: one again and again, or a sample.
_MIN_DIFFERENT = 4
# Where a dimension is free and nobody says what it is.
_FREE = 8


@dataclasses.dataclass
class Source:
    """The model that all candidates are made from, and inputs to try them with.

    Attributes:
        model: In float32.
        sample: Inputs as it takes them; None where nobody gave any.
        traces: By what they were traced for.
        tried: Inputs by name to try exports with; None takes the first of `sample`.
    """

    model: keras.Model
    sample: Any
    traces: dict[str, Traced] = dataclasses.field(default_factory=dict)
    tried: dict[str, np.ndarray] | None = None

    @property
    def traced(self) -> Traced:
        """The trace in float32."""
        return self.trace_for(Request("saved_model", "float32"))

    def trace_for(self, request: Request) -> Traced:
        """Returns the trace that a format is written from."""
        kind = request.dtype if request.format == "saved_model" else "float32"
        layers = (layer for _, layer, _ in structure.walk(self.model))
        has_loops = any(isinstance(layer, keras.layers.RNN) for layer in layers)
        if has_loops and request.format in _WITHOUT_LOOPS:
            kind = "unrolled"
        if kind not in self.traces:
            model = self.model
            if kind in HALF:
                model = freeze(model, kind, sample=self.sample)
            elif kind == "unrolled":
                model = _unrolled(model)
            self.traces[kind] = trace(model, self.sample)
        return self.traces[kind]

    def check_runs(self) -> None:
        """Raises `ValueError` unless the model answers one example, and several."""
        inputs = self.tried_inputs()
        _check_shapes(inputs, self.traced, "validation")
        for size in (1, _NUM_TRIED):
            rows = {
                name: value[np.arange(size) % len(value)]
                for name, value in inputs.items()
            }
            try:
                self.traced.call(rows)
            except Exception as error:  # of whatever operation
                self._cannot_run(size, error)

    def _cannot_run(self, size: int, error: Exception) -> NoReturn:
        told = [
            line
            for line in str(error).splitlines()
            if line.strip() and not line.startswith((*" \t", "Graph ", "Detected "))
        ]
        first = "".join(told[:1])
        why = f"{self.model.name!r} does not answer a batch of {size}: {first}."
        graph = structure.graph_of(self.model)
        inputs = [] if graph is None else tf.nest.flatten(structure.inputs_of(graph))
        if sizes := {each.shape[0] for each in inputs} - {None}:
            made = ", ".join(map(str, sizes))
            raise ValueError(
                f"{why} Its inputs were made for batches of {made}; expected any "
                "number. Give its inputs `shape=` in place of `batch_shape=`, and "
                "let its operations take the batch from `keras.ops.shape(x)[0]`."
            ) from error
        raise ValueError(
            f"{why} Pass inputs that it takes as `calibration=` or `validation=`; an "
            "exported model is asked for any number of examples."
        ) from error

    def held_out(
        self, batches: tuple[Mapping[str, np.ndarray], ...]
    ) -> tuple[Mapping[str, np.ndarray], ...]:
        """Returns calibration without five examples, on which exports are tried.

        Integers are at their best on the examples that gave them their ranges. Where
        there are too few in each batch, all are returned.
        """
        sizes = [len(next(iter(batch.values()))) for batch in batches]
        index = max(
            (i for i, size in enumerate(sizes) if size >= 2 * _NUM_TRIED), default=None
        )
        if index is None:
            return batches
        whole = batches[index]
        self.tried = {
            spec.name: whole[spec.in_file][-_NUM_TRIED:]
            for spec in self.traced.signature.inputs
        }
        rest = {name: value[:-_NUM_TRIED] for name, value in whole.items()}
        return (*batches[:index], rest, *batches[index + 1 :])

    def share_among(
        self, batches: Sequence[Mapping[str, np.ndarray]], inputs: Sequence[Any]
    ) -> float:
        """Returns which part of the examples in `inputs`, by batch, is among others."""
        known = {*rows_of(batches)}
        rows: list[bytes] = []
        for x in inputs:
            given = self.traced.by_name(x)
            batch = {
                spec.in_file: np.asarray(given[spec.name], dtype_named(spec.dtype))
                for spec in self.traced.signature.inputs
            }
            rows += rows_of([batch])
        return sum(row in known for row in rows) / max(len(rows), 1)

    def tried_inputs(self) -> dict[str, np.ndarray]:
        """Returns a few inputs by name with which an export is tried."""
        if self.tried is not None:
            return self.tried
        return tried_inputs(self.traced, self.sample)


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


def unroll(model: keras.Model) -> tuple[str, ...]:
    """Has recurrent layers of few, known steps run without a loop, in place.

    The results are the same to the last bit.
    """
    looping = []
    for path, layer, _ in structure.walk(model):
        if not isinstance(layer, keras.layers.RNN):
            continue
        steps = _steps(layer)
        if steps is not None and steps <= _MAX_UNROLLED_STEPS:
            layer.unroll = True
        else:
            looping.append(path)
            continue
        if layer.go_backwards and layer.zero_output_for_mask and layer.return_sequences:
            _zero_masked_steps(layer)
    return tuple(looping)


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


def _unrolled(model: keras.Model) -> keras.Model:
    """Returns a copy without loops."""
    copy = float32_copy(model)
    if looping := unroll(copy):
        raise ValueError(
            f"Layers {looping!r} loop over steps that are unknown or more than "
            f"{_MAX_UNROLLED_STEPS}, for which LiteRT and OpenVINO have no operation. "
            "Export to 'onnx' or 'saved_model', or give the input a fixed number of "
            "steps."
        )
    return copy


def _steps(layer: Any) -> int | None:
    """Returns the number of steps of a recurrent layer's input, None if unknown."""
    for shape in structure.built_shapes(layer).values():
        if isinstance(shape, (tuple, list)) and len(shape) >= 3:
            return None if shape[1] is None else int(shape[1])
    return None


def first_inputs(*data: Any) -> Any:
    """Returns the inputs of the first batch of the first data that are there."""
    for each in data:
        if each is not None:
            return _inputs(next(iter(_batches(each))))
    return None


def calibration_batches(
    data: Any, traced: Traced
) -> tuple[Mapping[str, np.ndarray], ...]:
    """Returns some hundreds of inputs by their names in files, in batches, checked."""
    found, number = [], 0
    for batch in _batches(data):
        arrays = _checked(traced.by_name(_inputs(batch)), traced)
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


def spread_text(batches: Sequence[Mapping[str, np.ndarray]]) -> str:
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


def rows_of(batches: Sequence[Mapping[str, np.ndarray]]) -> list[bytes]:
    """Returns the inputs of each example as bytes, to be compared."""
    return [
        b"".join(np.ascontiguousarray(value[row]).tobytes() for value in batch.values())
        for batch in batches
        for row in range(len(next(iter(batch.values()))))
    ]


def tried_inputs(traced: Traced, data: Any = None) -> dict[str, np.ndarray]:
    """Returns a few inputs by name: the first of data, else some of the signature."""
    if data is not None:
        given = traced.by_name(data)
        return {name: value[:_NUM_TRIED] for name, value in given.items()}
    random = np.random.default_rng(0)
    found = {}
    for spec in traced.signature.inputs:
        shape = (_NUM_TRIED, *(_FREE if n is None else n for n in spec.shape[1:]))
        dtype = dtype_named(spec.dtype)
        if dtype.kind == "f":
            found[spec.name] = random.normal(size=shape).astype(dtype)
        elif dtype.kind == "O":
            found[spec.name] = np.full(shape, "a", object)
        else:
            found[spec.name] = random.integers(0, 2, shape).astype(dtype)
    return found


def _batches(data: Any) -> tf.data.Dataset:
    return dataset_of(data, BATCH, needs_targets=False, name="calibration")


def _inputs(batch: Any) -> Any:
    x = batch[0] if isinstance(batch, tuple) else batch
    return tf.nest.map_structure(np.asarray, x)


def _check_shapes(arrays: Mapping[str, Any], traced: Traced, argument: str) -> None:
    for spec in traced.signature.inputs:
        array = np.asarray(arrays[spec.name])
        if not has_shape(array, spec.shape):
            raise ValueError(
                f"`{argument}` has {spec.name!r} of shape {array.shape}; expected "
                f"{spec.shape}. Pass inputs as `predict` takes them."
            )


def _checked(arrays: Mapping[str, Any], traced: Traced) -> dict[str, np.ndarray]:
    found = {}
    _check_shapes(arrays, traced, "calibration")
    for spec in traced.signature.inputs:
        array = np.asarray(arrays[spec.name])
        if array.dtype.kind == "f":
            number = math.prod(array.shape) - int(np.isfinite(array).sum())
            if number:
                raise ValueError(
                    f"`calibration` has {number} numbers that are not finite in "
                    f"{spec.name!r}; expected none. Take these examples out."
                )
        found[spec.in_file] = array.astype(dtype_named(spec.dtype), copy=False)
    return found
