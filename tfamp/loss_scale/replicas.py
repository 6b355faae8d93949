"""How a step goes over replicas: each on its own, all as one, or out of training."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import replicas, trainer
from tfamp.keras_hooks.layers import record_of
from tfamp.keras_hooks.optimizers import in_xla, optimizers_of
from tfamp.keras_hooks.variables import writes_only_if


def ours_of(model: Any) -> list[Any]:
    """Returns the optimizers of a model that are a `LossScaleOptimizer` of tfamp."""
    return [o for o in optimizers_of(model) if hasattr(type(o), "last_step_skipped")]


def either(
    condition: tf.Tensor, yes: Callable[[], None], no: Callable[[], None]
) -> None:
    """Runs one of two functions that write to variables.

    Under XLA both run and the writes of one count.
    """
    if in_xla():
        with writes_only_if(condition):
            yes()
        with writes_only_if(tf.logical_not(condition)):
            no()
    else:
        tf.cond(condition, _giving_nothing(yes), _giving_nothing(no))


def _giving_nothing(write: Callable[[], None]) -> Callable[[], tf.Tensor]:
    """Returns a branch for `tf.cond`, which wants a value of both."""

    def branch() -> tf.Tensor:
        write()
        return tf.constant(0)

    return branch


def first_of(strategy: tf.distribute.Strategy, value: Any) -> Any:
    """Returns the part of a value that this process's first replica holds."""
    return strategy.experimental_local_results(value)[0]


def where_replicas_are_one(do: Callable[..., None], *values: Any) -> None:
    """Runs `do(strategy, *values)` once for all replicas, from inside of each.

    Where a strategy cannot merge its replicas, it runs on each of them.
    """
    strategy = tf.distribute.get_strategy()
    tf.__internal__.distribute.interim.maybe_merge_call(do, strategy, *values)


def on_each_replica(
    strategy: tf.distribute.Strategy, do: Callable[..., None], values: Any = ()
) -> None:
    """Runs `do` on every replica, with the part of `values` that is its own."""

    def run(values: Any) -> None:
        do(values)

    if tf.distribute.in_cross_replica_context():
        strategy.extended.call_for_each_replica(run, args=(values,))
    else:
        run(values)


def stop_if_due(optimizer: Any, after: Sequence[tf.Operation] = ()) -> None:
    """Ends training after too many skipped steps in a row, unless `fit` does.

    The counters are up to date once the operations `after` have run.
    """
    if optimizer.max_consecutive_skips is None or optimizer.leaves_stop_to_caller:
        return
    if tf.executing_eagerly():
        optimizer.raise_if_due()
    elif not in_xla():
        with tf.control_dependencies([*after, *_read_everywhere(optimizer)]):
            now = optimizer.scale_variables.read()  # after the writes of this step
            facts = now.judged, now.scale_before, now.norm, now.finite_norm
            text = tf.strings.format(optimizer.stop_template(), [now.streak, *facts])
            limit = optimizer.max_consecutive_skips
            tf.debugging.Assert(now.streak < limit, [text], summarize=1)


def _read_everywhere(optimizer: Any) -> list[tf.Tensor]:
    """Returns what every replica counts, read: an error overtakes later writes."""
    stored = optimizer.scale_variables
    counted = [
        stored.dynamic_scale,
        stored.step_counter,
        stored.counters,
        stored.levels,
    ]
    if optimizer.accumulates:
        counted += map(optimizer.accumulator, optimizer.accumulated_variables)
        counted.append(optimizer.has_gradient)
    strategy = tf.distribute.get_strategy()
    return [
        part.read_value()
        for variable in (*counted, stored.recent, optimizer.nonfinite.counts)
        for part in strategy.experimental_local_results(variable.value)
    ]


# What `tfamp.distribute.strategy()` made: all models train there as on one device.
STRATEGIES: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()


def weights_replicas(model: keras.Model) -> bool:
    """Returns whether a model has replicas that count by their examples.

    A model of which tfamp knows neither itself, nor its optimizer, nor its strategy
    stays as Keras has it.
    """
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return False
    is_known = record_of(model) is not None or strategy in STRATEGIES
    return is_known or bool(ours_of(model))


def sharing_whole_batch(model: keras.Model, data: Any, share: Any) -> Any:
    """Weights replicas by their whole batches, `data` being a `share` of one's."""
    part = trainer.batch_size_of(data) if weights_replicas(model) else None
    count = None if part is None else tf.round(part / share)
    return replicas.sharing(model, count, may_be_empty=False, reduces_weights=False)
