"""Installs the hooks, once, and what a hook does that needs all of the rest.

On `compile` that is: heads first, then the loss scales. A Keras that nobody has tested
is asked first whether the hooks do there what they promise.
"""

import functools
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.eager import context

from tfamp.dtypes import layer_dtypes, resolution, rows
from tfamp.dtypes.remedy import remedy
from tfamp.dtypes.settings import IN_FORCE, PolicySettings, make_settings
from tfamp.keras_hooks import (
    calls,
    exact_values,
    float32_operations,
    layers,
    optimizers,
    saved_state,
    structure,
    trainer,
)
from tfamp.keras_hooks.layers import Kind, Policy, policy_of
from tfamp.keras_hooks.patches import HookError, PatchSet
from tfamp.keras_hooks.replicas import warn_of_idle_distribution
from tfamp.keras_hooks.workers import WORKER_HOOKS
from tfamp.loss_scale.fit_hooks import BEFORE_RUN, BEFORE_TRAINING, FIT_HOOKS
from tfamp.loss_scale.loops import LOOP_HOOKS, exact
from tfamp.loss_scale.optimizer import CONFIG_HOOKS, LossScaleOptimizer
from tfamp.loss_scale.rule import without_float16
from tfamp.loss_scale.tape import TAPE_HOOKS, leave_alone
from tfamp.machine import cpus
from tfamp.records import versions
from tfamp.records.checks import first_line

_NAME = "loss_scale_optimizer"  # as Keras names the one that it wraps with
# Those that were put around an optimizer here, and may be taken off again.
_WRAPPED: weakref.WeakSet[Any] = weakref.WeakSet()


def before_compile(model: keras.Model, arguments: dict[str, Any]) -> None:
    """Changes the arguments of `compile`, which files hold: float16 gets a scale."""
    if policy_of(model) is None:
        resolution.meet_unmanaged(model)
    settings = resolution.settings_of(model)
    if settings is None:
        return
    if resolution.resolve(model):
        resolution.follow_plan(model, settings, must=True)
    if settings.jit_compile is not None and arguments.get("jit_compile") == "auto":
        arguments["jit_compile"] = settings.jit_compile
    if arguments.get("optimizer") is None:
        return
    optimizer = keras.optimizers.get(arguments["optimizer"])
    if arguments.get("auto_scale_loss", True):
        arguments["auto_scale_loss"] = False
        optimizer = _wrapped(optimizer, model, settings)
    else:
        leave_alone(optimizer)
    arguments["optimizer"] = optimizer


def before_training(model: keras.Model) -> None:
    """Gives each optimizer that `compile` does not know a loss scale of its own."""
    settings = resolution.settings_of(model)
    if settings is None:
        return
    names = optimizers.replace_optimizers(
        model, lambda optimizer: _wrapped(optimizer, model, settings)
    )
    if names:
        trainer.drop_traced_functions(model)
        logging.info(
            "The optimizers of model %r in %s got a `LossScaleOptimizer` around each. "
            "Pass `tfamp.LossScaleOptimizer(...)` for other settings.",
            *(model.name, ", ".join(f"`{name}`" for name in names)),
        )


def _wrapped(optimizer: Any, model: keras.Model, settings: PolicySettings) -> Any:
    """Returns `optimizer` with the loss scale that `model` needs, if any."""
    if isinstance(optimizer, LossScaleOptimizer):
        return optimizer
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        made = exact(optimizer)
        _WRAPPED.add(made)
        return made
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        logging.info(
            "Optimizer %r is of your own class %s, so it scales the loss as that does. "
            "Derive it from `tfamp.LossScaleOptimizer` to judge steps on all replicas.",
            *(optimizer.name, type(optimizer).__name__),
        )
        return optimizer
    options, scale = dict(settings.loss_scale_options), settings.loss_scale
    has_float16 = "float16" in structure.compute_dtypes(model)
    if not has_float16:
        options = without_float16(options) or {}
    if scale is None or not (has_float16 or options):
        return optimizer
    factor = getattr(optimizer, "loss_scale_factor", None)
    is_fixed = not has_float16 and not options.get("dynamic", True)
    if (scale == "dynamic" and factor is None) or is_fixed:
        scale = None
    elif scale == "dynamic":
        logging.info(
            "The optimizer's `loss_scale_factor=%r` becomes a static loss scale that "
            "skips non-finite steps.",
            factor,
        )
        scale = factor
    if scale is not None:
        optimizer.loss_scale_factor = None
        options.update(initial_scale=float(scale), dynamic=False)
    made = LossScaleOptimizer(optimizer, name=_NAME, **options)
    _WRAPPED.add(made)
    return made


