"""What each task of a faked Slurm step runs; writes what came out as JSON.

`python -m tests.cluster_program OUT`, with the variables of `slurm_variables`.
"""

import json
import sys

UNEVEN = 41  # rows: the last batch has one, and none on the second worker


def slurm_variables(index, num_tasks, ports):
    """Returns what `srun` sets for a task of one node, this machine.

    Args:
        index: Number of the task.
        num_tasks: Tasks of the step.
        ports: As Slurm reserves them, "12001-12002" or "12001,12005".
    """
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(num_tasks),
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_RESV_PORTS": ports,
        "SLURM_PROCID": str(index),
        "SLURM_NODEID": "0",
    }


def main(out):
    """Trains on two workers that Slurm's variables name."""
    import tfamp

    strategy = tfamp.distribute.strategy()
    import tensorflow as tf

    from tests.linear_training import X, Y, inner, linear

    # First, as a `LossScaleOptimizer` brings what workers need along.
    with strategy.scope():
        plain = linear()
        plain.compile(inner(), "mse")
    plain.fit(X[:UNEVEN], Y[:UNEVEN], batch_size=8, shuffle=False, verbose=0)
    with strategy.scope():
        model = linear()
        model.compile(tfamp.LossScaleOptimizer(inner()), "mse")
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    resolver = strategy.cluster_resolver
    results = {
        "kind": type(strategy).__name__,
        "is multi worker": isinstance(
            strategy, tf.distribute.MultiWorkerMirroredStrategy
        ),
        "replicas": strategy.num_replicas_in_sync,
        "task": [resolver.task_type, resolver.task_id],
        "weights": [w.tolist() for w in model.get_weights()],
        "plain weights": [w.tolist() for w in plain.get_weights()],
        "is one": tfamp.distribute.strategy() is strategy,
    }
    with open(out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(sys.argv[1])
