"""Every tool takes every form of data that `fit` takes, and sees the same numbers."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.data import _examples
from tfamp.stepping.arguments import dataset_of
from tfamp.trials.parcel import as_fit_takes_it
from tfamp.trials.parcel import batch_of as tried_batch
from tfamp.trials.run_records import Run
from tfamp.trials.worker import train

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4))  # float64, as NumPy makes it
Y = X[:, :1] * 2
WEIGHTS = np.linspace(0.5, 1.5, 40)
PARTS = [X.astype("float32"), Y.astype("float32"), WEIGHTS.astype("float32")]
BATCHES = [tuple(part[i : i + 8] for part in PARTS) for i in range(0, 40, 8)]


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        return [part.astype("float64") for part in BATCHES[index]]


FORMS = {
    "dataset": lambda: tf.data.Dataset.from_tensor_slices(tuple(PARTS)).batch(8),
    "pipeline": lambda: tfamp.data.Pipeline.from_dataset(
        tf.data.Dataset.from_tensor_slices(tuple(PARTS))
    ).batch(8),
    "PyDataset": lambda: Sequence(workers=2),
    "generator": lambda: (batch for batch in itertools.cycle(BATCHES)),
    "arrays": lambda: (X, Y, WEIGHTS),
    "tensors": lambda: [tf.constant(part) for part in PARTS],
}


def made():
    keras.utils.clear_session()  # names count the models before
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="linear")
    model.compile("sgd", "mse")
    return model


TOOLS = {
    "prove": lambda model, data: tfamp.prove(model, data, batch_size=8).to_json(),
    "lint": lambda model, data: str(tfamp.lint(model, data=data, batch_size=8)),
    "bottleneck": lambda model, data: (
        tfamp.data.bottleneck(model, data, seconds=0.01, batch_size=8).batch_size
    ),
}


@pytest.mark.quick("prove")
@pytest.mark.parametrize("tool", TOOLS)
def test_every_form_gives_the_same_answer(tool):
    answers = {name: TOOLS[tool](made(), form()) for name, form in FORMS.items()}
    assert all(answer == answers["dataset"] for answer in answers.values()), answers


@pytest.mark.quick("pipeline", "generator")
@pytest.mark.parametrize("form", FORMS)
def test_a_search_for_batches_and_a_comparison_take_it(form):
    batch = tried_batch(FORMS[form]())
    assert len(batch.parts) == 3
    assert batch.num_examples == (None if form == "generator" else 40)
    assert batch.size == (32 if form in ("arrays", "tensors") else 8)
    if form != "generator":
        batch_size = 8 if form in ("arrays", "tensors") else None
        given = {"run": Run("float32", 0), "epochs": 1, "batch_size": batch_size}
        found, *_ = train(made(), as_fit_takes_it(FORMS[form]()), None, **given)
        assert (found.num_steps, found.batch_size) == (5, 8)


def test_lengths_that_vary_stay_open_and_a_generator_goes_on_where_it_is():
    made = (tf.zeros((2, n)) for n in (3, 4, 5))
    dataset = dataset_of(made)
    assert dataset.element_spec.shape == (None, None)
    assert [len(x[0]) for x in dataset.take(1)] == [3]
    assert [len(x[0]) for x in dataset] == [3, 4, 5]
    with pytest.raises(tf.errors.InvalidArgumentError, match="ended after 3 batches"):
        next(iter(dataset))


@pytest.mark.parametrize("data", [made(), iter(BATCHES), X], ids=["model", "it", "x"])
def test_what_fit_does_not_take_is_refused(data):
    message = f"`data` is of type {type(data).__name__}; expected what `fit` takes"
    with pytest.raises(TypeError, match=re.escape(message)):
        dataset_of(data)


@pytest.mark.parametrize("form", [np.asarray, tf.data.Dataset.from_tensor_slices])
@pytest.mark.parametrize(("megabytes", "rows"), [(0, 10_000), (1, 40), (20, 2)])
def test_data_are_read_in_parts_of_at_most_16_megabytes(form, megabytes, rows):
    width = megabytes * 2**20 // 4 or 1
    data = form(np.ones((rows, width), np.float32))
    lengths = [len(part["x"]) for part in _examples.read("data", data).read()]
    assert sum(lengths) == rows
    assert max(lengths) == {0: 4096, 1: 16, 20: 1}[megabytes]