def follow_policy(model: keras.layers.Layer, settings: PolicySettings) -> None:
    """Gives a model that is compiled already the optimizer its dtypes need.

    The inner optimizer is the same object before and after, with its slots.
    """

    def plain(optimizer: Any) -> Any:  # without the scale that was put around it here
        is_ours = isinstance(optimizer, LossScaleOptimizer) and optimizer in _WRAPPED
        return optimizer.inner_optimizer if is_ours else optimizer

    has_float16 = "float16" in structure.compute_dtypes(model)
    if not has_float16:
        optimizers.replace_optimizers(model, plain)
    present = model.optimizer if trainer.is_compiled(model) else None
    if present is None or (has_float16 and plain(present) is not present):
        return
    wanted = _wrapped(plain(present), model, settings)
    if wanted is not present:
        trainer.replace_optimizer(model, wanted)


def load(entry: dict[str, Any] | None, make: Callable[[], Any]) -> Any:
    """Returns a saved model with the dtypes of its file, whose entry is given.

    A ValueError says that another version wrote it, or that it has another model.
    """
    if entry is None:
        CONFIG_HOOKS.install()
        return make()
    settings = rows.settings_to_make(entry)
    install(settings)
    with IN_FORCE.block(settings=settings, loaded=entry["policy"]):
        model = make()
    rows.restore(model, entry)
    optimizer = getattr(model, "optimizer", None)
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        trainer.replace_optimizer(model, exact(optimizer))
    return model


def unpickled(archive: Any) -> Any:
    """Loads a pickled model; pickles of managed ones name this function."""
    entry = saved_state.read_entry(archive)
    return load(entry, functools.partial(saved_state.unpickled, archive))


def _load_for_keras(entry: dict[str, Any], make: Callable[[], Any]) -> Any:
    """Returns what Keras's own `load_model` gives, in full while tfamp is enabled."""
    present = IN_FORCE.present
    is_inside = present.settings is None or present.loaded is not None
    return make() if is_inside else load(entry, make)


class SelfTest:
    """A check, by a small model, of a Keras that nobody has tested."""

    def __init__(self, version: str = keras.__version__) -> None:
        self._version, self._lock = version, threading.RLock()
        is_told = os.environ.get(versions.UNTESTED_KERAS)
        self.is_due = version not in versions.TESTED_KERAS and not is_told

    def run(self) -> None:
        """Runs the check where it is due; raises HookError where a promise is broken.

        It waits until TensorFlow has started, which would fix devices and clusters that
        users set after `enable`. A thread of its own has its own names, seeds, policy,
        strategy and graph; it draws no random number.
        """
        with self._lock:
            if not self.is_due or not context.context()._initialized:
                return
            self.is_due = False  # the check calls layers, which asks for it again
            found: list[str] = []
            thread = threading.Thread(target=lambda: found.append(_broken()))
            thread.start()
            thread.join()
            self.is_due = found != [""]
        tested = versions.TESTED_KERAS
        if self.is_due:
            raise HookError(
                f"Found Keras {self._version}, on which {found[0]}. tfamp was tested "
                f"with Keras {', '.join(tested)}: `pip install keras=={tested[-1]}`. "
                "To go on with this version all the same, set "
                f"{versions.UNTESTED_KERAS}=1 in the environment."
            )


