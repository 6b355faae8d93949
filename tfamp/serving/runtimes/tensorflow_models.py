"""TensorFlow functions that answer: plain, or compiled by XLA for a batch size."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.graph.bodies import has_texts
from tfamp.records.checks import short_error
from tfamp.serving.runtimes.manifest import PLAIN, XLA, Manifest, execution_text
from tfamp.serving.runtimes.signature import LoadedModel, Signature, dtype_named
from tfamp.tuning.races import Racer, log_ratio, race

_SIGNATURE = "serving_default"
# For both sides of a race at one batch size, the compiling not counted.
_SECONDS = 1.0


class TensorFlowModel(LoadedModel):
    """A function of tensors, with one compiled by XLA for some batch sizes.

    XLA compiles each shape anew, for a second and more: sizes that are not named are
    answered by the function as it is.

    Args:
        path: What it was loaded from; None where it is in memory.
        signature: Its inputs and outputs.
        call: Takes tensors in the order of the inputs, returns them by name.
        compiled_sizes: The batch sizes that are compiled, each at its first call.
    """

    def __init__(
        self,
        path: Path | None,
        signature: Signature,
        call: Callable[..., Mapping[str, Any]],
        compiled_sizes: Iterable[int] = (),
    ) -> None:
        super().__init__(path, signature)
        self._call = call
        self._compiled: dict[int, Any] = dict.fromkeys(compiled_sizes)
        self._compiling = threading.Lock()
        self._names = [spec.name for spec in signature.inputs]
        self._answers = {spec.name: spec.in_file for spec in signature.outputs}

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs by name for one batch of all inputs by name."""
        tensors = [tf.constant(inputs[name]) for name in self._names]
        call = self._call
        if self._compiled and len(tensors[0]) in self._compiled:
            call = self.compiled(tensors)
        found = call(*tensors)
        return {name: found[key].numpy() for name, key in self._answers.items()}

    def compiled(self, tensors: Sequence[Any]) -> Any:
        """Returns the function compiled by XLA for the batch size of these inputs."""
        size = len(tensors[0])
        with self._compiling:
            made = self._compiled.get(size)
            if made is None:
                function = tf.function(self._call, jit_compile=True, autograph=False)
                specs = [tf.TensorSpec(each.shape, each.dtype) for each in tensors]
                made = self._compiled[size] = function.get_concrete_function(*specs)
        return made

    def choose(
        self, inputs: Mapping[str, np.ndarray], sizes: Iterable[int]
    ) -> dict[str, dict[str, Any]]:
        """Has each batch size answered by what is faster: plain, or compiled by XLA.

        Both run in turns for up to a second. XLA is taken where it is shown faster.

        Args:
            inputs: Some examples by name.
            sizes: Batch sizes.

        Returns:
            By batch size what was `chosen`, "plain" or "XLA", the `speedup` of XLA, 1.3
            where plain takes 1.3 times as long, and `why` where nothing was compared.
        """
        return {str(size): self._choose(inputs, size) for size in sorted({*sizes})}

    def _choose(self, inputs: Mapping[str, np.ndarray], size: int) -> dict[str, Any]:
        if any(None in spec.shape[1:] for spec in self.signature.inputs):
            why = "XLA would compile each length of the inputs anew"
            return {"chosen": PLAIN, "why": why}
        if any(dtype_named(spec.dtype).kind == "O" for spec in self.signature.inputs):
            return {"chosen": PLAIN, "why": "XLA has no texts"}
        tensors = [
            tf.constant(inputs[name][np.arange(size) % len(inputs[name])])
            for name in self._names
        ]
        try:
            compiled = self.compiled(tensors)
            if has_texts(compiled.graph):
                self._compiled.pop(size, None)
                return {"chosen": PLAIN, "why": "XLA has no texts"}
            plain = _racer(PLAIN, self._call, tensors)
            under_xla = _racer(XLA, compiled, tensors)
        except Exception as error:  # noqa: BLE001 - XLA lacks some operations
            self._compiled.pop(size, None)
            return {"chosen": PLAIN, "why": f"not under XLA: {short_error(error)}"}
        ends = time.monotonic() + _SECONDS
        race([plain, under_xla], goes_on=lambda steps: time.monotonic() < ends)
        middle, low, _ = log_ratio(plain, under_xla)
        found = {"chosen": XLA if low > 0 else PLAIN}
        if found["chosen"] == PLAIN:
            self._compiled.pop(size, None)
        if math.isnan(middle):
            return found
        return {**found, "speedup": round(math.exp(middle), 3)}


class SavedModel(TensorFlowModel):
    """A SavedModel, by its concrete function, or by that under XLA.

    The threads of TensorFlow are those of the whole process: they are set where
    TensorFlow has not started yet.
    """

    runtime = "saved_model"

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        _set_threads(threads)
        loaded = tf.saved_model.load(str(folder))
        function = loaded.signatures[_SIGNATURE]
        names = [spec.in_file for spec in manifest.signature.inputs]

        def call(*tensors: Any, owner: Any = loaded) -> Any:  # its weights go with it
            return function(**dict(zip(names, tensors, strict=True)))

        compiled = [
            int(size)
            for size, found in manifest.execution.items()
            if found["chosen"] == XLA
        ]
        super().__init__(folder, manifest.signature, call, compiled)


class KerasModel(TensorFlowModel):
    """A Keras model in memory, such as `tfamp.freeze` returns, or of a `.keras` file.

    It answers by its concrete function, or by that under XLA for batches of 1.

    Attributes:
        execution: What was chosen for batches of 1, by how much.

    Raises:
        TypeError: It is no Keras model.
        ValueError: It is not built, or its inputs cannot be told.
    """

    runtime = "keras"

    def __init__(self, model: Any, threads: int) -> None:
        # Not above: a SavedModel is loaded without Keras.
        from tfamp.models import load_model
        from tfamp.serving.exports.source import tried_inputs
        from tfamp.serving.exports.tracing import trace
        from tfamp.stepping.arguments import check_built

        _set_threads(threads)
        path = model if isinstance(model, Path) else None
        if path is not None:
            model = load_model(path)
        check_built(model, "load")
        traced = trace(model)
        super().__init__(path, traced.signature, traced.function)
        self._traced = traced  # holds the variables
        self.execution = self.choose(tried_inputs(traced), (1,))
        logging.info("%r: %s", model.name, *execution_text(self.execution))


def _set_threads(threads: int) -> None:
    """Sets the threads of TensorFlow, unless that was done or it runs already."""
    try:
        if not tf.config.threading.get_intra_op_parallelism_threads():
            tf.config.threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError:
        pass


def _racer(name: str, call: Callable[..., Any], tensors: Sequence[Any]) -> Racer:
    def run(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            for each in call(*tensors).values():
                each.numpy()
        return time.perf_counter() - began

    run(1)
    return Racer(name, run, run(1))
