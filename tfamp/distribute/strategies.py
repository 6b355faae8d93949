"""The strategy that suits the cluster and the devices, and why it does."""

import os
import re

import tensorflow as tf
from absl import logging

from tfamp.keras_hooks.workers import WORKER_HOOKS
from tfamp.loss_scale.fit_hooks import FIT_HOOKS
from tfamp.loss_scale.replicas import STRATEGIES
from tfamp.machine.clusters import Cluster, alone_in_job
from tfamp.machine.clusters import cluster as cluster_here
from tfamp.records import checks

_COMMUNICATIONS = ("auto", "nccl", "ring")
# What TensorFlow says where its context has started without the workers.
_IS_LATE = re.compile("at program startup|already configured")
# Two of one process would take each other's messages, so each cluster has one.
_OF_WORKERS: dict[tuple[Cluster, bool], tf.distribute.Strategy] = {}


def strategy(
    cluster: Cluster | str | None = "auto", communication: str = "auto"
) -> tf.distribute.Strategy:
    """Returns the `tf.distribute.Strategy` that suits the cluster and the devices.

    Several workers: `MultiWorkerMirroredStrategy`, which waits for all of them. One
    process with several GPUs: `MirroredStrategy`. Else the default strategy, which
    changes nothing. One line of log says which, and by what gradients are added up.
    Call it ahead of any other use of TensorFlow; build and compile the model inside
    of its `scope()`. Any model trains there as on one device, after `tfamp.enable` or
    without. With several workers a second call gives the same strategy.

    Args:
        cluster: "auto" asks `tfamp.distribute.cluster()`; a `Cluster`; None trains in
            this process alone, whatever the environment says.
        communication: What adds gradients up: "nccl" (GPUs of NVIDIA), "ring" (sockets,
            for any device), or "auto": NCCL with GPUs, else a ring. All workers have
            to use the same. One process with several GPUs takes "auto" or "nccl".

    Returns:
        The strategy.

    Raises:
        TypeError: `cluster` is none of these.
        ValueError: The environment describes half a cluster, `communication` is
            unknown, or it asks for GPUs that are not there.
        RuntimeError: Inside of a strategy's scope, or, with several workers, after
            TensorFlow has run something.

    Example:
        >>> strategy(cluster=None).num_replicas_in_sync
        1
    """
    checks.choice("communication", communication, _COMMUNICATIONS)
    if isinstance(cluster, str):
        checks.choice("cluster", cluster, ("auto",))
        cluster = cluster_here()
        alone = alone_in_job(os.environ)
        if alone is not None and not cluster.workers:
            logging.info("tfamp.distribute: %s", alone)
    elif cluster is None:
        cluster = Cluster("none")
    elif not isinstance(cluster, Cluster):
        raise TypeError(
            f"`cluster` is {cluster!r}, of type {type(cluster).__name__}; expected "
            "'auto', None or a `Cluster`. Pass what `tfamp.distribute.cluster()` gives."
        )
    if tf.distribute.has_strategy():
        kind = type(tf.distribute.get_strategy()).__name__
        raise RuntimeError(
            f"Called inside the scope of a {kind}; expected none. Make the strategy "
            "first, and the model in its scope."
        )
    # The physical ones: to list the logical ones would start them.
    num_gpus = len(tf.config.get_visible_devices("GPU"))
    if communication == "nccl" and not num_gpus:
        raise ValueError(
            "`communication` is 'nccl', and TensorFlow sees no GPU; expected a GPU of "
            "NVIDIA on each worker. Pass 'auto' or 'ring'."
        )
    if cluster.num_workers > 1:
        return _of_workers(cluster, communication, num_gpus)
    if num_gpus > 1:
        return _of_gpus(communication, num_gpus)
    device = "one GPU" if num_gpus else "no GPU"
    logging.info(
        "tfamp.distribute: the default strategy, as there is one process and %s; "
        "nothing is added up.",
        device,
    )
    return tf.distribute.get_strategy()


def _of_workers(
    cluster: Cluster, communication: str, num_gpus: int
) -> tf.distribute.Strategy:
    uses_nccl = communication == "nccl" or (communication == "auto" and num_gpus > 0)
    if (cluster, uses_nccl) in _OF_WORKERS:
        return _OF_WORKERS[cluster, uses_nccl]
    kind = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=kind.NCCL if uses_nccl else kind.RING
    )
    config = cluster.to_tf_config()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(config["cluster"]),
        task_type=config["task"]["type"],
        task_id=config["task"]["index"],
        num_accelerators={"GPU": num_gpus},
        rpc_layer="grpc",
    )
    why = f"`communication={communication!r}`"
    if communication == "auto":
        why = f"{num_gpus} GPU(s) here" if num_gpus else "no GPU here"
    logging.info(
        "tfamp.distribute: MultiWorkerMirroredStrategy, %s. Gradients go by %s (%s).",
        cluster,
        "NCCL" if uses_nccl else "ring",
        why,
    )
    if num_gpus > 1 and cluster.local_workers > 1:
        logging.warning(
            "%d workers share the host of %s, and this one sees %d GPUs. Where the "
            "others see the same ones, they take each other's memory: give each its "
            "own (`srun --gpus-per-task=1`, or CUDA_VISIBLE_DEVICES).",
            cluster.local_workers,
            cluster.address,
            num_gpus,
        )
    try:
        made = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=resolver, communication_options=options
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
    _OF_WORKERS[cluster, uses_nccl] = _exact(made)
    return made


def _exact(made: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """Has any model train in a strategy as on one device, managed by tfamp or not."""
    WORKER_HOOKS.install()
    FIT_HOOKS.install()
    STRATEGIES.add(made)
    return made


def _of_gpus(communication: str, num_gpus: int) -> tf.distribute.Strategy:
    if communication == "ring":
        raise ValueError(
            f"`communication` is 'ring', with one process and {num_gpus} GPUs; "
            "expected 'auto' or 'nccl', as MirroredStrategy takes no ring of real "
            "GPUs. Pass 'auto'."
        )
    logging.info(
        "tfamp.distribute: MirroredStrategy, as there is one process and %d GPUs. "
        "Gradients go by %s.",
        num_gpus,
        "NCCL, as asked" if communication == "nccl" else "what TensorFlow takes: NCCL",
    )
    if communication == "nccl":
        nccl = tf.distribute.NcclAllReduce()
        return _exact(tf.distribute.MirroredStrategy(cross_device_ops=nccl))
    return _exact(tf.distribute.MirroredStrategy())