def _broken() -> str:
    """Returns what is not as promised, in words; "" if all is."""
    settings = make_settings("mixed_float16")
    try:
        with IN_FORCE.block(settings=settings, loaded=None), tf.device("CPU:0"):
            return next((text for is_held, text in _promises() if not is_held), "")
    except Exception as error:
        line = first_line(error).rstrip(".")
        return f"a small model raises {type(error).__name__}: {line}"


def _promises() -> Iterator[tuple[Any, str]]:
    """Yields whether each promise holds here, and what is so where it does not."""
    x = np.linspace(-6.0, 6.0, 32, dtype="float32").reshape(2, 16)
    normed = keras.layers.LayerNormalization(name="tfamp_norm")(x * 1e5)
    is_cast = normed.dtype == "float16" and np.isfinite(normed).all()
    yield is_cast, "the output of LayerNormalization is not cast to float16"
    softmax = keras.layers.Activation("softmax", name="tfamp_act")
    # Its numbers do not tell on every processor: some compute it in float32 inside.
    half = tf.cast(x, "float16")
    graph = tf.function(softmax, autograph=False).get_concrete_function(half).graph
    takes = {o.inputs[0].dtype for o in graph.get_operations() if o.type == "Softmax"}
    yield half.dtype not in takes, "softmax is not computed in float32"
    inputs = keras.Input((16,), name="tfamp_input")
    how = {"kernel_initializer": "ones", "name": "tfamp_head"}
    head = keras.layers.Dense(3, "softmax", **how)
    model = keras.Sequential([inputs, head], name="tfamp")
    loss, sgd = "sparse_categorical_crossentropy", keras.optimizers.SGD(name="tfamp")
    model.compile(LossScaleOptimizer(sgd, name="tfamp_scale"), loss, run_eagerly=True)
    copied = policy_of(pickle.loads(pickle.dumps(model)).layers[-1])
    is_kept = copied is not None and copied.kind is Kind.HEAD
    yield is_kept, "a saved model does not hold what its layers compute in"
    yield model(x).dtype == "float32", "the output of a model is not float32"
    before = model.get_weights()
    model.train_on_batch(x * np.nan, np.array([0, 1]))
    is_same = all(map(np.array_equal, before, model.get_weights()))
    yield is_same, "a training step with a bad batch changes the model"


SELF_TEST = SelfTest()


def _before_call(layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
    if SELF_TEST.is_due and (policy := policy_of(layer)) and policy.settings.is_half:
        tf.zeros(())  # which the call starts anyway
        SELF_TEST.run()
    resolution.before_call(layer, args, kwargs)


HOOKS = (
    PatchSet(
        [
            *layers.patches(layer_dtypes.on_created),
            *layer_dtypes.patches(),
            *calls.patches(_before_call, layer_dtypes.propagate_to_sublayers, remedy),
            *float32_operations.patches(),
            *exact_values.patches(),
            *trainer.compile_patches(before_compile),
            *saved_state.patches(
                rows.describe,
                _load_for_keras,
                lambda layer: layer_dtypes.begin(layer, IN_FORCE.settings),
            ),
        ]
    ),
    *(FIT_HOOKS, TAPE_HOOKS, LOOP_HOOKS, WORKER_HOOKS, CONFIG_HOOKS),
)
Policy.unpickle = staticmethod(unpickled)
BEFORE_RUN.append(resolution.warn_of_open_rules)
BEFORE_TRAINING += [before_training, warn_of_idle_distribution]


def install(settings: PolicySettings) -> None:
    """Installs the hooks for the life of the process; what is unmanaged passes through.

    A HookError says that they do not do what they promise on this Keras.
    """
    if settings.is_half:
        cpus.avoid_broken_amx()
    is_first = not any(patches.installed for patches in HOOKS)
    try:
        for patches in HOOKS:
            patches.install()
        if settings.is_half:
            SELF_TEST.run()
    except BaseException:
        if is_first:
            remove()
        raise


def remove() -> None:
    """Takes all hooks away; models that were made under them are lost."""
    for patches in reversed(HOOKS):
        patches.remove()


def installed() -> tuple[str, ...]:
    """Returns the names of everything in Keras that is replaced now."""
    return tuple(name for patches in PatchSet.known for name in patches.installed)
