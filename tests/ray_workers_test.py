"""Workers of Ray train Keras 3, and go on to the bit when one is killed."""

import json
import os

import keras
import pytest

from tests import ray_program

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
train = pytest.importorskip("ray.train")
pytestmark = [
    # Ray reads options of its own that are deprecated, and closes sockets at the end.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
    ),
    pytest.mark.slow("workers of other launchers are killed in resume_workers_test"),
]


@pytest.fixture(scope="module")
def cluster():
    """A cluster of Ray on this machine, with room for two workers."""
    os.environ["RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING"] = "0"
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=10**8,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def run(folder, **config):
    """Trains on the cluster, and returns what each worker wrote."""
    from ray.train.tensorflow import TensorflowTrainer

    folder.mkdir()
    TensorflowTrainer(
        ray_program.train,
        train_loop_config={"out": str(folder), **config},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            name="digits",
            storage_path=str(folder / "ray"),
            failure_config=train.FailureConfig(max_failures=2),
        ),
    ).fit()
    return [json.loads(p.read_text()) for p in sorted(folder.glob("?.json"))]


@pytest.fixture(scope="module")
def uninterrupted(cluster, tmp_path_factory):
    return run(tmp_path_factory.mktemp("ray") / "never killed")


@pytest.mark.slow
def test_two_workers_of_ray_train_keras_3_under_a_policy(uninterrupted):
    assert len(uninterrupted) == 2
    for each in uninterrupted:
        assert each["keras"] == keras.__version__
        assert each["replicas"] == 2
        assert "bfloat16" in each["dtypes"]
        assert each["notes"] == []
    assert uninterrupted[0] == uninterrupted[1]


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 5])
def test_a_worker_of_ray_is_killed_and_the_result_is_the_same(
    uninterrupted, tmp_path, step
):
    found = run(tmp_path / "killed", kill_at=step)
    assert (tmp_path / "killed" / "killed").exists()
    for mine, theirs in zip(found, uninterrupted, strict=True):
        assert mine["resumed at"] is not None
        assert (mine["digest"], mine["loss"]) == (theirs["digest"], theirs["loss"])
