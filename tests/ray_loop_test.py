"""`ray_loop`: workers of Ray train, and go on to the bit when one is killed."""

import json
import os
import re
import sys

import keras
import pytest

import tfamp
from tests import ray_program
from tests.resume_worker_program import build, dataset
from tfamp.stepping import snapshots

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
train = pytest.importorskip("ray.train")
# Ray reads options of its own that are deprecated, and closes sockets at the end.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)
whole = pytest.mark.whole("test_a_training_goes_on_from_a_checkpoint_to_the_bit")


class Reports:
    """Stands for Ray in this process: the reports, and the newest checkpoint."""

    def __init__(self, monkeypatch, folder, num_workers=1):
        self.made, self.newest, self._folder = [], None, folder
        self._num_workers = num_workers
        monkeypatch.setattr(train, "report", self.report)
        monkeypatch.setattr(train, "get_checkpoint", lambda: self.newest)
        monkeypatch.setattr(train, "get_context", lambda: self)
        monkeypatch.setenv("TF_CONFIG", "")

    def get_experiment_name(self):
        return "digits"

    def get_world_size(self):
        return self._num_workers

    def report(self, metrics, checkpoint=None, **keywords):
        self.made.append((metrics, checkpoint is not None))
        if checkpoint is not None:
            path = self._folder / str(len(self.made))
            checkpoint.to_directory(path)
            self.newest = train.Checkpoint.from_directory(path)


class Stop(keras.callbacks.Callback):
    """Ends training with an error behind its fifth step."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == 5:
            raise InterruptedError


def trained(*callbacks):
    keras.utils.set_random_seed(0)
    model = build()
    model.fit(dataset(), epochs=3, verbose=0, callbacks=callbacks)
    return snapshots.digest(snapshots.take(model)), model.history.history["loss"]


def test_a_training_goes_on_from_a_checkpoint_to_the_bit(monkeypatch, tmp_path):
    reports, found, resumes = Reports(monkeypatch, tmp_path), [], []

    def loop(strategy, callbacks, stops):
        resumes.extend(callbacks)
        found.append(trained(*callbacks, *([Stop()] if stops else [])))

    # The function itself, whose lists are those of this test.
    monkeypatch.setattr(ray.cloudpickle, "dumps", lambda value: value)
    monkeypatch.setattr(ray.cloudpickle, "loads", lambda value: value)
    run = tfamp.distribute.ray_loop(loop, every_steps=2)
    with pytest.raises(InterruptedError):
        run({"stops": True})
    run({"stops": False})
    assert resumes[1].resumed_at == (1, 1)
    assert found == [trained()]
    metrics = [(m["epoch"], m["steps"], kept) for m, kept in reports.made]
    stopped = [(0, 2, True), (0, 3, False), (1, 4, True)]
    gone_on = [(1, 6, False), (2, 6, True), (2, 8, True), (2, 9, False)]
    assert metrics == stopped + gone_on
    assert reports.made[-1][0]["loss"] == found[0][1][-1]


def test_the_variable_of_ray_is_gone_before_the_function_is_loaded(monkeypatch):
    seen = []
    Reports(monkeypatch, None)
    monkeypatch.setattr(
        ray.cloudpickle,
        "loads",
        lambda _: seen.append(os.environ.get("TF_USE_LEGACY_KERAS")) or seen.append,
    )
    run = tfamp.distribute.ray_loop(len)
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    with pytest.raises(TypeError):
        run({})
    assert seen == [None]


def test_workers_that_would_train_alone_are_refused(monkeypatch):
    # As under Ray's trainers for other frameworks, which set no TF_CONFIG.
    Reports(monkeypatch, None, num_workers=3)
    message = "Ray runs 3 workers, and the environment describes 1, so each"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        tfamp.distribute.ray_loop(print)({})


def test_a_checkpoint_of_something_else_is_refused(monkeypatch, tmp_path):
    reports = Reports(monkeypatch, tmp_path)
    (tmp_path / "model.pt").touch()
    reports.newest = train.Checkpoint.from_directory(tmp_path)
    from tfamp.callbacks.resume.ray_checkpoints import RayResume

    with pytest.raises(ValueError, match="holds no state of all workers; expected"):
        trained(RayResume(every_steps=2))


def test_a_checkpoint_that_cannot_be_written_ends_training(monkeypatch, tmp_path):
    Reports(monkeypatch, tmp_path)
    from tfamp.callbacks.resume.ray_checkpoints import RayResume

    def report(metrics, checkpoint=None, **keywords):
        if checkpoint is not None:
            raise OSError("no space left")

    monkeypatch.setattr(train, "report", report)
    message = "step 2 of 'digits' could not be written (no space left)"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        trained(RayResume(every_steps=2))


def test_ray_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train", None)
    message = "`ray_loop` needs ray, which is not installed. Run `pip install 'tfamp[r"
    with pytest.raises(ImportError, match=re.escape(message)):
        tfamp.distribute.ray_loop(print)


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        (("train", 2), TypeError, "`train_fn` is 'train', of type str"),
        ((print, 0), ValueError, "`every_steps`"),
    ],
    ids=["a name", "no steps"],
)
def test_what_cannot_be_a_loop_is_refused(arguments, kind, message):
    train_fn, every_steps = arguments
    with pytest.raises(kind, match=re.escape(message)):
        tfamp.distribute.ray_loop(train_fn, every_steps=every_steps)


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
    """Trains on the cluster; returns what each worker wrote, and Ray's result."""
    from ray.train.tensorflow import TensorflowTrainer

    folder.mkdir()
    trainer = TensorflowTrainer(
        tfamp.distribute.ray_loop(ray_program.train, every_steps=2),
        train_loop_config={"out": str(folder), **config},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            name="digits",
            storage_path=str(folder / "ray"),
            failure_config=train.FailureConfig(max_failures=2),
        ),
    )
    result = trainer.fit()
    return [json.loads(p.read_text()) for p in sorted(folder.glob("?.json"))], result


@pytest.fixture(scope="module")
def uninterrupted(cluster, tmp_path_factory):
    return run(tmp_path_factory.mktemp("ray") / "never killed")


@whole
def test_two_workers_of_ray_train_keras_3_under_a_policy(uninterrupted):
    found, result = uninterrupted
    assert len(found) == 2
    for each in found:
        assert each["legacy"] is None
        assert each["keras"] == keras.__version__
        assert each["replicas"] == 2
        assert "bfloat16" in each["dtypes"]
        assert each["notes"] == []
    assert found[0] == found[1]
    assert result.metrics["loss"] == pytest.approx(found[0]["loss"][1])
    assert result.metrics["epoch"] == 2


KILLS = {
    **{f"step {step}": {"kill_at": step} for step in (1, 4, 5, 8)},
    **{f"save {number}": {"kill_in_save": number} for number in (1, 2, 3)},
}


@whole
@pytest.mark.parametrize("config", KILLS.values(), ids=KILLS)
def test_a_worker_of_ray_is_killed(uninterrupted, tmp_path, config):
    wanted, _ = uninterrupted
    found, _ = run(tmp_path / "killed", **config)
    assert (tmp_path / "killed" / "killed").exists()
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine["digest"] == theirs["digest"]
        assert mine["loss"] == theirs["loss"]
