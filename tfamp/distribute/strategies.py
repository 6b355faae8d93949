"""The strategy that suits the cluster and the devices, and why it does."""

import re

import tensorflow as tf
from absl import logging

from tfamp.keras_hooks.workers import WORKER_HOOKS
from tfamp.loss_scale.fit_hooks import FIT_HOOKS, STRATEGIES
from tfamp.machine.clusters import Cluster
from tfamp.machine.clusters import cluster as cluster_here
from tfamp.records import checks

# What TensorFlow says where its context has started without the workers.
_IS_LATE = re.compile("at program startup|already configured")
# Two of one process would take each other's messages, so each cluster has one.
_OF_WORKERS: dict[Cluster, tf.distribute.Strategy] = {}


def strategy(cluster: Cluster | str | None = "auto") -> tf.distribute.Strategy:
    """Returns the `tf.distribute.Strategy` that suits the cluster and the devices.

    Several workers: `MultiWorkerMirroredStrategy`, which waits for all of them. One
    process with several GPUs: `MirroredStrategy`. Else the default one. Call it ahead
    of any other use of TensorFlow; build and compile the model inside of its `scope()`.

    Args:
        cluster: "auto" asks `tfamp.distribute.cluster()`; a `Cluster`; None trains in
            this process alone, whatever the environment says.

    Raises:
        TypeError: `cluster` is none of these.
        ValueError: The environment describes half a cluster.
        RuntimeError: With several workers, after TensorFlow has run something.

    Example:
        >>> strategy(cluster=None).num_replicas_in_sync
        1
    """
    if isinstance(cluster, str):
        checks.choice("cluster", cluster, ("auto",))
        cluster = cluster_here()
    elif cluster is None:
        cluster = Cluster("none")
    elif not isinstance(cluster, Cluster):
        raise TypeError(
            f"`cluster` is {cluster!r}, of type {type(cluster).__name__}; expected "
            "'auto', None or a `Cluster`. Pass what `tfamp.distribute.cluster()` gives."
        )
    # The physical ones: to list the logical ones would start them.
    num_gpus = len(tf.config.get_visible_devices("GPU"))
    if cluster.num_workers > 1:
        made = _OF_WORKERS.get(cluster) or _of_workers(cluster, num_gpus)
        _OF_WORKERS[cluster] = made
    elif num_gpus > 1:
        logging.info("tfamp.distribute: MirroredStrategy, for %d GPUs here.", num_gpus)
        made = tf.distribute.MirroredStrategy()
    else:
        logging.info("tfamp.distribute: the default strategy, for one process here.")
        return tf.distribute.get_strategy()
    # Any model trains in it as on one device, managed by tfamp or not.
    WORKER_HOOKS.install()
    FIT_HOOKS.install()
    STRATEGIES.add(made)
    return made


def _of_workers(cluster: Cluster, num_gpus: int) -> tf.distribute.Strategy:
    kind = tf.distribute.experimental.CommunicationImplementation
    implementation = kind.NCCL if num_gpus else kind.RING
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": [*cluster.workers]}),
        task_type="worker",
        task_id=cluster.index,
        num_accelerators={"GPU": num_gpus},
        rpc_layer="grpc",
    )
    what = f"{cluster}. Gradients go by {implementation.value} ({num_gpus} GPUs here)."
    logging.info("tfamp.distribute: MultiWorkerMirroredStrategy, %s", what)
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=resolver,
            communication_options=tf.distribute.experimental.CommunicationOptions(
                implementation=implementation
            ),
        )
    except (RuntimeError, ValueError) as error:
        if not _IS_LATE.search(str(error)):
            raise
        raise RuntimeError(
            "`tfamp.distribute.strategy()` comes too late: TensorFlow has run "
            f"something already ({checks.first_line(error)}); expected to be the first "
            "thing that it does in this process, once. Move the call to the top of the "
            "program."
        ) from error
