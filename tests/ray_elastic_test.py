"""`ray_loop` with `num_workers=(min, max)`: a node is lost, and fewer workers go on."""

import json
import threading

import pytest

import tfamp
from tests import ray_program

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
train = pytest.importorskip("ray.train")
pytestmark = [
    # Ray reads options of its own that are deprecated, and closes sockets at the end.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
    ),
    pytest.mark.whole("test_a_training_goes_on_from_a_checkpoint_to_the_bit"),
]


@pytest.fixture
def nodes(monkeypatch):
    """A cluster of two nodes on this machine with a worker each; gives the second."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING", "0")
    options = {"num_cpus": 1, "object_store_memory": 10**8}
    head = {**options, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(**options)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def steps_in(folder):
    """Returns what each worker noted of its steps: replicas, step, notes."""
    path = folder / "steps"
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def test_what_is_left_of_a_cluster_goes_on_and_says_that_it_is_another(nodes, tmp_path):
    from ray.train.tensorflow import TensorflowTrainer

    cluster, second = nodes
    is_over = threading.Event()

    def lose_a_node():
        while not is_over.wait(0.2):
            if any(step >= 10 for _, step, _ in steps_in(tmp_path)):
                cluster.remove_node(second, allow_graceful=False)
                return

    losing = threading.Thread(target=lose_a_node)
    losing.start()
    try:
        result = TensorflowTrainer(
            tfamp.distribute.ray_loop(ray_program.train_slowly, every_steps=4),
            train_loop_config={"out": str(tmp_path), "epochs": 20},
            scaling_config=train.ScalingConfig(num_workers=(1, 2)),
            run_config=train.RunConfig(
                name="digits",
                storage_path=str(tmp_path / "ray"),
                failure_config=train.FailureConfig(max_failures=3),
            ),
        ).fit()
    finally:
        is_over.set()
        losing.join()
    assert result.metrics["epoch"] == 19
    together = [step for replicas, step, _ in steps_in(tmp_path) if replicas == 2]
    alone = [step for replicas, step, _ in steps_in(tmp_path) if replicas == 1]
    # Not from the beginning, and each step to the end once.
    assert 4 < alone[0] <= max(together) + 1
    assert alone == list(range(alone[0], 61))
    *_, (_, _, notes) = steps_in(tmp_path)
    assert any("not to the bit" in n and "it had 2 workers" in n for n in notes)
