"""The parts of Keras's backend that hooks use, wherever its versions keep them.

Relies on: `backend.ops`, from Keras 3.16 on, holding what `backend` held before;
`backend.common` holding what all backends share; the TensorFlow backend's trainer
being a class on top of the one that all backends share.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.src import backend
from keras.src.backend import common
from keras.src.backend.common import global_state, masking, symbolic_scope
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.trainers import trainer as shared_trainer

# Hooks on operations replace attributes of its modules.
operations = getattr(backend, "ops", backend)

HALF = (tf.float16, tf.bfloat16)

cast = operations.cast
convert_to_tensor = operations.convert_to_tensor
compute_output_spec = backend.compute_output_spec
random = backend.random

AutocastScope = common.AutocastScope
get_autocast_scope = common.get_autocast_scope
StatelessScope = backend.StatelessScope
in_stateless_scope = backend.in_stateless_scope
in_symbolic_scope = symbolic_scope.in_symbolic_scope

get_keras_mask = masking.get_keras_mask
set_keras_mask = masking.set_keras_mask
is_float_dtype = common.is_float_dtype
standardize_dtype = common.standardize_dtype

# Keras 3.16 names it as that of every backend, and the shared one otherwise.
TensorFlowTrainer = (
    getattr(tensorflow_trainer, "TensorFlowTrainer", None) or tensorflow_trainer.Trainer
)
SharedTrainer = getattr(shared_trainer, "BaseTrainer", None) or shared_trainer.Trainer


@contextlib.contextmanager
def global_attributes(**values: Any) -> Iterator[None]:
    """Sets attributes of this thread's global state inside the block."""
    before = {name: global_state.get_global_attribute(name) for name in values}
    try:
        for name, value in values.items():
            global_state.set_global_attribute(name, value)
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)
