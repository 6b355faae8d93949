"""Packages around Keras go on working under a policy, each in a test."""

import keras
import numpy as np
import pytest

import tfamp

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

# What these packages and their own ones warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def managed(monkeypatch, tmp_path):
    """New models are mixed, and what is written lands in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    with tfamp.scope("mixed_float16"):
        yield


def built(units=8):
    layers = [keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def is_mixed(model):
    """Whether the layers compute in float16, under a loss scale."""
    scaled = isinstance(model.optimizer, tfamp.LossScaleOptimizer)
    return scaled and model.layers[0].compute_dtype == "float16"


def test_callbacks_share_the_folder_of_tensorboard_while_training_runs(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing import event_multiplexer

    shown, steps = event_multiplexer.EventMultiplexer(), []

    def look(epoch, logs):
        """Looks as a TensorBoard that runs beside the training does."""
        shown.AddRunsFromDirectory(str(tmp_path))
        shown.Reload()
        runs = shown.Runs().items()
        tags = [(run, tag) for run, found in runs for tag in found["tensors"]]
        steps.append({tag: shown.Tensors(run, tag)[-1].step for run, tag in tags})

    callbacks = [
        tfamp.callbacks.PrecisionMonitor(tmp_path),
        tfamp.callbacks.Throughput(),
        keras.callbacks.TensorBoard(tmp_path),
        keras.callbacks.LambdaCallback(on_epoch_end=look),
    ]
    built().fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    assert [each["loss_scale"] for each in steps] == [4, 8, 12]
    assert [each["epoch_loss"] for each in steps] == [0, 1, 2]
    assert [each["epoch_examples_per_second"] for each in steps] == [0, 1, 2]


def test_mlflow_logs_what_the_monitor_shows(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    experiment = mlflow.create_experiment("e", artifact_location=f"file://{tmp_path}/a")
    with mlflow.start_run(experiment_id=experiment) as run:
        logging = mlflow.keras.MlflowCallback(log_every_epoch=True)
        callbacks = [tfamp.callbacks.PrecisionMonitor(), logging]
        model = built()
        history = model.fit(X, Y, epochs=2, verbose=0, callbacks=callbacks).history
    logged = mlflow.get_run(run.info.run_id).data.metrics
    assert is_mixed(model)
    for name in ("loss", "loss_scale", "skipped_steps"):
        assert logged[name] == pytest.approx(history[name][-1])


def test_the_keras_tuner_searches_among_mixed_models(tmp_path):
    tuner = pytest.importorskip("keras_tuner", reason="keras-tuner is not installed")
    search = tuner.RandomSearch(
        lambda choice: built(choice.Choice("units", [4, 8])),
        objective="val_loss",
        max_trials=2,
        directory=tmp_path,
    )
    search.search(X, Y, validation_data=(X, Y), epochs=1, verbose=0)
    (best,) = search.get_best_models(1)
    assert is_mixed(best)
    lowest = search.oracle.get_best_trials(1)[0].score
    # The weights of its best epoch are read back: not one is lost on the way.
    assert best.evaluate(X, Y, verbose=0) == pytest.approx(lowest, rel=1e-2)


def test_a_preset_of_keras_hub_goes_through_a_local_folder(tmp_path):
    hub = pytest.importorskip("keras_hub", reason="KerasHub is not installed")
    backbone = hub.models.BertBackbone(
        vocabulary_size=30, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=8
    )
    assert backbone.compute_dtype == "float16"
    backbone.save_to_preset(tmp_path / "preset")
    loaded = hub.models.Backbone.from_preset(str(tmp_path / "preset"))
    kept, rows = (
        [
            (row.class_name, row.compute_dtype, row.rule)
            for row in tfamp.assignment(each)
        ]
        for each in (backbone, loaded)
    )
    assert rows == kept
    names = ("token_ids", "segment_ids", "padding_mask")
    tokens = dict.fromkeys(names, np.ones((2, 4), int))
    expected = backbone(tokens)["pooled_output"]
    np.testing.assert_array_equal(loaded(tokens)["pooled_output"], expected)
