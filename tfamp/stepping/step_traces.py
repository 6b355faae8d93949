"""Traces the step that `fit` or `predict` runs, with the layer and cost of operations.

A product takes the longer of computing and moving its bytes, all else the moving.
Devices differ by a factor of two or three, so shares order causes, no speed.
"""

import contextlib
import gc
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.graph.bodies import Operation
from tfamp.graph.products import flops_of, is_product
from tfamp.keras_hooks import structure, trainer
from tfamp.keras_hooks.patches import Patch, like, replaced
from tfamp.machine import devices as hardware
from tfamp.machine.speeds import Device
from tfamp.records.formats import HALF
from tfamp.stepping import ALONE
from tfamp.stepping.arguments import build, call_once, check_model, first_batch
from tfamp.stepping.snapshots import bare_name
from tfamp.stepping.unchanged import seeds_put_back, unchanged

_MARK = "tfamp-mark"
_RUNS = itertools.count()
# What a strategy puts into the names of all replicas but the first.
_REPLICA = re.compile(r"replica_\d+$")
# FLOPs a byte of float32 and half. Source: NVIDIA, GPU Performance Background User's
# Guide (2023), table 1: V100 15.7 and 125 TFLOPS at 900 GB/s. CPU: a core with two
# AVX-512 units at 2.5 GHz and 12 GB/s; bfloat16 instructions double it at least.
_RATIOS = {"gpu": (17.0, 140.0), "cpu": (13.0, 26.0), "tpu": (60.0, 120.0)}
# Operations that move nothing: TensorFlow hands the same memory on.
_FREE = frozenset(
    "Const Placeholder Identity IdentityN ReadVariableOp VarHandleOp Reshape Squeeze "
    "ExpandDims Shape ShapeN Rank Size StopGradient PreventGradient NoOp "
    "CheckNumerics TensorListFromTensor TensorListReserve TensorListStack "
    "TensorListGetItem TensorListSetItem TensorListPushBack TensorListPopBack "
    "EmptyTensorList VariableShape BroadcastGradientArgs".split()
)
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


