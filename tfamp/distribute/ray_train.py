"""The loop of each worker of Ray Train, around a training function of the user's."""

import os
from collections.abc import Callable
from typing import Any

from tfamp.machine.clusters import cluster as cluster_here
from tfamp.records import checks

# Ray sets it for Keras 2, and tf.keras looks at it when it is first used.
_LEGACY = "TF_USE_LEGACY_KERAS"


def ray_loop(
    train_fn: Callable[..., Any], *, every_steps: int = 500
) -> Callable[[dict[str, Any]], None]:
    """Returns the `train_loop_per_worker` of Ray Train's `TensorflowTrainer`.

    Ray's own loop fails with Keras 3. This one removes `TF_USE_LEGACY_KERAS`, which Ray
    sets on its workers, before the training function is loaded, makes the strategy of
    Ray's cluster, and calls `train_fn(strategy, callbacks)`. Give the callbacks to
    `fit`: they keep the training in Ray's checkpoints as `tfamp.callbacks.Resume` does,
    one file for each worker, and report the logs of each epoch. When a worker dies, Ray
    ends the others, starts all again (`FailureConfig(max_failures=...)`), and what
    follows equals bit by bit what would have followed.

    Args:
        train_fn: Builds and compiles a model in `strategy.scope()`, and trains it with
            `callbacks`. What is in `train_loop_config` comes as arguments by name. It
            runs anew after each failure, so it has to seed itself.
        every_steps: Batches between two checkpoints, at least; as many may have to be
            trained again after a crash. Each is copied to Ray's storage while training
            waits. `CheckpointConfig(num_to_keep=2)` limits how many stay there. Ray
            takes about a second to count one; before that the one before is the newest.

    Returns:
        A function of the configuration, for `TensorflowTrainer`.

    Raises:
        TypeError: `train_fn` cannot be called, or `every_steps` is no whole number.
        ValueError: `every_steps` is below 1.
        ImportError: Ray Train is missing.

    Example:
        >>> from ray.train import FailureConfig, RunConfig, ScalingConfig
        ... # doctest: +SKIP
        >>> def train(strategy, callbacks, epochs):
        ...     keras.utils.set_random_seed(0)
        ...     with strategy.scope():
        ...         model = build()
        ...     model.fit(dataset(), epochs=epochs, callbacks=callbacks)
        >>> TensorflowTrainer(  # doctest: +SKIP
        ...     tfamp.distribute.ray_loop(train, every_steps=500),
        ...     train_loop_config={"epochs": 10},
        ...     scaling_config=ScalingConfig(num_workers=4, use_gpu=True),
        ...     run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
        ... ).fit()
    """
    if not callable(train_fn):
        raise TypeError(
            f"`train_fn` is {train_fn!r}, of type {type(train_fn).__name__}; expected "
            "a function of a strategy and a list of callbacks. Pass one."
        )
    every_steps = checks.positive_int("every_steps", every_steps)
    train = checks.require("ray.train", extra="ray", purpose="`ray_loop`")
    cloudpickle = checks.require("ray.cloudpickle", extra="ray", purpose="`ray_loop`")
    # As bytes, since its module may use tf.keras while it is imported.
    pickled = cloudpickle.dumps(train_fn)

    def loop(config: dict[str, Any]) -> None:
        os.environ.pop(_LEGACY, None)
        # From here on, as they use TensorFlow.
        from tfamp.callbacks.resume.ray_checkpoints import RayResume
        from tfamp.distribute.strategies import strategy

        cluster = cluster_here()
        num_workers = train.get_context().get_world_size()
        if cluster.num_workers != num_workers:
            raise RuntimeError(
                f"Ray runs {num_workers} workers, and the environment describes "
                f"{cluster.num_workers}, so each would train alone; expected TF_CONFIG "
                "with all of them. Pass the loop to `TensorflowTrainer`."
            )
        made = strategy(cluster)
        callbacks = [RayResume(every_steps=every_steps)]
        cloudpickle.loads(pickled)(made, callbacks, **config)

    return loop
