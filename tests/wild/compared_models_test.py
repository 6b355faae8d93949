"""The model that a comparison saves is the one that was trained, to the bit.

What is measured in between (latencies, memory, each example's metric) must not train it
further: the model writes down itself what `fit` left and what `save` got.
"""

import keras
import numpy as np
import pytest

import tfamp
from tfamp.cli.main import main

pytest.importorskip("cloudpickle", reason="needs the extra `report`")
pytest.importorskip("psutil", reason="needs the extra `report`")

POLICIES = ("float32", "keras:float32")


def model_that_keeps_its_states(folder):
    """Returns what makes a model that writes its states to `folder`, by its policy."""

    def build(seed):
        class Noted(keras.Sequential):
            def note(self, moment):
                values = (*self.weights, *self.optimizer.variables)
                number = len([*folder.glob(f"{moment}*")])
                np.savez(folder / f"{moment}{number}.npz", *map(np.array, values))

            def fit(self, *args, **kwargs):
                history = super().fit(*args, **kwargs)
                self.note("fitted")
                return history

            def save(self, *args, **kwargs):
                self.note("saved")
                return super().save(*args, **kwargs)

        keras.utils.set_random_seed(seed)
        model = Noted(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return build


def states(folder, moment):
    files = sorted(folder.glob(f"{moment}*.npz"))
    return [list(np.load(file).values()) for file in files]


def are_equal(one, other):
    return all(map(np.array_equal, one, other)) and len(one) == len(other)


@pytest.mark.slow
def test_the_saved_model_is_the_trained_one_to_the_bit(tmp_path):
    x = np.random.default_rng(0).normal(size=(240, 6)).astype("float32")
    y = x[:, :3].argmax(axis=1)
    found = tfamp.compare(
        model_that_keeps_its_states(tmp_path),
        (x, y),
        (x[:60], y[:60]),
        policies=POLICIES,
        seeds=1,
        epochs=2,
        batch_size=24,
        latency_batch_sizes=(1, 8),
    )
    assert all(run.is_finished and not run.notes for run in found.runs)
    fitted, saved = states(tmp_path, "fitted"), states(tmp_path, "saved")
    assert len(saved) == len(POLICIES)
    # 2 epochs of 10 steps, and a state that moved.
    trained = [
        state for state in fitted if 20 in [v.item() for v in state if v.ndim == 0]
    ]
    assert len(trained) == len(POLICIES)
    for state in saved:
        assert any(are_equal(state, each) for each in trained)


def test_compare_has_no_profile_to_take(capsys):
    assert main(["compare", "recipes.train_digits:build", "--profile"]) != 0
    assert "profile" in capsys.readouterr().err