class Marks:
    """Knows the layer of each operation of a model by a mark in its name.

    A name alone does not tell, as layers of a class get names alike; the gradient of an
    operation carries its name. `scope` is a name scope that no other trace has.
    """

    def __init__(self, model: keras.layers.Layer) -> None:
        self._layers = [(path, layer) for path, layer, _ in structure.walk(model)]
        self.scope = f"{_MARK}{next(_RUNS)}x"
        marks = [f"{self.scope}{i}x" for i in range(len(self._layers))]
        pairs = list(zip(marks, self._layers, strict=True))
        self._mark_of = {id(layer): mark for mark, (_, layer) in pairs}
        self._path_of = {mark: path for mark, (path, _) in pairs}
        known = {id(layer): path for path, layer in self._layers}
        self._children = {
            path: {c.name: known[id(c)] for c in structure.children(layer)}
            for path, layer in self._layers
        }

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Marks what is traced inside; calls are as before afterwards."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @like(original)
            def __call__(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
                mark = self._mark_of.get(id(layer))
                if mark is None or tf.executing_eagerly():
                    return original(layer, *args, **kwargs)
                with tf.name_scope(mark):
                    return original(layer, *args, **kwargs)

            return __call__

        def marked(layer: keras.layers.Layer) -> Callable[..., Any]:
            mark, original = self._mark_of.get(id(layer)), layer.call

            @like(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                with tf.name_scope(mark or layer.name):
                    return original(*args, **kwargs)

            return call

        # The collector may take the last managed model, and with it the hook on
        # `__call__` that stands below this one.
        collects = gc.isenabled()
        gc.disable()
        patch = Patch(keras.layers.Layer, "__call__", wrap)
        patch.install()
        try:
            with contextlib.ExitStack() as stack:
                for _, layer in self._layers:
                    if isinstance(layer, keras.layers.Wrapper):
                        # Called without its `__call__`.
                        inner = layer.layer
                        stack.enter_context(replaced(inner, call=marked(inner)))
                yield
        finally:
            patch.remove()
            if collects:
                gc.enable()

    def layer_of(self, name: str) -> str:
        """Returns the path of the layer that made an operation, "" for none."""
        path, rest = "", name.split("/")
        for position, part in enumerate(name.split("/")):
            mark = re.match(rf"{_MARK}\d+x\d+x", part)
            if mark and mark.group() in self._path_of:
                path = self._path_of[mark.group()]
                rest = name.split("/")[position + 1 :]
        # A function that was traced before holds no marks, only names of layers, which
        # TensorFlow numbers: Keras opens the first scope of a layer for its `build`.
        for part in rest if path else ():
            children = self._children[path]
            path = children.get(bare_name(part)) or children.get(part) or path
        return path


def plain_name(name: str) -> str:
    """Returns the name of an operation without marks and replicas."""
    parts = [part for part in name.split("/") if not part.startswith(_MARK)]
    return "/".join(part for part in parts if not _REPLICA.match(part))


class Trace(NamedTuple):
    """A step that was traced, the layer of each operation, and the batch."""

    concrete: Any
    marks: Marks
    batch: Any


def trace_step(model: Any, dataset: tf.data.Dataset, *, training: bool) -> Trace:
    """Traces one step on the first batch; nothing runs, and nothing is changed."""
    if training or not isinstance(model, keras.Model):
        check_model(model)
    with seeds_put_back():
        batch = first_batch(dataset)
        if model.compiled:
            build(model, batch)
            trainer.build_metrics(model, batch)
        else:
            call_once(model, batch)
    strategy = model.distribute_strategy
    argument = tf.nest.map_structure(tf.type_spec_from_value, batch)
    if strategy.num_replicas_in_sync > 1:
        size = int(tf.nest.flatten(batch)[0].shape[0])
        whole = tf.data.Dataset.from_tensors(batch).unbatch().batch(size)
        argument = next(iter(strategy.experimental_distribute_dataset(whole)))
    with unchanged(model) if model.compiled else contextlib.nullcontext():
        return trace_specs(model, argument, training=training)._replace(batch=batch)


def trace_specs(model: keras.Model, specs: Any, *, training: bool) -> Trace:
    """Traces one step for a batch of given shapes, and makes no such batch."""
    marks, strategy = Marks(model), model.distribute_strategy
    step = model.train_step if training else model.predict_step

    @tf.autograph.experimental.do_not_convert
    def one_step(data: Any) -> Any:
        with tf.name_scope(marks.scope):
            return strategy.run(step, args=(data,))

    with ALONE, seeds_put_back(), marks.placed():
        concrete = tf.function(one_step).get_concrete_function(specs)
    return Trace(concrete, marks, specs)


def flops_per_byte(devices: Sequence[Device], dtype: str) -> float:
    """Returns how many operations in a dtype the slowest does in the time of a byte."""
    ratios = []
    for device in hardware.computing_of(devices):
        is_fast = dtype in HALF and dtype in hardware.fast_dtypes(device)
        ratios.append(_RATIOS[device.kind][is_fast])
    return min(ratios, default=_RATIOS["cpu"][0])


def cost(operation: Operation, ratio: float) -> float:
    """Returns the time of one run of an operation, in that of moving a byte."""
    moved = float(num_bytes(operation))
    if is_product(operation):
        moved = max(moved, (flops_of(operation) or 0) / ratio)
    return moved


def num_bytes(operation: Operation) -> int:
    """Returns the bytes that one run reads and writes; sizes not known count 0."""
    if operation.op_type in _FREE:
        return 0
    if operation.op_type == "Cast":
        read, written = _BYTES.get(operation.dtype("SrcT"), 0), operation.dtype("DstT")
        elements = _elements(operation.outputs[:1])
        return elements * (read + _BYTES.get(written, 0)) if read else 0
    size = _BYTES.get(product_dtype(operation), 0)
    return size * (_elements(operation.inputs) + _elements(operation.outputs))


def product_dtype(operation: Operation) -> str:
    """Returns the dtype that an operation computes in, the wider of two factors."""
    found = [operation.dtype(name) for name in ("T", "Ta", "Tb", "dtype")]
    named = (name for name in found if name)
    return max(named, key=lambda name: _BYTES.get(name, 0), default="")


def _elements(shapes: Sequence[tuple[int | None, ...] | None]) -> int:
    known = (shape for shape in shapes if shape is not None)
    return sum(math.prod(dim or 0 for dim in shape) for shape in known)
